"""An answer under way: the chain's ids joined with their text and the stop strings.

Owns the order of things: ids are turned into text as they come, an end token never shows, a stop string ends the answer at the
token that completes it. Text that is held back (half a character, what may become a stop string) comes with a later piece or
with the last one. Raises what the chain raises.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import trio

from meshd.chain.request import (
    Chain,
    Event,
    Finished,
    GenerationRequest,
    HopReport,
    RouteUse,
    Started,
    Stoppable,
    Timings,
    Tokens,
)
from meshd.errors import MeshdError, PeerError
from meshd.inference.detokenize import Detokenizer
from meshd.inference.engine import Choice
from meshd.inference.text import Text
from meshd.vocabulary import SessionId

_REPORT_S = 1.0  # how long a stopped answer waits for its report


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens and the text that became certain with them. The two need not belong together."""

    choices: tuple[Choice, ...]
    text: str


class Answer:
    """One running answer. Iterate it for its pieces; afterwards `finish_reason` and `report` are set."""

    def __init__(
        self,
        events: AsyncIterator[Event],
        request: GenerationRequest,
        text: Text,
        stops: tuple[str, ...],
        started: Started,
    ) -> None:
        self._events = events
        self._request = request
        self._text = text
        self._each = bool(stops) or request.sampling.logprobs is not None
        self._detokenizer = Detokenizer(stops)
        self._begun = trio.current_time()
        self._first_at: float | None = None
        self._first_piece: Piece | None = None
        self.started = started
        self.choices: list[Choice] = []
        self.finish_reason = ""
        self.report: Finished = _no_report(started)
        self.waited_ms = 0.0  # until the first piece

    @property
    def session(self) -> SessionId:
        return self.started.session

    async def prime(self) -> None:
        """Take the forced ids as said already, then wait for the first piece: until it is there, an error is still a status."""
        if self._request.forced:
            await self._read(list(self._request.forced))
        self._first_piece = await self._next()
        self.waited_ms = (trio.current_time() - self._begun) * 1000

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        piece, self._first_piece = self._first_piece, None
        if piece is None and not self.finish_reason:
            piece = await self._next()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def _next(self) -> Piece | None:
        """The next piece with anything in it; None at the end."""
        if self._stopped():  # by forced ids
            await self._stop()
            return None
        async for event in self._events:
            if isinstance(event, Tokens):
                piece = await self._take(event.choices)
                if self._stopped():
                    await self._stop()
                    return piece
                if piece.choices:
                    return piece
            elif isinstance(event, Finished):
                self.finish_reason, self.report = event.reason, event
                rest = self._detokenizer.finish()
                if self._stopped():
                    self.finish_reason = "stop"
                return Piece((), rest) if rest else None
        raise PeerError("the chain ended without finishing the answer")

    async def _take(self, choices: tuple[Choice, ...]) -> Piece:
        if self._first_at is None:
            self._first_at = trio.current_time()
        if not self._each:
            self.choices += choices
            return Piece(choices, await self._read([choice.token for choice in choices]))
        text = ""
        taken: list[Choice] = []
        for choice in choices:
            taken.append(choice)
            text += await self._read([choice.token])
            if self._stopped():
                break
        self.choices += taken
        return Piece(tuple(taken), text)

    async def _read(self, ids: list[int]) -> str:
        return await _read(self._detokenizer, self._text, ids, self._request.eos_ids)

    def _stopped(self) -> bool:
        """True once a stop string was met."""
        return self._detokenizer.stopped

    async def _stop(self) -> None:
        """End the answer for a stop string, with the chain's report if it gives one."""
        self.finish_reason = "stop"
        if isinstance(self._events, Stoppable):
            self._events.stop()
            # The text is complete: neither silence nor an error of the chain takes that back.
            with trio.move_on_after(_REPORT_S), suppress(MeshdError):
                async for event in self._events:
                    if isinstance(event, Finished):
                        self.report = event
                        return
        now = trio.current_time()
        first = self._first_at if self._first_at is not None else now
        rate = (len(self.choices) - 1) / (now - first) if now > first else 0.0
        timings = Timings((first - self._begun) * 1000, (now - self._begun) * 1000, rate)
        self.report = Finished("stop", self.report.route, self.report.routing, (), timings)


async def _read(detokenizer: Detokenizer, text: Text, ids: Sequence[int], eos_ids: frozenset[int]) -> str:
    """The text that becomes certain with these ids; end tokens have none."""
    said = [token for token in ids if token not in eos_ids]
    if not said:
        return ""
    return detokenizer.feed([await text.decode(part) for part in detokenizer.add(said)])


async def last_words(text: Text, request: GenerationRequest, stops: tuple[str, ...]) -> tuple[str, str]:
    """How an answer ends whose ids the client has all (``forced``): the text that was held back until nothing could follow,
    which the client may lack, and the finish reason."""
    detokenizer = Detokenizer(stops)
    await _read(detokenizer, text, request.forced, request.eos_ids)
    rest = detokenizer.finish()
    ended = detokenizer.stopped or request.forced[-1] in request.eos_ids
    return rest, "stop" if ended else "length"


def _no_report(started: Started) -> Finished:
    """What is known of an answer from its start alone."""
    hops = tuple(HopReport(hop.node_id, hop.layers) for hop in started.route)
    return Finished("", hops, started.routing or RouteUse("cold", ""), (), Timings(0.0, 0.0, 0.0))


@asynccontextmanager
async def answering(
    chain: Chain, text: Text, request: GenerationRequest, stops: tuple[str, ...]
) -> AsyncIterator[Answer]:
    """Run a request. Inside, its first tokens are there (or it has ended); leaving cancels it everywhere."""
    async with chain.generate(request) as events:
        started = await anext(events, None)
        if not isinstance(started, Started):
            raise PeerError("the chain's first event was not its start")
        answer = Answer(events, request, text, stops, started)
        await answer.prime()
        yield answer
