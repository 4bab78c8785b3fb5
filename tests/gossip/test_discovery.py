"""mDNS on loopback: found and gone; D13: a port or a name that is taken is a state, not an end."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import pytest
import trio
import zeroconf

from meshd.gossip import discovery
from meshd.gossip.discovery import SERVICE, Discovery
from meshd.vocabulary import Endpoint
from tests.gossip.world import ME, OTHER

PATIENCE_S = 20.0
HERE, THERE = Endpoint("127.0.0.1", 41001), Endpoint("127.0.0.1", 41002)


def find(node: str, own: Endpoint, found: Callable[[Sequence[Endpoint]], None]) -> Discovery:
    return Discovery(
        ME if node == "me" else OTHER,
        addresses=lambda: (own,),
        bound=own,
        found=found,
        gone=lambda _: None,
    )


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.05)


def test_two_nodes_hear_each_other_and_a_goodbye() -> None:
    async def main() -> None:
        heard: list[Endpoint] = []
        gone: list[Endpoint] = []
        me = find("me", HERE, heard.extend)
        me._gone = gone.extend
        other = find("other", THERE, lambda _: None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(me.run)
            await until(lambda: me.state == "on, no peers heard")
            async with trio.open_nursery() as theirs:
                theirs.start_soon(other.run)
                await until(lambda: THERE in heard)
                assert me.state == "on, 1 heard"
                theirs.cancel_scope.cancel()
            await until(lambda: gone == [THERE])
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_d13_a_taken_port_is_a_state_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        real, refusals = zeroconf.Zeroconf, [1, 1]

        def busy(*args: object, **kwargs: object) -> object:
            if refusals:
                refusals.pop()
                raise OSError(errno.EADDRINUSE, "Address already in use")
            return real(*args, **kwargs)

        monkeypatch.setattr(zeroconf, "Zeroconf", busy)
        monkeypatch.setattr(discovery, "RETRY_S", 0.2)
        me = find("me", HERE, lambda _: None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(me.run)
            await until(lambda: me.state.startswith("unavailable: [Errno 98] Address already in use"))
            await until(lambda: me.state == "on, no peers heard")
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_an_end_that_fails_is_logged_and_the_next_session_begins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        real, failures = zeroconf.Zeroconf.close, [1, 1]

        def close(self: zeroconf.Zeroconf) -> None:
            real(self)
            if failures:
                failures.pop()
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

        monkeypatch.setattr(zeroconf.Zeroconf, "close", close)
        me = find("me", HERE, lambda _: None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(me.run)
            await until(lambda: me.state == "on, no peers heard")
            me.readdress()
            await until(lambda: len(failures) == 1)
            await until(lambda: me.state == "on, no peers heard")
            nursery.cancel_scope.cancel()
        assert not failures

    trio.run(main)
    assert caplog.text.count("mDNS did not close well: [Errno 101] Network is unreachable") == 2


def test_d13_a_taken_name_gets_a_number_and_is_found_by_its_id() -> None:
    async def main() -> None:
        heard: list[Endpoint] = []
        squatter = await trio.to_thread.run_sync(lambda: zeroconf.Zeroconf(interfaces=["127.0.0.1"]))
        info = zeroconf.ServiceInfo(
            SERVICE,
            f"{OTHER}.{SERVICE}",
            port=9,
            properties={"id": "somebody else"},
            server="squatter.local.",
            parsed_addresses=["127.0.0.1"],
        )
        await trio.to_thread.run_sync(squatter.register_service, info)
        me, other = find("me", HERE, heard.extend), find("other", THERE, lambda _: None)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(me.run)
                nursery.start_soon(other.run)
                await until(lambda: THERE in heard)
                await until(lambda: other.state.startswith("on"))  # it announces itself before it browses
                assert Endpoint("127.0.0.1", 9) not in heard
                nursery.cancel_scope.cancel()
        finally:
            await trio.to_thread.run_sync(squatter.close)

    trio.run(main)


def test_an_answer_fits_a_packet_with_many_addresses() -> None:
    """D09: eight addresses of both families, the longest name and the record of who it is."""
    told = [f"10.{i}.0.2" for i in range(4)] + [f"2001:db8:{i}::1234:5678:9abc:def0" for i in range(4)]
    assert len(told) == discovery._MAX_ADDRESSES
    info = zeroconf.ServiceInfo(
        SERVICE, f"{ME}.{SERVICE}", port=8091, properties={"id": ME}, server=f"meshd-{ME}.local.", parsed_addresses=told
    )
    out = zeroconf.DNSOutgoing(0x8400)
    for record in (info.dns_pointer(), info.dns_service(), info.dns_text(), *info.dns_addresses()):
        out.add_answer_at_time(record, 0)
    assert max(map(len, out.packets())) <= 1200
