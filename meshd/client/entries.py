"""The entries of a room, what they say when they fail, and how a document is got from whichever of them gives it.

Owns which of the entries is asked first and which failures another entry may do better with. Pure: it must not know how a
request is sent. Raises RequestFailed, NoEntry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

from meshd.client.shapes import DOCUMENTS, ERROR, misfit
from meshd.errors import MeshdError, PeerError

DEFAULT_URL: Final = "http://127.0.0.1:8090"
# Another entry may do better; other statuses are the caller's fault.
_ELSEWHERE: Final = frozenset({429, 502, 503, 504})

Read = TypeVar("Read")


class RequestFailed(MeshdError):
    """The room's own error, as it said it: ``code``, ``status`` and the whole error object. ``waited_s``: how long the entry
    had been silent before it said so."""

    def __init__(self, status: int, error: Mapping[str, Any], *, waited_s: float = 0.0) -> None:
        param = error.get("param")
        super().__init__(str(error.get("message") or f"HTTP {status}"), param=param if isinstance(param, str) else None)
        self.http_status = status
        self.error = dict(error)
        self.waited_s = waited_s

    @property
    def final(self) -> bool:
        """No other entry would say anything else."""
        return self.http_status not in _ELSEWHERE


class NotMeshd(RequestFailed):
    """Another program answered, or meshd's words did not come through as they were. ``what`` was found at ``url``."""

    def __init__(self, url: str, status: int, what: str) -> None:
        super().__init__(status, {"message": f"{url}: HTTP {status}, {what}: is this meshd?"})

    @property
    def final(self) -> bool:
        return False  # the other entries may be what they should


class NoEntry(PeerError):
    """None of the entries could be reached."""

    code = "no_entry"


def unreachable(url: str, why: str) -> NoEntry:
    """An entry that did not answer, with what might help."""
    return NoEntry(f"{url}: {why}; is a node running there? (`meshd start`, or --url)")


class Entries:
    """``urls`` in the order in which they were given. ``first`` is asked first: the one that answered last."""

    def __init__(self, urls: Sequence[str] | str) -> None:
        self.urls = tuple(url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls))
        if not self.urls:
            raise NoEntry("no entry given")
        self.first = 0

    def prefer(self, url: str) -> None:
        """Begin at this one next time."""
        self.first = self.urls.index(url.rstrip("/"))

    def after(self, at: int) -> list[int]:
        """The others, in turn."""
        return [i % len(self.urls) for i in range(at + 1, at + len(self.urls))]


class Call(Generic[Read]):
    """One document, asked of each entry in turn until one gives it or says that nobody will."""

    def __init__(self, entries: Entries, path: str, read: Callable[[str, int, bytes], Read]) -> None:
        self._entries, self._path, self._read = entries, path, read
        self._at = entries.first
        self._problem: MeshdError = NoEntry("no entry was asked")
        self._found: list[Read] = []

    def urls(self) -> Iterator[str]:
        """Where to ask next, until there is a result. Tell what came of each before taking another."""
        for at in (self._entries.first, *self._entries.after(self._entries.first)):
            self._at = at
            yield self._url
            if self._found or (isinstance(self._problem, RequestFailed) and self._problem.final):
                return

    def answered(self, status: int, body: bytes) -> None:
        """The entry answered."""
        try:
            self._found = [self._read(self._url, status, body)]
            self._entries.first = self._at
        except RequestFailed as error:
            self._problem = error

    def lost(self, why: str) -> None:
        """The entry is not there, or did not answer."""
        self._problem = unreachable(self._entries.urls[self._at], why)

    def result(self) -> Read:
        """What was found; else raises what the last entry said."""
        if self._found:
            return self._found[0]
        raise self._problem

    @property
    def _url(self) -> str:
        return self._entries.urls[self._at] + self._path


def document(url: str, status: int, body: bytes) -> Any:
    """A JSON document; an ``error`` in it is raised, and so is a document that no node of ours gives."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):  # the latter for what is nested without end
        raise NotMeshd(url, status, "not JSON") from None
    told = isinstance(found, dict) and "error" in found
    if told and not misfit(found, ERROR):
        raise failure(status, found)
    path = urlsplit(url).path
    shape: Any = next((shape for end, shape in DOCUMENTS.items() if path.endswith(end)), object)
    if wrong := misfit(found, ERROR if told or status >= 400 else shape):
        raise NotMeshd(url, status, f"but not as meshd answers ({wrong})")
    return found


def text(url: str, status: int, body: bytes) -> str:
    """A body as it stands; a status that is an error is raised as `document` does."""
    return body.decode(errors="replace") if status < 400 else str(document(url, status, body))


def failure(status: int, found: Mapping[str, Any]) -> RequestFailed:
    """The ``error`` object of a document, as an exception."""
    return RequestFailed(status, found["error"])
