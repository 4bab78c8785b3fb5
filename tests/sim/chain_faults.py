"""Schedules of faults for the chain: what a seed does to a room, and what must hold afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshd.chain.request import GenerationRequest
from meshd.errors import Busy, DeadlineExceeded, StageUnavailable
from meshd.inference.engine import Sampling
from meshd.inference.hash_stage import reference
from meshd.vocabulary import LayerRange
from tests.sim.chain_room import Running, SimNode, SimRoom, node_id

LAYERS = 6
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
    accepted: int = 0
    rejected: int = 0
    cached: int = 0
    worst_stall_s: float = 0.0


class ScriptedDrafts:
    """Guesses, right and wrong at random: the rehearsal model never repeats itself."""

    def __init__(self, ids: Sequence[int], rng: random.Random) -> None:
        self._ids = ids  # as they will be
        self._rng = rng

    def propose(self, ids: Sequence[int], most: int) -> tuple[int, ...]:
        rng = self._rng
        right = self._ids[len(ids) : len(ids) + min(most, rng.randrange(9))]
        return tuple(token if rng.random() < 0.75 else rng.randrange(256) for token in right)

    def learn(self, guesses: int, elapsed_s: float, compute_s: float) -> None:
        assert elapsed_s >= 0.0
        assert compute_s >= 0.0
        assert 0 <= guesses <= 8


class Schedule:
    """One seed: a room with three stages, their replicas and wider nodes; requests one after the other and side by side.

    ``calm`` keeps node 1 and the nodes 2 and 3 (a full set of layers) out of the faults, so every request must be answered.
    """

    def __init__(self, seed: int, *, calm: bool) -> None:
        self.rng = random.Random(seed)
        self.room = SimRoom(LAYERS, seed)
        self.tally = Tally(seed)
        self.calm = calm
        self.prompts: list[tuple[int, ...]] = []
        room, third = self.room, LAYERS // 3
        room.add(1, self.rng.choice([LayerRange(0, third), LayerRange(0, 2 * third)]))
        room.add(2, LayerRange(third, 2 * third))
        room.add(3, LayerRange(2 * third, LAYERS))
        room.add(4, LayerRange(third, 2 * third))
        room.add(5, LayerRange(2 * third, LAYERS))
        room.add(6, self.rng.choice([LayerRange(0, LAYERS), LayerRange(1, LAYERS - 1), LayerRange(0, third)]))
        room.add(7, LayerRange(third + 1, LAYERS), arith="other")
        self.fragile = [4, 5, 6, 7] if calm else [2, 3, 4, 5, 6, 7]

    def run(self, faults: int) -> Tally:
        while self.tally.faults < faults:
            sessions = [one for _ in range(self.rng.choice([1, 1, 2])) if (one := self._request()) is not None]
            self._follow(sessions, faults)
            for one in sessions:
                self._judge(one)
        self._finish()
        return self.tally

    def _follow(self, sessions: list[Running], faults: int) -> None:
        """Faults at random moments until every request is over."""
        while any(not one.over for one in sessions):
            self.room.run(lambda: all(one.over for one in sessions), self.rng.choice([0.0, 0.002, 0.01, 0.05, 0.5]))
            for one in sessions:
                assert one.over or self.room.now <= one.began + one.deadline_s + 1.0, "past its deadline"
            if self.tally.faults < faults or self.rng.random() < 0.05:
                self._fault(sessions)
            elif self.room.now > max(one.began for one in sessions) + 5.0:
                self._heal()

    def _prompt(self) -> tuple[int, ...]:
        """A new one, or one that begins as an earlier one did."""
        rng = self.rng
        fresh = tuple(rng.randrange(256) for _ in range(rng.choice([1, 3, 12, 12, 12, 40, 300])))
        if self.prompts and rng.random() < 0.4:
            begin = rng.choice(self.prompts)
            return (*begin[: rng.choice([len(begin), rng.randrange(1, len(begin))])], *fresh)[:400]
        if len(fresh) > 64:
            self.prompts.append(fresh)
        return fresh

    def _request(self) -> Running | None:
        rng = self.rng
        prompt = self._prompt()
        n = rng.choice([1, 5, 24, 48])
        sampling = rng.choice(
            [Sampling(), Sampling(temperature=0.8, seed=rng.randrange(1000)), Sampling(presence_penalty=1.0)]
        )
        tenant = rng.choice(["", "other"])
        request = GenerationRequest(prompt, n, sampling=sampling, deadline_s=DEADLINE_S, tenant=tenant)
        want = reference(prompt, n, LAYERS, sampling=sampling)
        if rng.random() < 0.2 and n > 1:
            request = replace(request, forced=tuple(want[: rng.randrange(1, n)]))
        self.tally.requests += 1
        try:
            drafts = ScriptedDrafts((*prompt, *want), rng) if rng.random() < 0.8 else None
            one = self.room.request(ENTRY, request, drafts=drafts)
        except StageUnavailable:
            assert not self.calm, "layers are there and no route was found"
            self.tally.failed += 1
            self.room.idle(0.5)
            self._heal()
            return None
        one.want = want[len(request.forced) :]
        return one

    def _fault(self, sessions: list[Running]) -> None:
        self.tally.faults += 1
        kinds: dict[Callable[[int, list[Running]], None], float] = {
            self._kill: 5,
            self._restart_all: 9,
            self._freeze: 4,
            self._thaw_all: 8,
            self._evict: 6,
            self._cut: 2,
            self._mend_all: 4,
            self._noise: 4,
            self._pair: 2,
            self._drain: 1,
            self._slow: 2,
            self._pause_entry: 1,
            self._cancel: 0.3,
        }
        (fault,) = self.rng.choices(list(kinds), list(kinds.values()))
        fault(self.rng.choice(self.fragile), sessions)

    def _node(self, number: int) -> SimNode:
        return self.room.nodes[node_id(number)]

    def _kill(self, number: int, sessions: list[Running]) -> None:
        self.room.kill(number)

    def _restart_all(self, number: int, sessions: list[Running]) -> None:
        for one in self.fragile:
            self.room.restart(one)

    def _freeze(self, number: int, sessions: list[Running]) -> None:
        self.room.freeze(number)

    def _thaw_all(self, number: int, sessions: list[Running]) -> None:
        for one in self.fragile:
            self.room.thaw(one)

    def _evict(self, number: int, sessions: list[Running]) -> None:
        self.room.evict(self.rng.randrange(1, 8))

    def _cut(self, number: int, sessions: list[Running]) -> None:
        self.room.cut(self.rng.choice(self.fragile if self.calm else [1, 2, 3, 4]), number)

    def _mend_all(self, number: int, sessions: list[Running]) -> None:
        for a, b in list(self.room.cuts):
            self.room.mend(int(a, 16), int(b, 16))

    def _pair(self, number: int, sessions: list[Running]) -> None:
        for one in self.rng.sample(self.fragile, 2):
            self.rng.choice([self.room.kill, self.room.freeze])(one)

    def _drain(self, number: int, sessions: list[Running]) -> None:
        node = self._node(number)
        node.draining = not node.draining
        self.room.note("DRAIN", number, node.draining)
        self.room.publish()

    def _slow(self, number: int, sessions: list[Running]) -> None:
        self._node(number).step_s = self.rng.choice([0.002, 0.002, 0.4, 3.0])
        self.room.note("SLOW", number, self._node(number).step_s)

    def _pause_entry(self, number: int, sessions: list[Running]) -> None:
        self.room.freeze(ENTRY)
        self.room.run(lambda: False, self.rng.choice([0.1, 2.5]))
        self.room.thaw(ENTRY)

    def _cancel(self, number: int, sessions: list[Running]) -> None:
        live = [one for one in sessions if not one.over]
        if live:
            self.room.cancel(self.rng.choice(live))

    def _noise(self, number: int, sessions: list[Running]) -> None:
        """The next few messages are lost, doubled, late or out of order."""
        left = self.rng.randrange(1, 12)
        self.room.note("NOISE", left)

        def copies() -> list[float]:
            nonlocal left
            left -= 1
            if left <= 0:
                self.room.lossy = None
            return self.rng.choice([[], [0.0, 0.0], [0.0, 1.0], [0.3], [2.5], [0.004], [0.0]])

        self.room.lossy = copies

    def _heal(self) -> None:
        self.room.lossy = None
        self._mend_all(0, [])
        self._restart_all(0, [])
        self._thaw_all(0, [])
        for number in self.fragile:
            self._node(number).draining, self._node(number).step_s = False, 0.002
        self.room.publish()

    def _judge(self, one: Running) -> None:
        got, want = one.tokens, one.want
        assert got == want[: len(got)], f"wrong token at {next(i for i, t in enumerate(got) if t != want[i])}"
        assert one.ended is not None
        assert one.ended <= one.began + one.deadline_s + 1.0, "ended past its deadline"
        self.tally.recoveries += len(one.core.recoveries)
        self.tally.cached += one.core.cached
        self.tally.accepted += one.core.accepted
        self.tally.rejected += one.core.drafted - one.core.accepted
        assert 0 <= one.core.accepted <= one.core.drafted
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
        lines = schedule.room.trace(400)
        raise AssertionError(
            f"seed {seed} calm={calm}: {error}\n{lines}\nseed {seed} calm={calm}: {error!r}"
        ) from error
