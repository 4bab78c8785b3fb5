"""D07: which addresses are told, for interfaces as real devices have them."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import msgpack
import psutil
import pytest

from meshd.directory import Member
from meshd.errors import BadDatagram
from meshd.gossip import advert_wire, peers_file
from meshd.gossip.addresses import Interface, advertised, interfaces
from meshd.gossip.transport import Transport
from meshd.vocabulary import Endpoint, NodeStatus
from tests.gossip.world import ADVERT, OTHER

ANY, ANY6 = Endpoint("0.0.0.0", 8091), Endpoint("::", 8091)
LAN = Interface("eth0", ("10.77.0.2", "fe80::1%eth0", "2001:db8::2"))
LOOPBACK = Interface("lo", ("127.0.0.1", "::1"))
TUNNEL = Interface("tun9", ("10.9.0.2",))
DOCKER = Interface("docker0", ("172.17.0.1",))


def hosts(bound: Endpoint, *present: Interface, advertise: Endpoint | None = None) -> list[str]:
    return [str(e) for e in advertised(bound, advertise, present)]


def test_d07_the_lan_address_is_told_and_the_tunnels_is_not() -> None:
    assert hosts(ANY, TUNNEL, LOOPBACK, DOCKER, LAN) == ["10.77.0.2:8091"]
    assert hosts(ANY6, TUNNEL, LOOPBACK, DOCKER, LAN) == ["[2001:db8::2]:8091"]


@pytest.mark.parametrize(
    "other",
    [
        Interface("wg0", ("10.3.0.1",)),
        Interface("tailscale0", ("100.64.0.1",)),
        Interface("weird", ("10.4.0.1",), point_to_point=True),
        Interface("eth1", ("10.5.0.1",), up=False),
        Interface("eth2", ("169.254.3.4",)),
    ],
)
def test_d07_what_peers_cannot_reach_is_not_told(other: Interface) -> None:
    assert hosts(ANY, other) == []


def test_advertise_overrides_and_takes_the_bound_port() -> None:
    assert hosts(ANY, LAN, advertise=Endpoint("192.0.2.7", 0)) == ["192.0.2.7:8091"]
    assert hosts(ANY, LAN, advertise=Endpoint("192.0.2.7", 9000)) == ["192.0.2.7:9000"]


def test_a_bound_address_is_told_whatever_it_is() -> None:
    assert hosts(Endpoint("127.0.0.1", 7001), LAN) == ["127.0.0.1:7001"]
    assert hosts(Endpoint("10.9.0.2", 7001), LAN, TUNNEL) == ["10.9.0.2:7001"]


def test_wires_come_before_the_rest_and_the_number_is_bounded() -> None:
    many = [Interface(f"dummy{i:02}", (f"10.1.{i}.2",)) for i in range(30)]
    told = hosts(ANY, *many, LAN)
    assert told[0] == "10.77.0.2:8091"
    assert len(told) == 16


def test_this_devices_interfaces_can_be_read() -> None:
    assert any("127.0.0.1" in interface.addresses for interface in interfaces())


def test_a_phone_that_hides_its_interfaces_tells_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        raise PermissionError(errno.EACCES, "Permission denied: '/proc/net/dev'")

    monkeypatch.setattr(psutil, "net_if_stats", hidden)
    assert any("127.0.0.1" in interface.addresses and interface.up for interface in interfaces())


def test_live_peers_are_remembered_by_the_address_that_works(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    source = Endpoint("10.0.0.9", 8091)
    members = [
        Member(ADVERT, via="self"),
        Member(ADVERT, source=source, via="gossip"),
        Member(ADVERT, via="mdns"),
        Member(ADVERT, state=NodeStatus.DEAD, source=Endpoint("10.0.0.10", 8091)),
    ]
    peers_file.write(path, peers_file.addresses(members))
    assert peers_file.read(path) == [source, ADVERT.addresses[0]]


@pytest.mark.parametrize("damage", [b"", b"{", b"7", b'{"a": 1}', b'["10.0.0.1"]', b"\xff\xfe", b"[" * 70_000])
def test_a_damaged_file_of_peers_is_an_empty_one(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(damage)
    assert peers_file.read(path) == []
    assert peers_file.read(tmp_path / "absent.json") == []
    peers_file.write(tmp_path / "no" / "folder" / "peers.json", [])


@pytest.mark.parametrize("host", ["1.2.3.4%\0", "1.2.3.4%eth0", "mini\x1b[31m", "fe80::1%\0", "a name", "mini%lan", ""])
def test_what_is_no_host_is_refused_wherever_it_comes_from(host: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        Endpoint.parse(f"[{host}]:8091" if ":" in host else f"{host}:8091")
    with pytest.raises(BadDatagram, match="is not a host"):
        advert_wire.decode_untrusted(msgpack.packb({"n": "x", "a": [[host, 8091]]}), OTHER, 1, 1)


@pytest.mark.parametrize("host", ["mini-3.lan", "1.2.3.4", "fe80::1%eth0", "2001:db8::7"])
def test_what_is_a_host_is_read(host: str) -> None:
    told = Endpoint(host, 8091)
    assert Endpoint.parse(str(told)) == told
    assert advert_wire.decode_untrusted(msgpack.packb({"n": "x", "a": [[host, 8091]]}), OTHER, 1, 1).addresses == (
        told,
    )


def test_no_address_can_end_who_sends_to_it() -> None:
    """And none is looked up: that would block every other peer."""
    sockets = [socket.socket(family, socket.SOCK_DGRAM) for family in (socket.AF_INET, socket.AF_INET6)]
    transport = Transport(sockets)
    try:
        for host in ("1.2.3.4%\0", "1.2.3.4%name", "name"):
            assert not transport.send(Endpoint(host, 9), b"x"), host
        assert not transport.errors  # it did not get as far as the system
        for host in ("::1%\0", "::1%none", "::1%\udcff"):
            assert not transport.send(Endpoint(host, 9), b"x"), host
        assert transport.sent_datagrams == 0
        assert set(transport.errors) <= {"TypeError", "ValueError", "UnicodeEncodeError", "OSError", "EINVAL", "ENODEV"}
    finally:
        transport.close()
