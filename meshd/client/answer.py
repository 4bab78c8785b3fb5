"""One streamed answer, whoever gives it: what to do next, and what is made of what comes.

Owns the order of entries, what each is sent so that it goes on where the last one stopped, how long one may be silent, which
failures are tried elsewhere and when to give up. Pure: the time is an argument and it must not know how anything is sent. A
shell does what `next` says and tells what came of it (`line`, `refused`, `lost`, `awake`) till `next` returns None or raises.

Invariants: ids are given out once each and in order; whatever was given out is sent to the next entry as forced; an entry
that answered is not asked again before the others were. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from meshd.client.entries import Entries, NoEntry, NotMeshd, RequestFailed, document, failure, unreachable
from meshd.client.shapes import event_misfit
from meshd.errors import MeshdError, NotReady

SILENCE_S: Final = 1.0  # an entry that is asked to gives a sign of life four times a second
CONNECT_S: Final = 3.0
LONGER: Final = 0.5  # by so much more is each further entry waited for: where all are slow, leaving them helps nobody
AWAKE_S: Final = 1.0  # how long another entry has to say that it is there
FRESH_S: Final = 1.0  # what an entry said of the room longer ago may not be so any more
LATE_S: Final = 0.5  # after the deadline the entry's own word of it may still come
PAUSE_S: Final = 0.05  # when all have failed, before they are asked again
FULL_S: Final = 1.0  # so long at most when all were full, time after time: places come with the ends of answers
_BEAT: Final = {"X-Mesh-Beat": "1"}
_FULL: Final = 429


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a running answer. The last piece carries the whole answer object in ``final``. ``route`` names the nodes
    that compute it, as far as they were known when this entry accepted the request; ``entry`` is the URL that it came from and
    ``session`` what that entry calls it."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    route: tuple[str, ...] = ()
    final: Mapping[str, Any] | None = None
    entry: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class Post:
    """Send this and tell every line of what comes; ``read_s`` without one, or ``connect_s`` without a connection, is a loss."""

    url: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    connect_s: float
    read_s: float


@dataclass(frozen=True, slots=True)
class Race:
    """Ask all of these at once for a sign of life, and tell who gave one first."""

    urls: tuple[str, ...]
    within_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Patience:
    """``silence_s`` is for an entry that could be left for another, ``timeout_s`` for one that could not; ``patience_s`` of
    failures without any new token are the end."""

    timeout_s: float = 60.0
    silence_s: float = SILENCE_S
    patience_s: float = 10.0


@dataclass(slots=True)
class _Progress:
    """What is needed to go on elsewhere."""

    seed: int | None = None
    digest: str | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    route: tuple[str, ...] = ()
    session: str = ""

    @property
    def begun(self) -> bool:
        return bool(self.tokens) or self.seed is not None


class Answer:
    """``request`` is the body of ``POST /chain``."""

    def __init__(self, entries: Entries, request: Mapping[str, Any], patience: Patience, now: float) -> None:
        self._entries, self._patience, self._began = entries, patience, now
        self._request = {**request, "stream": True}
        self._several = len(entries.urls) > 1
        self._at = entries.first
        self._progress = _Progress()
        self._tried: dict[int, tuple[MeshdError, float]] = {}  # since the last token, and when
        self._before, self._give_up = 0, now + patience.patience_s
        self._left = 0  # entries that were lost since then
        self._pause_s = PAUSE_S
        self._heard = now
        self._todo: deque[Post | Race | Pause] = deque()
        self._racing: list[int] = []
        self._failed: MeshdError | None = None
        self._whole = False
        self.listening = False  # what the entry that was asked last says is still of interest

    def next(self, now: float) -> Post | Race | Pause | None:
        """What to do; None when the answer is whole. Raises RequestFailed, NoEntry."""
        if self._failed is not None:
            raise self._failed
        if self._whole:
            return None
        return self._todo.popleft() if self._todo else self._post(now)

    # --- what came of it ----------------------------------------------------------------------------------------------

    def line(self, line: str, now: float) -> Piece | None:
        """A line of the stream. A comment is a sign of life and nothing else."""
        data = line[5:].strip() if line.startswith("data:") else ""
        if not data or data == "[DONE]":
            return None
        event, wrong = _event(data)
        if wrong := wrong or self._too_much(event):
            self.lost(f"a line that is no event of an answer ({wrong}): is this meshd?", now)
            return None
        if "error" in event:
            status = event["error"].get("status")
            self._problem(failure(status if isinstance(status, int) else 503, event), now)
            return None
        piece = self._piece(event)
        if piece is not None:
            self._heard = now
        return piece

    def refused(self, status: int, body: bytes, now: float) -> None:
        """The entry answered with another status than 200."""
        try:
            document(self._url, status, body)
        except RequestFailed as error:
            self._problem(error, now)
        else:
            self.lost(f"HTTP {status}: is this meshd?", now)

    def lost(self, why: str, now: float) -> None:
        """The entry cannot be reached, fell silent, or stopped in the middle."""
        if (left_ms := self._left_ms(now)) is not None and left_ms <= 0:
            why += f" when the {self._request['deadline_ms']} ms that the request gives were over"
        self._problem(unreachable(self._url, why), now)

    def awake(self, url: str | None) -> None:
        """Who won the `Race`. None: nobody, then the next in turn is as good as any."""
        urls = [self._entries.urls[i] for i in self._racing]
        self._at = self._racing[urls.index(url) if url is not None else 0]

    # --- decisions ----------------------------------------------------------------------------------------------------

    @property
    def _url(self) -> str:
        return self._entries.urls[self._at]

    def _post(self, now: float) -> Post:
        patience, progress = self._patience, self._progress
        body = dict(self._request)
        if progress.begun:
            body.update(seed=progress.seed, digest=progress.digest, resume={"tokens": list(progress.tokens)})
        if (left := self._left_ms(now)) is not None:
            body["deadline_ms"] = max(1, left)
        self._heard, self.listening = now, True
        if not self._several:
            connect_s, read_s, headers = CONNECT_S, patience.timeout_s, dict[str, str]()
        else:
            silence_s = patience.silence_s * (1.0 + LONGER * self._left)
            connect_s, read_s, headers = AWAKE_S, min(patience.timeout_s, silence_s), _BEAT
        return Post(self._url + "/chain", body, headers, self._in_time(connect_s, now), self._in_time(read_s, now))

    def _left_ms(self, now: float) -> int | None:
        """Of the caller's deadline, which is one for all entries together."""
        whole = self._request.get("deadline_ms")
        return None if whole is None else int(whole - (now - self._began) * 1000)

    def _in_time(self, seconds: float, now: float) -> float:
        """So long, but not past the caller's deadline."""
        left_ms = self._left_ms(now)
        return seconds if left_ms is None else min(seconds, max(0, left_ms) / 1000 + LATE_S)

    def _problem(self, problem: MeshdError, now: float) -> None:
        self.listening = False
        if isinstance(problem, RequestFailed):
            problem.waited_s = now - self._heard
            if problem.final:
                self._failed = problem
                return
        if len(self._progress.tokens) > self._before:
            self._before, self._give_up = len(self._progress.tokens), now + self._patience.patience_s
            self._left, self._pause_s = 0, PAUSE_S
            self._tried.clear()
        elif not self._several:
            self._failed = problem
            return
        self._tried[self._at] = problem, now
        self._left += isinstance(problem, NoEntry)
        self._go_elsewhere(problem, now)

    def _go_elsewhere(self, problem: MeshdError, now: float) -> None:
        others = self._entries.after(self._at)
        left = [i for i in others if i not in self._tried]
        late = (ms := self._left_ms(now)) is not None and ms <= 0
        if late or (not left and now >= self._give_up):
            self._at, (told, at) = max(self._tried.items(), key=lambda tried: (_worth(tried[1][0]), tried[1][1]))
            if late or now - at <= FRESH_S or not _worth(told):
                self._failed = told
            return  # else it is asked once more: the others took their time
        if not left:
            self._pause_s = min(FULL_S, 2 * self._pause_s) if self._all_full() else PAUSE_S
            self._todo.append(Pause(self._in_time(self._pause_s, now)))
            self._tried.clear()
            left = others[:1] or [self._at]
        if isinstance(problem, NoEntry) and len(left) > 1:  # where one entry has gone, others may have gone with it
            self._racing = left
            self._todo.append(Race(tuple(self._entries.urls[i] for i in left), self._in_time(AWAKE_S, now)))
        self._at = left[0]

    def _all_full(self) -> bool:
        """Those that are there. A crowd that asked twenty times a second would take from them what its answers need."""
        return {told.http_status for told, _ in self._tried.values() if isinstance(told, RequestFailed)} == {_FULL}

    # --- events -------------------------------------------------------------------------------------------------------

    def _piece(self, event: Mapping[str, Any]) -> Piece | None:
        progress = self._progress
        self._entries.first = self._at
        if "finish_reason" in event:
            self._whole, self.listening = True, False
            return Piece(final=self._with_what_came_before(event), entry=self._url, session=progress.session)
        if "tokens" in event:
            ids, text = tuple(event["tokens"]), event.get("text", "")
            progress.tokens += ids
            progress.text += text
            return Piece(text, ids, progress.route, entry=self._url, session=progress.session)
        progress.seed, progress.digest = event.get("seed"), event.get("digest")
        progress.session = str(event.get("id", ""))
        progress.route = tuple(hop["name"] for hop in event.get("route", ()))
        return None

    def _too_much(self, event: Mapping[str, Any]) -> str:
        """What is wrong with an event beyond the longest answer: who ignores what it is resumed with would go on for ever."""
        most, new = self._request.get("max_tokens"), () if "finish_reason" in event else event.get("tokens", ())
        too_many = isinstance(most, int) and len(self._progress.tokens) + len(new) > most
        return f"more than the {most} tokens asked for" if too_many else ""

    def _with_what_came_before(self, final: Mapping[str, Any]) -> Mapping[str, Any]:
        """The last entry's answer object, with what earlier entries sent in front."""
        if len(final.get("tokens", ())) >= len(self._progress.tokens):
            return final
        return {**final, "tokens": list(self._progress.tokens), "text": self._progress.text}


def _event(data: str) -> tuple[Mapping[str, Any], str]:
    """The event in a line, and what is wrong with it: judged whole, so that nothing of another program's is taken."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        return {}, "not JSON"
    wrong = event_misfit(event)
    return ({} if wrong else event), wrong


def _worth(problem: MeshdError) -> int:
    """What to tell rather: what an entry said of the room, then of itself (it takes nothing now), then that it was not there."""
    if not isinstance(problem, RequestFailed) or isinstance(problem, NotMeshd):
        return 0
    return 1 if problem.error.get("code") == NotReady.code else 2
