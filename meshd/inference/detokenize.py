"""From token ids to the text a client may see: incremental detokenising and stop strings, pure.

Decoding token by token is wrong: one character may take several tokens, and some decoders look at a token's neighbours. So
the difference of two decodes over a small suffix of the ids is taken, and a trailing U+FFFD is held back while its character
can still complete. The decoding itself is somebody else's: `Detokenizer.add` says which id lists to decode,
`Detokenizer.feed` takes their texts.

Invariants: the deltas, joined, are the one-shot decode cut before the first stop string, whatever the division into feeds
(tokenizers with byte fallback excepted, see `HELD`); no delta ends with a U+FFFD that a later token could still complete;
text that could be the beginning of a stop string is held back; nothing after a stop string is ever returned.
"""

from __future__ import annotations

from collections.abc import Sequence

HELD = 3
"""Trailing U+FFFD held back. Byte-level decoders show an incomplete character as one of them; decoders with byte fallback
show one per byte, and a UTF-8 character lacks at most its fourth byte after three. (The latter also turn a complete character
to U+FFFD while the next one is incomplete: such a text does not extend what was shown, and waits.)"""

_CONTEXT = (
    6  # ids kept in front of new ones: enough for a character of single bytes and for a leading space to be decided
)
_SHIFT = 16  # a window longer than this is shortened when its text is complete
_FORCE = 64  # after so many feeds without a complete text it is taken as it is: bytes that are no text at all

REPLACEMENT = "\ufffd"


class StopStrings:
    """Cuts text before the first stop string, across any division into pieces.

    Of several stop strings the one that *ends* first wins (the longer one among those): that is what a reader who sees the
    text character by character decides, so the division into tokens cannot matter.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show now."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            _, at, self.hit = min(found)
            self._held = ""
            return held[:at]
        keep = max(_overlap(held, stop) for stop in self._stops)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def finish(self) -> str:
        """What was held back: no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Detokenizer:
    """The text of one answer. Use: ``delta = d.feed([await text.decode(ids) for ids in d.add(new_ids)])``; at the end
    ``d.finish()``. ``stopped`` says that a stop string was met: what follows is not wanted."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = StopStrings(stops)
        self._ids: list[int] = []  # the window: ids whose text may still matter
        self._shown: str | None = ""  # the text of the window that was released; None: to be asked for
        self._known = 0  # how many ids of the window `_shown` stands for, when it is None
        self._text = ""  # the text of the whole window
        self._waiting = 0  # feeds since the text was last complete

    @property
    def stopped(self) -> bool:
        return self._stops.hit is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return self._stops.hit

    def add(self, ids: Sequence[int]) -> list[list[int]]:
        """Take new ids; returns the id lists whose texts `feed` wants, in order."""
        self._ids.extend(ids)
        wanted = [list(self._ids)]
        if self._shown is None:
            wanted.insert(0, self._ids[: self._known])
        return wanted

    def feed(self, texts: Sequence[str]) -> str:
        """Take the texts asked for; returns new text, possibly empty."""
        *before, self._text = texts
        if self._shown is None:
            (self._shown,) = before
        replaced = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        delta = self._release(len(self._text) - min(replaced, HELD))
        if self._shown == self._text:
            self._waiting = 0
            if len(self._ids) > _SHIFT:
                self._ids = self._ids[-_CONTEXT:]
                self._shown, self._known = None, len(self._ids)
        else:
            self._waiting += 1
            if self._waiting >= _FORCE:
                delta += self._release(len(self._text))
                self._ids, self._shown, self._text, self._waiting = [], "", "", 0
        return self._stops.push(delta)

    def finish(self) -> str:
        """The rest: an incomplete character as U+FFFD, text held back for a stop string that never came."""
        rest = self._release(len(self._text)) if self._shown is not None else ""
        tail = self._stops.push(rest)
        return tail if self.stopped else tail + self._stops.finish()

    def _release(self, end: int) -> str:
        shown = self._shown or ""
        text = self._text[:end]
        if not text.startswith(shown):
            return ""
        self._shown = text
        return text[len(shown) :]
