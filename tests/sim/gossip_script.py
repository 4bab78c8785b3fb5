"""Random scripts of faults for a simulated room, and what must hold when they are over.

A script is drawn from its seed: restarts with and without warning, freezes, unplugged cables, partitions, one-way cuts, loss,
moves to other addresses, leaves. When it ends everything is repaired, and the room must agree on everybody alive within
`AGREE_S`. A failing seed fails with the trace of its run.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from meshd.gossip.settings import GossipSettings
from tests.sim.gossip_net import SimNet

AGREE_S: Final = 12.0


class Script:
    """One run: a room of a random size and a number of random faults."""

    def __init__(self, seed: int, settings: GossipSettings | None = None) -> None:
        self.rng = Random(seed)
        self.net = SimNet(settings, seed=seed, health=self.rng.random() < 0.3)
        self.size = self.rng.choice((2, 3, 4, 5, 8, 13))
        self.away: set[int] = set()
        faults = self.net.faults
        faults.loss = self.rng.choice((0.0, 0.0, 0.05, 0.2))
        faults.jitter_s = self.rng.choice((0.001, 0.05))
        faults.double = self.rng.choice((0.0, 0.1))

    def run(self) -> float:
        """Returns how long the room took to agree after the last repair."""
        net = self.net
        net.start_many(self.size, settle_s=3.0)
        for _ in range(self.rng.randrange(3, 12)):
            self.rng.choice(self._steps())()
            net.run(self.rng.choice((0.05, 0.5, 2.0, 7.0, 20.0)))
        self._repair()
        took = net.run_until(net.agreed, AGREE_S)
        net.run_until(self._same_epochs, AGREE_S)
        assert max(node.largest for node in net.nodes.values()) <= 1200
        return took

    def _steps(self) -> list[Callable[[], None]]:
        return [
            self._restart,
            self._restart,
            self._kill,
            self._freeze,
            self._unplug,
            self._partition,
            self._one_way,
            self._move,
            self._leave,
        ]

    def _pick(self) -> int | None:
        """Somebody who runs undisturbed; one always stays so, for the others to come back to."""
        able = [i for i in self.net.running() if i not in self.away]
        return self.rng.choice(able) if len(able) > 1 else None

    def _restart(self) -> None:
        i = self._pick()
        if i is not None:
            self.net.kill(i)
            self.net.run(self.rng.choice((0.0, 0.3, 5.0)))
            self._start(i)

    def _start(self, i: int) -> None:
        others = [j for j in self.net.running() if j != i]
        self.net.start(i, join=(self.rng.choice(others),) if others else ())

    def _kill(self) -> None:
        i = self._pick()
        if i is not None:
            self.net.kill(i)
            self.away.add(i)

    def _freeze(self) -> None:
        i = self._pick()
        if i is not None:
            self.net.freeze(i)
            self.away.add(i)
            self.net.at(self.rng.choice((0.5, 2.0, 6.0, 30.0)), lambda: self._thaw(i))

    def _thaw(self, i: int) -> None:
        if self.net.nodes[i].frozen:
            self.net.thaw(i)
            self.away.discard(i)

    def _unplug(self) -> None:
        i = self._pick()
        if i is not None:
            self.net.unplug(i)
            self.away.add(i)

    def _partition(self) -> None:
        cut = self.rng.randrange(1, self.size)
        self.net.partition(range(cut), range(cut, self.size))
        self.net.at(self.rng.choice((1.0, 5.0, 25.0)), self.net.heal)

    def _one_way(self) -> None:
        a, b = self.rng.sample(range(self.size), 2)
        self.net.faults.udp_cut.add((a, b))

    def _move(self) -> None:
        i = self._pick()
        if i is not None:
            self.net.kill(i)
            self.net.move(i, self.net.nodes[i].interface + 1)
            self._start(i)

    def _leave(self) -> None:
        i = self._pick()
        if i is not None:
            self.net.leave(i)
            self.away.add(i)

    def _repair(self) -> None:
        net = self.net
        net.heal()
        net.faults.loss = 0.0
        net.run(1.0)
        for i in range(self.size):
            if net.nodes[i].core is None:
                self._start(i)
            elif net.nodes[i].frozen:
                net.thaw(i)
            net.plug(i)

    def _same_epochs(self) -> bool:
        """Everybody knows the newest run of everybody, at its newest address."""
        net = self.net
        for observer in net.running():
            for member in net.core(observer).members(net.local(net.nodes[observer])):
                node = net.nodes[net.index(member.node_id)]
                if member.advert.epoch != node.epoch or member.advert.addresses != net.advert(node).addresses:
                    return False
        return True


def run(seed: int, settings: GossipSettings | None = None) -> float:
    """One script; raises AssertionError with its trace."""
    return Script(seed, settings).run()
