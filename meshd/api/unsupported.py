"""Parameters of other servers that would change the answer and are not supported here: refused by name, never ignored.

Pure. Whatever is in no table of this program is ignored; what is in this one may only say what is done anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from meshd.api.fields import Fields, shown
from meshd.errors import UnsupportedParameter


def _off(value: object) -> bool:
    """Also 0 and 0.0, which equal False."""
    return value in ([], {}, "", False)


def _on(value: object) -> bool:
    return value is True


def _one(value: object) -> bool:
    return value == 1 and not isinstance(value, bool)


def _free_choice(value: object) -> bool:
    return value in ("none", "auto")


# What each may be without changing the answer (null always may).
_HARMLESS: Final[dict[str, Callable[[object], bool]]] = {
    # OpenAI's
    **dict.fromkeys(("tools", "functions", "logit_bias", "audio", "echo", "suffix"), _off),
    **dict.fromkeys(("tool_choice", "function_call"), _free_choice),
    **dict.fromkeys(("n", "best_of"), _one),
    "response_format": lambda value: isinstance(value, dict) and value.get("type") == "text",
    "modalities": lambda value: value == ["text"],
    "web_search_options": lambda _value: False,
    # which tokens may come, and where the answer ends
    **dict.fromkeys(("stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors"), _off),
    **dict.fromkeys(("min_tokens", "ignore_eos", "include_stop_str_in_output", "use_beam_search"), _off),
    **dict.fromkeys(("grammar", "json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), _off),
    "structured_outputs": _off,
    # how the prompt is made
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message", "documents"), _off),
    "add_generation_prompt": _on,
    # other ways to draw
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability"), _off),
    "typical_p": _one,
}


def refuse_unsupported(fields: Fields) -> None:
    """Raise UnsupportedParameter for the first parameter that would change the answer."""
    for name, harmless in _HARMLESS.items():
        value = fields.get(name)
        if value is not None and not harmless(value):
            raise UnsupportedParameter(f"{name} = {shown(value)} is not supported here", param=name)
