"""Reading a JSON body: each value checked for type and bounds, each error naming its parameter.

Pure. JSON's ``null`` means "not given" everywhere. Booleans are not numbers, numbers not strings, NaN and infinities no JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from meshd.errors import CallerError

MAX_DEPTH: Final = 64
"""Far more than any request has, and far less than the interpreter's stack, of which the caller may have used most already."""

_TOO_DEEP: Final = f"the body is nested too deeply: at most {MAX_DEPTH} lists and objects may lie inside one another"


def read_json(body: bytes) -> Fields:
    """The object in a request's body. Raises CallerError."""
    try:
        document = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise CallerError(_TOO_DEEP) from None
    except ValueError as error:
        raise CallerError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise CallerError("the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:  # counted first, for most bodies are long and flat
        _check_depth(document)
    return Fields(document)


def _check_depth(document: object) -> None:
    """Raise CallerError for what could be parsed, but not be walked again by whoever writes it into a message."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _items(outer) if isinstance(inner, list | dict)]
        if not level:
            return
    raise CallerError(_TOO_DEEP)


def _items(container: object) -> Iterable[object]:
    if isinstance(container, dict):
        return container.values()
    return container if isinstance(container, list) else ()


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def shown(value: object) -> str:
    """A value as JSON, short enough for a message."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except ValueError:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def checked_text(value: object, param: str) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise CallerError(f"{param} must be a string, not {shown(value)}", param=param)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise CallerError(f"{param} holds half of a surrogate pair, which is no character", param=param) from None
    return value


class Fields:
    """A JSON object, read field by field."""

    def __init__(self, document: Mapping[str, Any], prefix: str = "") -> None:
        self._document = document
        self._prefix = prefix

    def get(self, name: str) -> Any:
        """The raw value; None when absent."""
        return self._document.get(name)

    def given(self, name: str) -> bool:
        return self._document.get(name) is not None

    def param(self, name: str) -> str:
        """The name as errors spell it."""
        return self._prefix + name

    def text(self, name: str, default: str = "") -> str:
        value = self.get(name)
        return default if value is None else checked_text(value, self.param(name))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CallerError(f"{self.param(name)} must be true or false, not {shown(value)}", param=self.param(name))
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise CallerError(
                f"{self.param(name)} must be a whole number from {low} to {high}, not {shown(value)}",
                param=self.param(name),
            )
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not fits or not math.isfinite(value):
            raise CallerError(
                f"{self.param(name)} must be a number from {low:g} to {high:g}, not {shown(value)}",
                param=self.param(name),
            )
        return float(value)

    def choice(self, name: str, options: tuple[str, ...]) -> str | None:
        value = self.get(name)
        if value is not None and value not in options:
            names = " or ".join(options)
            raise CallerError(f"{self.param(name)} must be {names}, not {shown(value)}", param=self.param(name))
        return value if isinstance(value, str) else None

    def strings(self, name: str, most: int) -> tuple[str, ...]:
        """A list of strings; one string counts as a list of one."""
        value = self.get(name)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or len(items) > most:
            raise CallerError(f"{self.param(name)} must be a list of at most {most} strings", param=self.param(name))
        return tuple(checked_text(item, self.param(name)) for item in items)

    def ids(self, name: str, vocab_size: int) -> tuple[int, ...] | None:
        """Token ids inside the vocabulary; None when absent."""
        value = self.get(name)
        return None if value is None else token_ids(value, self.param(name), vocab_size)

    def object(self, name: str) -> Fields:
        """A nested object; empty when absent."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise CallerError(f"{self.param(name)} must be an object, not {shown(value)}", param=self.param(name))
        return Fields(value, prefix=self.param(name) + ".")


def token_ids(value: object, param: str, vocab_size: int) -> tuple[int, ...]:
    """Checked token ids."""
    if not isinstance(value, list):
        raise CallerError(f"{param} must be a list of token ids, not {shown(value)}", param=param)
    if all(type(item) is int and 0 <= item < vocab_size for item in value):
        return tuple(value)
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int):
            raise CallerError(f"{param}[{index}] must be a token id, not {shown(item)}", param=param)
        if not 0 <= item < vocab_size:
            raise CallerError(
                f"{param}[{index}] is {shown(item)}; the vocabulary ends before {vocab_size}", param=param
            )
    return tuple(value)
