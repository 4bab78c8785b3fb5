"""Schedules of faults for the chain: what a seed does to a room, and what must hold afterwards."""

from __future__ import annotations

import random
from dataclasses import dataclass

from meshd.chain.request import GenerationRequest
from meshd.errors import Busy, DeadlineExceeded, StageUnavailable
from meshd.inference.engine import Sampling
from meshd.inference.hash_stage import reference
from meshd.vocabulary import LayerRange
from tests.sim.chain_room import Running, SimRoom

LAYERS = 9
DEADLINE_S = 30.0
ENTRY = 1  # never killed: its death ends its sessions, which is another test


@dataclass
class Tally:
    seed: int
    faults: int = 0
    requests: int = 0
    answered: int = 0
    failed: int = 0
    recoveries: int = 0
    worst_stall_s: float = 0.0


class Schedule:
    """One seed: a room with three stages, their replicas and wider nodes; requests one after the other and side by side.

    ``calm`` keeps node 1 and the nodes 2 and 3 (a full set of layers) out of the faults, so every request must be answered.
    """

    def __init__(self, seed: int, *, calm: bool) -> None:
        self.rng = random.Random(seed)
        self.room = SimRoom(LAYERS, seed)
        self.tally = Tally(seed)
        self.calm = calm
        room, third = self.room, LAYERS // 3
        room.add(1, self.rng.choice([LayerRange(0, third), LayerRange(0, 2 * third)]))
        room.add(2, LayerRange(third, 2 * third))
        room.add(3, LayerRange(2 * third, LAYERS))
        room.add(4, LayerRange(third, 2 * third))
        room.add(5, LayerRange(2 * third, LAYERS))
        room.add(6, self.rng.choice([LayerRange(0, LAYERS), LayerRange(1, LAYERS - 1), LayerRange(0, third)]))
        room.add(7, LayerRange(third + 1, LAYERS), arith="other")
        self.fragile = [4, 5, 6, 7] if calm else [2, 3, 4, 5, 6, 7]
        self._burst = 0
        self._lossy = ""

    def run(self, faults: int) -> Tally:
        while self.tally.faults < faults:
            sessions = [self._request() for _ in range(self.rng.choice([1, 1, 2, 3]))]
            sessions = [one for one in sessions if one is not None]
            while any(not one.over for one in sessions):
                self.room.run(lambda: all(one.over for one in sessions), self.rng.choice([0.0, 0.003, 0.02, 0.2, 1.0]))
                for one in sessions:
                    assert one.over or self.room.now <= one.began + one.deadline_s + 1.0, "past its deadline"
                if self.tally.faults < faults or self.rng.random() < 0.05:
                    self._fault(sessions)
                elif self.room.now > max(one.began for one in sessions) + 5.0:
                    self._heal()
            for one in sessions:
                self._judge(one)
        self._finish()
        return self.tally

    def _request(self) -> Running | None:
        rng = self.rng
        prompt = tuple(rng.randrange(256) for _ in range(rng.choice([1, 3, 12, 140, 700])))
        n = rng.choice([1, 5, 24, 64])
        sampling = rng.choice(
            [Sampling(), Sampling(temperature=0.8, seed=rng.randrange(1000)), Sampling(presence_penalty=1.0)]
        )
        request = GenerationRequest(prompt, n, sampling=sampling, deadline_s=DEADLINE_S)
        want = reference(prompt, n, LAYERS, sampling=sampling)
        if rng.random() < 0.2 and n > 1:
            request = GenerationRequest(
                prompt, n, sampling=sampling, deadline_s=DEADLINE_S, forced=tuple(want[: rng.randrange(1, n)])
            )
        self.tally.requests += 1
        try:
            one = self.room.request(ENTRY, request)
        except StageUnavailable:
            assert not self.calm, "layers are there and no route was found"
            self.tally.failed += 1
            self.room.idle(0.5)
            self._heal()
            return None
        one.want = want[len(request.forced) :]
        return one

    def _fault(self, sessions: list[Running]) -> None:
        rng, room = self.rng, self.room
        self.tally.faults += 1
        kind = rng.choices(
            [
                "kill",
                "restart",
                "freeze",
                "thaw",
                "evict",
                "cut",
                "mend",
                "loss",
                "pair",
                "drain",
                "slow",
                "pause",
                "cancel",
            ],
            [5, 9, 4, 8, 6, 2, 4, 4, 2, 1, 2, 1, 0.3],
        )[0]
        node = rng.choice(self.fragile)
        if kind == "kill":
            room.kill(node)
        elif kind == "restart":
            for number in self.fragile:
                room.restart(number)
        elif kind == "freeze":
            room.freeze(node)
        elif kind == "thaw":
            for number in self.fragile:
                room.thaw(number)
        elif kind == "evict":
            room.evict(rng.choice([1, 2, 3, 4, 5, 6, 7]))
        elif kind == "cut":
            room.cut(rng.choice([1, 2, 3, 4]) if not self.calm else rng.choice([4, 5, 6, 7]), node)
        elif kind == "mend":
            for a, b in list(room.cuts):
                room.mend(int(a, 16), int(b, 16))
        elif kind == "loss":
            self._noise(rng.randrange(1, 12))
        elif kind == "pair":
            for number in rng.sample(self.fragile, 2):
                rng.choice([room.kill, room.freeze])(number)
        elif kind == "drain":
            member = room.nodes[list(room.nodes)[node - 1]]
            member.draining = not member.draining
            room.note("DRAIN", node, member.draining)
            room.publish()
        elif kind == "slow":
            member = room.nodes[list(room.nodes)[node - 1]]
            member.step_s = rng.choice([0.002, 0.002, 0.4, 3.0])
            room.note("SLOW", node, member.step_s)
        elif kind == "pause":
            room.freeze(ENTRY)
            room.run(lambda: False, rng.choice([0.1, 2.5]))
            room.thaw(ENTRY)
        elif kind == "cancel":
            live = [one for one in sessions if not one.over]
            if live:
                room.cancel(rng.choice(live))

    def _noise(self, count: int) -> None:
        """The next ``count`` messages are lost, doubled, late or out of order."""
        left = count
        self.room.note("NOISE", count)

        def copies() -> list[float]:
            nonlocal left
            left -= 1
            if left <= 0:
                self.room.lossy = None
            return self.rng.choice([[], [0.0, 0.0], [0.0, 1.0], [0.3], [2.5], [0.004], [0.0]])

        self.room.lossy = copies

    def _heal(self) -> None:
        room = self.room
        room.lossy = None
        for a, b in list(room.cuts):
            room.mend(int(a, 16), int(b, 16))
        for number in self.fragile:
            room.restart(number)
            room.thaw(number)
            node = room.nodes[list(room.nodes)[number - 1]]
            node.draining, node.step_s = False, 0.002
        room.publish()

    def _judge(self, one: Running) -> None:
        got, want = one.tokens, one.want
        assert got == want[: len(got)], f"wrong token at {next(i for i, t in enumerate(got) if t != want[i])}"
        assert one.ended is not None
        assert one.ended <= one.began + one.deadline_s + 1.0, "ended past its deadline"
        self.tally.recoveries += len(one.core.recoveries)
        stalls = [b - a for a, b in zip([one.began, *one.token_times], one.token_times, strict=False)]
        self.tally.worst_stall_s = max([self.tally.worst_stall_s, *stalls])
        if one.finished:
            assert got == want, f"{len(got)} of {len(want)} tokens"
            self.tally.answered += 1
        elif one.error is not None:
            assert isinstance(one.error, StageUnavailable | DeadlineExceeded | Busy), repr(one.error)
            assert not self.calm, f"every stage had a healthy replica: {one.error!r}"
            self.tally.failed += 1

    def _finish(self) -> None:
        """Everything is forgotten in the end, whatever was lost on the way."""
        self._heal()
        self.room.idle(100.0)
        for node in self.room.nodes.values():
            assert len(node.hops) == 0, f"node {int(node.id, 16)} still has sessions"
            assert node.sessions is None or len(node.sessions) == 0, f"node {int(node.id, 16)} still has state"


def run_schedule(seed: int, faults: int, *, calm: bool) -> Tally:
    """One seed; a failure carries the seed and the last events."""
    schedule = Schedule(seed, calm=calm)
    try:
        return schedule.run(faults)
    except Exception as error:
        lines = "\n".join(list(schedule.room.trace)[-400:])
        raise AssertionError(
            f"seed {seed} calm={calm}: {error}\n{lines}\nseed {seed} calm={calm}: {error!r}"
        ) from error
