"""Whoever recorded a dead device's datagrams and sends them again brings nobody back to life.

A receiver that was there knows each counter and takes none twice. One that restarted since has forgotten the windows: its seal
opens what an older run of the sender said, and then it is the core that must not take an echo for a sign of life.
"""

from __future__ import annotations

import itertools

import pytest

from meshd.identity.mesh_key import KeyRing, MeshKey
from meshd.identity.sealed import Opener, RejectedDatagram, Sealer
from meshd.vocabulary import NodeStatus
from tests.sim.gossip_net import SimNet, endpoint, node_id

RING = KeyRing((MeshKey(b"r" * 32),))
DEAD, ROOM, REPLAYS = 1, 5, 10_000


class Recording(SimNet):
    """Keeps what one device says, as it says it."""

    def __init__(self) -> None:
        super().__init__(seed=7, health=True)
        self.said: list[bytes] = []

    def _send(self, node: object, to: object, payload: bytes) -> None:
        if node is self.nodes.get(DEAD):
            self.said.append(payload)
        super()._send(node, to, payload)  # type: ignore[arg-type]  # the signature is the base's


def recorded() -> Recording:
    """A room in which a device has spoken for two minutes and is dead for everybody."""
    net = Recording()
    net.start_many(ROOM)
    net.run(120)
    net.kill(DEAD)
    net.run_until(lambda: all(net.state(o, DEAD) is NodeStatus.DEAD for o in net.running()), 30)
    assert len(net.said) > 100
    return net


def test_ten_thousand_sealed_replays_are_all_refused() -> None:
    said = recorded().said
    sealer, opener = Sealer(RING, node_id(DEAD), b"its boot"), Opener(RING)
    sealed = [sealer.seal(payload) for payload in said]
    for data in sealed:
        opener.open_untrusted(data)
    for data in itertools.islice(itertools.cycle(sealed), REPLAYS):
        with pytest.raises(RejectedDatagram):
            opener.open_untrusted(data)
    assert opener.rejected == {"replayed": REPLAYS}


def echo(net: Recording) -> None:
    """Everything once more, from its address, over and over."""
    for payload in itertools.islice(itertools.cycle(net.said), REPLAYS):
        core, node = net.core(0), net.nodes[0]
        net.act(node, core.receive(payload, node_id(DEAD), endpoint(DEAD), net.local(node)))
        net.run(0.005)


def test_an_echo_is_no_sign_of_life() -> None:
    net = recorded()
    since = net.now
    echo(net)
    assert [seen for seen in net.seen if seen.at >= since and seen.subject == DEAD] == []
    assert net.agreed()


def test_an_echo_is_hearsay_for_who_forgot() -> None:
    net = recorded()
    net.kill(0)
    net.run(1)
    net.start(0, join=(2,))
    net.run_until(net.agreed, 30)
    for _ in range(2):
        echo(net)
        assert all(net.state(observer, DEAD) in (NodeStatus.DEAD, None) for observer in net.running())
    assert len(net.times("join", DEAD, net.now - 100)) <= 1
    assert net.agreed([0, 2, 3, 4])
