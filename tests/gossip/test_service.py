"""Services over real loopback sockets and real links: form, fail, return, leave; and sockets that refuse (D01)."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from meshd.directory import Member
from meshd.errors import LocalError
from meshd.gossip import peers_file, transport
from meshd.gossip.node import STREAM_KINDS, GossipOptions, GossipService
from meshd.gossip.settings import PRESETS
from meshd.gossip.transport import UdpSocket
from meshd.identity.mesh_key import KeyRing, MeshKey
from meshd.identity.node_key import NodeKey
from meshd.identity.sealed import Opener, Sealer
from meshd.identity.signing import Signer, verify_untrusted
from meshd.links.pool import LinkPool, listen
from meshd.links.tls import LinkTls
from meshd.vocabulary import Advert, Endpoint, NodeId, NodeStatus

RING = KeyRing((MeshKey(b"m" * 32),))
LOOPBACK = Endpoint("127.0.0.1", 0)
PATIENCE_S = 20.0


class Device:
    """A key and the service and links of its present run."""

    def __init__(self, name: str, key: NodeKey | None = None) -> None:
        self.name = name
        self.key = key or NodeKey.generate()
        self.epoch = 0
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.members: dict[NodeId, Member] = {}
        self.changed = trio.Event()
        self.endpoint = LOOPBACK
        self.scope = trio.CancelScope()
        self.service: GossipService | None = None

    @property
    def node_id(self) -> NodeId:
        return self.key.node_id

    async def run(
        self,
        *,
        options: GossipOptions,
        wrap: Callable[[UdpSocket], UdpSocket] = lambda sock: sock,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """One run: until ``scope`` is cancelled, which is as sudden as a kill."""
        self.epoch += 1
        self.scope = trio.CancelScope()
        boot = os.urandom(8)
        listeners = await listen(LOOPBACK)
        self.endpoint = Endpoint("127.0.0.1", listeners[0].socket.getsockname()[1])
        sockets = [wrap(sock) for sock in transport.bind(self.endpoint)]
        service = self.service = GossipService(
            Advert(self.node_id, self.name, self.epoch, 0, (self.endpoint,)),
            PRESETS["test"],
            sockets=sockets,
            bound=self.endpoint,
            sealer=Sealer(RING, self.node_id, boot),
            opener=Opener(RING),
            boot=boot,
            sign=Signer(self.key),
            verify=verify_untrusted,
            options=options,
            on_change=self._change,
            on_event=lambda name, fields: self.events.append((name, fields)),
            rng=Random(self.name),
        )
        pool = LinkPool(
            self.node_id,
            security=LinkTls(self.key, RING),
            say_hello=dict,
            on_hello=lambda *_: None,
            addresses=service.addresses_of,
            on_lost=lambda *_: None,
        )
        service.links = pool
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(pool.run, listeners)
                await nursery.start(service.run)
                nursery.start_soon(self._serve, pool, service, nursery)
                task_status.started()

    async def _serve(self, pool: LinkPool, service: GossipService, nursery: trio.Nursery) -> None:
        async for peer, first, stream in pool.inbound():
            assert first.kind in STREAM_KINDS
            nursery.start_soon(service.serve, peer, first, stream)

    def _change(self, members: list[Member]) -> None:
        self.members = {m.node_id: m for m in members}
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE_S):
            while not condition():
                await self.changed.wait()

    async def until_sees(self, other: Device, state: NodeStatus) -> None:
        await self.until(lambda: self.sees(other, state))

    async def until_hears(self, other: Device) -> None:
        """Its own packets have come, from where it is now."""
        await self.until(lambda: self.members[other.node_id].source == other.endpoint)

    def sees(self, other: Device, state: NodeStatus) -> bool:
        member = self.members.get(other.node_id)
        return member is not None and member.state is state and member.advert.epoch == other.epoch


@asynccontextmanager
async def room(*devices: Device, **kwargs: Any) -> AsyncIterator[trio.Nursery]:
    """All of them, joined to the first."""
    async with trio.open_nursery() as nursery:
        for device in devices:
            join = (devices[0].endpoint,) if device is not devices[0] else ()
            await start(nursery, device, join, **kwargs)
        for device in devices:
            for other in devices:
                if other is not device:
                    await device.until_sees(other, NodeStatus.ALIVE)
        yield nursery
        nursery.cancel_scope.cancel()


async def start(nursery: trio.Nursery, device: Device, join: tuple[Endpoint, ...], **kwargs: Any) -> None:
    options = GossipOptions(join=join, mdns=False, sample_health=kwargs.pop("sample_health", False))
    kwargs.setdefault("options", options)
    await nursery.start(lambda task_status: device.run(**kwargs, task_status=task_status))


def test_devices_find_each_other_and_notice_a_death_and_a_return() -> None:
    async def main() -> None:
        a, b, c = devices = [Device(name) for name in "abc"]
        async with room(*devices, sample_health=True) as nursery:
            await a.until(lambda: a.members[b.node_id].health.ram_total_mb > 0)
            await a.until_hears(b)
            b.scope.cancel()
            for survivor in (a, c):
                await survivor.until_sees(b, NodeStatus.DEAD)
                assert [name for name, fields in survivor.events if fields["node"] == b.node_id][-2:] == [
                    "suspect",
                    "failed",
                ]
            await start(nursery, b, (a.endpoint,))
            for survivor in (a, c):
                await survivor.until_sees(b, NodeStatus.ALIVE)
                await survivor.until_hears(b)

    trio.run(main)


def test_a_leave_is_told_and_a_push_pull_runs_over_the_link() -> None:
    async def main() -> None:
        a, b = Device("a"), Device("b")
        async with room(a, b):
            assert b.service is not None
            await b.service.leave()
            await a.until(lambda: a.sees(b, NodeStatus.LEFT))

    trio.run(main)


def test_a_device_without_datagrams_is_alive_through_its_link() -> None:
    """UDP is dropped both ways after the room has formed; TCP checks keep it."""

    async def main() -> None:
        muted: list[bool] = []

        def deaf(sock: UdpSocket) -> UdpSocket:
            return Faulty(sock, drop=lambda: bool(muted))

        a, b = Device("a"), Device("b")
        async with room(a, b, wrap=deaf):
            muted.append(True)
            await a.until(lambda: a.members[b.node_id].one_way)
            assert a.sees(b, NodeStatus.ALIVE)
            assert "failed" not in [name for name, _ in a.events]

    trio.run(main)


class Faulty:
    """A socket whose sends fail with the errors given, in turn, and whose datagrams vanish while ``drop`` says so."""

    def __init__(self, sock: UdpSocket, *, errors: list[int] | None = None, drop: Callable[[], bool] = bool) -> None:
        self._sock = sock
        self._errors = errors or []
        self._drop = drop

    @property
    def family(self) -> int:
        return self._sock.family

    def fileno(self) -> int:
        return self._sock.fileno()

    def sendto(self, data: bytes, address: tuple[str, int], /) -> int:
        if self._errors:
            number = self._errors.pop(0)
            raise OSError(number, os.strerror(number))
        return len(data) if self._drop() else self._sock.sendto(data, address)

    def recvfrom(self, size: int, /) -> tuple[bytes, tuple[str, int]]:
        return self._sock.recvfrom(size)

    def close(self) -> None:
        self._sock.close()


def test_d01_failed_sends_silence_nothing() -> None:
    refusals = [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENOBUFS, errno.EPERM]

    async def main() -> None:
        a, b = Device("a"), Device("b")
        async with room(a, b, wrap=lambda sock: Faulty(sock, errors=[*refusals])):
            for device in (a, b):
                assert device.service is not None
                errors = device.service.send_errors
                await device.until(lambda: set(errors) == {errno.errorcode[n] for n in refusals})  # noqa: B023 - awaited here

    trio.run(main)


def test_a_clone_of_a_device_is_reported_by_both_addresses() -> None:
    async def main() -> None:
        a, b = Device("a"), Device("b")
        clone = Device("clone", b.key)
        async with room(a, b) as nursery:
            await start(nursery, clone, (b.endpoint,))
            await b.until(lambda: "conflict" in [name for name, _ in b.events])
            fields = next(fields for name, fields in b.events if name == "conflict")
            assert set(fields["addresses"]) == {str(b.endpoint), str(clone.endpoint)}

    trio.run(main)


def test_strangers_bytes_are_counted_and_ignored() -> None:
    async def main() -> None:
        a, b = Device("a"), Device("b")
        async with room(a, b):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                for junk in (b"", b"x", b"mS" + bytes(100), bytes(3000)):
                    stranger.sendto(junk, ("127.0.0.1", a.endpoint.port))
            assert a.service is not None
            service = a.service
            await a.until(lambda: sum(service.rejected.values()) == 4)
            assert a.sees(b, NodeStatus.ALIVE)

    trio.run(main)


def test_remembered_peers_are_tried_at_the_next_start(tmp_path: Path) -> None:
    async def main() -> None:
        a, b = Device("a"), Device("b")
        async with room(a) as nursery:
            path = tmp_path / "peers.json"
            peers_file.write(path, [a.endpoint])
            await start(nursery, b, (), options=GossipOptions(mdns=False, sample_health=False, remembered=path))
            await b.until(lambda: b.sees(a, NodeStatus.ALIVE))
            assert b.members[a.node_id].via == "remembered"
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_name_is_resolved_and_a_wrong_one_is_not_fatal() -> None:
    async def main() -> None:
        a, b = Device("a"), Device("b")
        async with room(a) as nursery:
            wrong = Endpoint("no-such-host.invalid", 1)
            await start(nursery, b, (wrong, Endpoint("localhost", a.endpoint.port)))
            await b.until(lambda: b.sees(a, NodeStatus.ALIVE))
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_name_that_is_long_looked_up_keeps_no_address_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver without a network answers after half a minute, if at all."""

    known = trio.socket.getaddrinfo

    async def slow(host: str, *rest: Any, **more: Any) -> Any:
        if host == "mini-1.lan":
            await trio.sleep_forever()
        return await known(host, *rest, **more)

    async def main() -> None:
        a, b = Device("a"), Device("b")
        async with room(a) as nursery:
            monkeypatch.setattr(trio.socket, "getaddrinfo", slow)
            await start(nursery, b, (Endpoint("mini-1.lan", 1), a.endpoint))
            await b.until(lambda: b.sees(a, NodeStatus.ALIVE))
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_device_that_is_out_of_descriptors_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def main() -> None:
        monkeypatch.setattr("meshd.gossip.addresses.psutil.net_if_addrs", full)
        async with room(Device("a"), Device("b")):
            pass

    trio.run(main)


def test_a_taken_port_is_refused_with_the_flag() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(LocalError, match=r"in use by another program.*--mesh"):
            transport.bind(Endpoint("127.0.0.1", port))
