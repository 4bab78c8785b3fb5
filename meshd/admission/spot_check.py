"""Now and then a part of a real prefill is computed by a second replica too; the odd one of three is quarantined.

Owns which requests are checked (a share, drawn), which hop of them, and what follows from a disagreement. The prompt's first rows
go through the route's hops up to the chosen one, without a session, and there through another replica as well. If the two
disagree a third decides; where there is none, each is put to a probe against the qspec. Runs beside the answer and never delays
or changes it. Position 0 is left out of the comparison: its activations are so large that they would hide every other row.

This finds devices that break while they serve. A node with the mesh key that wants to deceive can answer checks honestly.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Final

import trio

from meshd.admission.expected import WIRE_DTYPES
from meshd.admission.qspec import agree, odd_one_out
from meshd.admission.spot_wire import RAN, ROWS, ROWS_CAP, Rows, rows_untrusted
from meshd.directory import Directory, Member
from meshd.errors import BadFrame, MeshdError
from meshd.inference.engine import Engine
from meshd.links.wire import Links
from meshd.vocabulary import Hop, NodeId, Route

_log = logging.getLogger(__name__)

SHARE: Final = 0.01
ANSWER_S: Final = 10.0
AT_ONCE: Final = 2


class SpotChecker:
    """``quarantine(node, reason)`` and ``doubt(node)`` (probe it again) act on what was found. Run it in a nursery."""

    def __init__(
        self,
        self_id: NodeId,
        links: Links,
        *,
        engine: Callable[[], Engine | None],
        directory: Callable[[], Directory],
        quarantine: Callable[[NodeId, str], None],
        doubt: Callable[[NodeId], Awaitable[None]],
        rng: Random,
    ) -> None:
        self._self_id = self_id
        self._links = links
        self._engine = engine
        self._directory = directory
        self._quarantine = quarantine
        self._doubt = doubt
        self._rng = rng
        self._put, self._take = trio.open_memory_channel[tuple[Sequence[int], Route]](AT_ONCE)
        self.counters = {"spot_checks": 0, "spot_disagreements": 0}

    def consider(self, ids: Sequence[int], route: Route) -> None:
        """A prefill of ``ids`` over ``route`` has begun. Never waits; checks are dropped while others run."""
        if len(ids) > 1 and self._rng.random() < SHARE:
            try:
                self._put.send_nowait((tuple(ids[:ROWS_CAP]), route))
            except trio.WouldBlock:
                return

    async def run(self) -> None:
        """Until cancelled."""
        async for ids, route in self._take:
            try:
                await self._check(ids, route)
            except MeshdError:
                continue  # a node that cannot be asked now is the business of gossip and routing
            except Exception:  # noqa: BLE001  # a check must not end the node; it is logged whole
                _log.exception("a spot check failed")

    async def _check(self, ids: Sequence[int], route: Route) -> None:
        chosen = [(place, others) for place, hop in enumerate(route) if (others := self._others(hop))]
        if not chosen:
            return
        place, others = self._rng.choice(chosen)
        hop = route[place]
        rows = struct.pack(f"<{len(ids)}i", *ids)
        for before in route[:place]:
            rows = await self._through(before.node_id, before, rows, len(ids))
        self.counters["spot_checks"] += 1
        suspects = [hop.node_id, *(m.node_id for m in self._rng.sample(others, min(2, len(others))))]
        first = await self._through(suspects[0], hop, rows, len(ids))
        second = await self._through(suspects[1], hop, rows, len(ids))
        if self._agree(hop, [first, second], len(ids)) is None:
            return
        self.counters["spot_disagreements"] += 1
        if len(suspects) > 2:
            third = await self._through(suspects[2], hop, rows, len(ids))
            odd = self._agree(hop, [first, second, third], len(ids))
            if odd is not None:
                self._quarantine(suspects[odd], f"other rows for layers {hop.layers} than two other replicas")
                return
        for node in suspects[:2]:
            if node != self._self_id:
                await self._doubt(node)

    def _others(self, hop: Hop) -> list[Member]:
        """Further replicas of a hop's layers."""
        directory = self._directory()
        member = directory.get(hop.node_id)
        if member is None:
            return []
        return [m for m in directory.replicas(hop.layers, member.advert.digest) if m.node_id != hop.node_id]

    def _agree(self, hop: Hop, rows: list[bytes], n: int) -> int | None:
        """The odd one of three; of two: 1 where they disagree. None: all is well, or nothing can be said."""
        member = self._directory().get(hop.node_id)
        engine = self._engine()
        if member is None:
            return None
        dtype = member.advert.dtype or (engine.info.dtype if engine else "")
        wire = WIRE_DTYPES.get(dtype, dtype)
        row_bytes = len(rows[0]) // n
        width = row_bytes // 4 if wire == "fp32" else row_bytes if wire == "hash" else row_bytes // 2
        tails = [part[row_bytes:] for part in rows]
        if len(tails) == 2:
            return None if agree(tails[0], tails[1], n - 1, width, dtype=dtype, wire_dtype=wire) else 1
        return odd_one_out(tails, n - 1, hidden_size=width, dtype=dtype, wire_dtype=wire)

    async def _through(self, node: NodeId, hop: Hop, rows: bytes, n: int) -> bytes:
        """``rows`` through the layers of ``hop`` at ``node``. Raises MeshdError when it cannot be asked."""
        with trio.move_on_after(ANSWER_S):
            if node == self._self_id:
                engine = self._engine()
                if engine is None:
                    raise MeshdError("this node holds no layers now")
                return await engine.forward(hop.layers, rows, n)
            return await self._ask(node, hop, rows, n)
        raise MeshdError(f"no answer to a spot check within {ANSWER_S:g} s")

    async def _ask(self, node: NodeId, hop: Hop, rows: bytes, n: int) -> bytes:
        member = self._directory().get(node)
        if member is None:
            raise MeshdError("the replica is gone")
        question = Rows(member.advert.digest, member.advert.generation, hop.layers, n, rows)
        stream = await (await self._links.get(node)).open(question.message(ROWS))
        try:
            await stream.end()
            message = await stream.receive()
        finally:
            stream.cancel()
        if message is None:
            raise BadFrame("a spot check ended without an answer")
        answer = rows_untrusted(message, RAN)
        if (answer.digest, answer.generation, answer.n) != (question.digest, question.generation, n):
            raise BadFrame("another engine than the asked one answered")
        return answer.rows
