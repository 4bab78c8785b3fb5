"""A model's tokenizer: text to ids and back, with what the files beside it say about begin and end tokens.

**Message text never becomes a control token.** Where a message spells one (``<|im_end|>``), a token of our own, random for
each process, is put inside it before the template sees it. The tokenizer finds added tokens before anything else, so it splits
at ours, reads the two halves as ordinary text, and ours is taken out of the ids. Everything else is encoded as one string, so
for text without control tokens the ids are exactly those of ``apply_chat_template(tokenize=True)``.

Only this worker sees `tokenizers`. Errors: CallerError (messages), ModelRefused (files that cannot be used).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from meshd.errors import CallerError, ModelRefused
from meshd.inference.text_worker.template import ChatTemplate, plain_messages

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTROL_SHAPE = re.compile(r"<\|.*\|>", re.DOTALL)  # what chat markup looks like, even if not declared special
_MAX_JSON_BYTES = 256 << 20


class TextModel:
    """Tokenizer, template and end tokens of the model in ``folder``."""

    def __init__(self, folder: Path) -> None:
        config = _json(folder / "tokenizer_config.json")
        self._fast = _load(folder / "tokenizer.json")
        # older folders name the special tokens in a file of their own
        self._special = _named(_json(folder / "special_tokens_map.json")) | _named(config)
        _declare(self._fast, config, self._special.values())
        self._template, self._template_fault = _template(folder, config, self._special)
        self._add_bos: bool | None = config.get("add_bos_token")
        self._bos = self._id(self._special.get("bos_token"))
        self.eos_ids = self._declared_end_ids(folder)
        self._splitter = f"\ue000{secrets.randbelow(10**18):018d}\ue001"
        self._control = self._control_pattern()
        self._fast.add_special_tokens([AddedToken(self._splitter, normalized=False, special=True)])
        self._splitter_id = self._fast.token_to_id(self._splitter)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of raw text, with the begin token where the tokenizer adds one."""
        ids = self._ids(text if special else self._masked(text), add_special_tokens=True)
        if self._bos is not None and self._add_bos is not None:
            while ids and ids[0] == self._bos:
                ids = ids[1:]
            if self._add_bos:
                ids = [self._bos, *ids]
        return ids

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn. The template writes the begin token, if there is one."""
        if self._template is None:
            raise CallerError(self._template_fault, param="messages")
        prepared = [self._masked_all(message) for message in plain_messages(messages)]
        return self._ids(self._template.render(prepared), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out."""
        return str(self._fast.decode(ids, skip_special_tokens=True))

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return [i for i in ids if i != self._splitter_id]

    def _masked(self, text: str) -> str:
        return self._control.sub(lambda found: found[0][:1] + self._splitter + found[0][1:], text)

    def _masked_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._masked(value)
        if isinstance(value, Mapping):
            return {key: self._masked_all(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._masked_all(item) for item in value]
        return value

    def _control_pattern(self) -> re.Pattern[str]:
        control = {
            token.content
            for i, token in self._fast.get_added_tokens_decoder().items()
            if token.special or i in self.eos_ids or _CONTROL_SHAPE.fullmatch(token.content)
        }
        # The longest first, so that a token that begins another is not split in its place.
        return re.compile("|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)) or r"(?!)")

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._fast.token_to_id(token)

    # --- end tokens ---------------------------------------------------------------------------------------------------

    def _declared_end_ids(self, folder: Path) -> frozenset[int]:
        """The configs' and the tokenizer's own: any of them may be wrong or missing in a checkpoint, and a model that is
        never stopped talks to itself."""
        own = self._id(self._special.get("eos_token"))
        return frozenset(config_end_ids(folder)) | (frozenset() if own is None else {own})

    def find_turn_end(self) -> frozenset[int]:
        """All end tokens, now with the one that the template writes after an assistant's turn. Runs the template."""
        turn_end = self._turn_end()
        if turn_end is not None:
            self.eos_ids |= {turn_end}
            self._control = self._control_pattern()
        return self.eos_ids

    def _turn_end(self) -> int | None:
        if self._template is None:
            return None
        mark = "the assistant answered"
        turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": mark}]
        try:
            text = self._template.render(turn, add_generation_prompt=False)
        except CallerError:
            return None
        _, found, rest = text.rpartition(mark)
        ids = self._fast.encode(rest.lstrip(), add_special_tokens=False).ids if found else []
        added = self._fast.get_added_tokens_decoder()
        if not ids or ids[0] not in added or (ids[0] == self._bos and not _shared(self._special)):
            return None
        return int(ids[0])


def config_end_ids(folder: Path) -> list[int]:
    """What the configs call the end."""
    config = _json(folder / "config.json")
    return [
        *_ids_of(config.get("eos_token_id")),
        *_ids_of(_mapping(config.get("text_config")).get("eos_token_id")),
        *_ids_of(_json(folder / "generation_config.json").get("eos_token_id")),
    ]


def _shared(special: Mapping[str, str]) -> bool:
    """True when one token both begins and ends."""
    return special.get("bos_token") == special.get("eos_token")


def _load(path: Path) -> Any:
    try:
        fast = Fast.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for anything it cannot read
        raise ModelRefused(f"{path.name} cannot be used: {error}") from error
    # What it was last trained with is stored with it, and would cut prompts off or fill them up.
    fast.no_truncation()
    fast.no_padding()
    return fast


def _declare(fast: Any, config: Mapping[str, Any], named: Iterable[str]) -> None:
    """Add the tokens that only the config declares, as the Hub's own loader does."""
    present = {token.content for token in fast.get_added_tokens_decoder().values()}
    declared = sorted(_mapping(config.get("added_tokens_decoder")).items(), key=lambda item: int(item[0]))
    for _, entry in declared:
        if entry["content"] not in present:
            fast.add_tokens([AddedToken(**{k: v for k, v in entry.items() if not k.startswith("__")})])
            present.add(entry["content"])
    for token in named:
        if token not in present:
            fast.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            present.add(token)


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _template(folder: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> tuple[ChatTemplate | None, str]:
    """The template, or why there is none."""
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        source = beside.read_text("utf-8")
    elif source is None:
        source = _json(folder / "chat_template.json").get("chat_template")
    if not isinstance(source, str):
        return None, "this model has no chat template: use /v1/completions"
    try:
        return ChatTemplate(source, special), ""
    except CallerError as error:
        return None, error.message


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelRefused(f"{path.name} is above {_MAX_JSON_BYTES >> 20} MB")
        return dict(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise ModelRefused(f"{path.name} cannot be read: {error}") from error


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _ids_of(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int]
