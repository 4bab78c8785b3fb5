"""The routes an entry is trying at once, and the cutting of a request into steps. Pure.

An `Attempt` is one route with what was sent over it. Steps of a prompt are chunks on a fixed grid, several under way at a time,
so that all stages work; a later attempt sends again from what the exit has acknowledged. Positions are absolute.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Final

from meshd.chain.drafts import MAX_DRAFTS
from meshd.chain.hop import FILL_ROWS
from meshd.chain.messages import Fill, Need, Open, Phase, Reply, Step
from meshd.chain.plan import Plan
from meshd.chain.recovery import Swap
from meshd.chain.request import GenerationRequest
from meshd.inference.engine import Choice
from meshd.vocabulary import Hop, LayerRange, NodeId, Route, SessionId

CHUNK_ROWS: Final = (
    128  # time to the first token is least with 128..256 rows a chunk, and a multiple of the block size of 32
)
WINDOW_ROWS: Final = 16 * CHUNK_ROWS  # sent and not yet acknowledged
RESERVE_TOKENS: Final = 256  # a session's room grows by this much


@dataclass(slots=True)
class Attempt:
    """One route. ``unacked`` are the steps under way as (seq, end); ``swaps`` are what it replaced since the last token.

    ``sent`` and ends do not count drafts. ``windows``: every hop of it has said that drafts change nothing there.
    """

    number: int
    route: Route
    sent: int
    began: float
    swaps: tuple[Swap, ...] = ()
    replayed: int = 0  # rows that a newcomer has to compute first
    dead: bool = False
    windows: bool = False
    unacked: list[tuple[int, int]] = field(default_factory=list)
    reports: dict[tuple[NodeId, LayerRange], tuple[Phase, int]] = field(default_factory=dict)

    @property
    def nodes(self) -> set[NodeId]:
        return {hop.node_id for hop in self.route}

    def acknowledge(self, end: int) -> None:
        """The exit has computed everything up to ``end``."""
        while self.unacked and self.unacked[0][1] <= end:
            self.unacked.pop(0)
            self.reports.clear()

    def oldest(self) -> int | None:
        """The seq of the step that is waited for."""
        return self.unacked[0][0] if self.unacked else None

    def phase(self, hop: Hop) -> Phase | None:
        """What ``hop`` has said of that step; None if its node has said nothing at all."""
        report = self.reports.get((hop.node_id, hop.layers))
        if report is None:
            silent = not any(node == hop.node_id for node, _ in self.reports)
            return None if silent else Phase.UNSEEN
        return report[0]

    def held_up(self) -> tuple[Hop | None, Hop | None]:
        """The first hop that has not sent that step on, and the one before it."""
        before: Hop | None = None
        for hop in self.route:
            if self.phase(hop) is not Phase.SENT:
                return hop, before
            before = hop
        return None, before


class Stepper:
    """Makes the steps of one request."""

    def __init__(
        self, session: SessionId, entry: NodeId, request: GenerationRequest, digest: str, num_layers: int
    ) -> None:
        self.session = session
        self.entry = entry
        self.digest = digest
        self.num_layers = num_layers
        self.ids = [*request.prompt, *request.forced]
        self.prompt_len = len(request.prompt)
        self._max_tokens = request.max_tokens
        self._eos_ids = request.eos_ids
        self._sampling = request.sampling
        self._seq = 0
        self._planned: Plan | None = None  # of the latest step
        self._guessed_from: int | None = None  # the first position that was ever sent as a guess

    @property
    def left(self) -> int:
        """Tokens the answer may still have."""
        return self.prompt_len + self._max_tokens - len(self.ids)

    @property
    def finished(self) -> str:
        """Why the answer is complete: stop or length; empty while it is not."""
        if len(self.ids) > self.prompt_len and self.ids[-1] in self._eos_ids:
            return "stop"
        return "" if self.left > 0 else "length"

    def open(self, attempt: int, hop: Hop, tenant: str) -> Open:
        """Ask ``hop`` what it keeps of the prompt. What it is told of the tenant is enough to tell tenants apart."""
        ids = pack_ids(self.ids[: self.prompt_len])
        who = hashlib.sha256(tenant.encode()).hexdigest()
        return Open(self.session, attempt, hop, self.digest, who, self._reserve(self.prompt_len), ids)

    def fill(self, need: Need) -> list[Fill]:
        """The ids that hop 0 lacks."""
        return [
            Fill(need.session, need.attempt, need.seq, need.layers, start, n, pack_ids(self.ids[start : start + n]))
            for start in range(need.have, need.upto, FILL_ROWS)
            for n in [min(FILL_ROWS, need.upto - start)]
        ]

    def take(self, reply: Reply) -> list[Choice]:
        """The reply's tokens that continue the answer are taken into the ids. A token counts if every guess before it came
        true, whatever else has been taken since."""
        drawn = {choice.position: choice for choice in reply.choices}
        taken = []
        while not self.finished and self.confirmed(reply) >= min(len(self.ids), reply.end):
            choice = drawn.get(len(self.ids))
            if choice is None:
                break
            self.ids.append(choice.token)
            taken.append(choice)
        return taken

    def confirmed(self, reply: Reply) -> int:
        """How many of the positions that the exit computed hold final ids."""
        first = reply.end - len(reply.guess)
        for guess, token in zip(reply.guess, self.ids[first:], strict=False):
            if guess != token:
                break
            first += 1
        return first

    def step(
        self, attempt: int, route: Route, start: int, n: int, remaining_s: float, *, guess: tuple[int, ...] = ()
    ) -> Step:
        """The next step: ids ``[start, start + n)`` over ``route`` and, behind the last known one, guesses. From the last known
        id on, each row draws a token."""
        self._seq += 1
        ids = [*self.ids[start : start + n], *guess]
        emit = 1 + len(guess) if n and start + n == len(self.ids) else 0
        if guess and self._guessed_from is None:
            self._guessed_from = len(self.ids)
        doubted = start if self._guessed_from is None else max(self._guessed_from, start - MAX_DRAFTS)
        history = self.ids[self.prompt_len :] if emit and self._sampling.needs_history else []
        return Step(
            plan=self._plan(attempt, route),
            seq=self._seq,
            start=start,
            n=len(ids),
            emit=emit,
            remaining_ms=max(1, int(remaining_s * 1000.0)),
            reserve_tokens=self._reserve(start + len(ids)),
            history=tuple(history),
            rows=pack_ids(ids),
            guess=guess,
            recent=tuple(self.ids[doubted:start]),
        )

    def _plan(self, attempt: int, route: Route) -> Plan:
        """An attempt has one route, so its steps share one plan."""
        if self._planned is None or self._planned.attempt != attempt:
            self._planned = Plan(
                session=self.session,
                attempt=attempt,
                prompt_len=self.prompt_len,
                digest=self.digest,
                num_layers=self.num_layers,
                route=route,
                origin=None,
                entry=self.entry,
                sampling=self._sampling,
            )
        return self._planned

    def _reserve(self, end: int) -> int:
        """Room for the prompt and the next few hundred tokens, never more than the request can use."""
        grown = max(1, -(-(end - self.prompt_len) // RESERVE_TOKENS)) * RESERVE_TOKENS
        return self.prompt_len + min(self._max_tokens, grown)


def pack_ids(ids: list[int]) -> bytes:
    """Rows for a range that starts at layer 0."""
    return struct.pack(f"<{len(ids)}i", *ids)
