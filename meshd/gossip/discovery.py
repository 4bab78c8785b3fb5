"""mDNS: tells the link that we are here and hears of others. Only ever produces addresses to try.

zeroconf runs in its own threads; what it finds comes to trio through ``TrioToken.run_sync_soon``. Nothing here is fatal: a
port 5353 that another program holds, no network, a name that is taken, all become a state that ``/status`` shows and another
attempt a minute later. Multicast that a network drops gives no error at all: the state then says that no peers were heard.

The instance is named by the node id, so two nodes never want one name; if somebody holds it all the same, zeroconf appends a
number and the TXT record still says who it is.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import trio

from meshd.gossip.addresses import is_literal
from meshd.vocabulary import Endpoint, NodeId, is_node_id

SERVICE: Final = "_meshd._udp.local."
RETRY_S: Final = 60.0
_MAX_ADDRESSES: Final = 8  # in one answer: it must fit a packet
_INFO_TIMEOUT_MS: Final = 2000
_CLOSE_S: Final = 2.0
_MAX_HEARD: Final = 256

_log = logging.getLogger(__name__)

Found = Callable[[Sequence[Endpoint]], None]


class Discovery:
    """Announces and browses while `run` runs. ``found`` and ``gone`` are called in trio's thread."""

    def __init__(
        self,
        node_id: NodeId,
        *,
        addresses: Callable[[], Sequence[Endpoint]],
        bound: Endpoint,
        found: Found,
        gone: Found,
    ) -> None:
        self._node_id = node_id
        self._addresses = addresses
        self._bound = bound
        self._found = found
        self._gone = gone
        self._changed = trio.Event()
        self._heard: dict[str, tuple[Endpoint, ...]] = {}
        self._fault: str | None = None
        self._running = False

    @property
    def state(self) -> str:
        """For ``/status``."""
        if self._fault is not None:
            return f"unavailable: {self._fault} (tried again each minute)"
        if not self._running:
            return "starting"
        return f"on, {len(self._heard)} heard" if self._heard else "on, no peers heard"

    def readdress(self) -> None:
        """Our addresses changed: announce anew."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; never raises for anything the network does."""
        while True:
            self._changed = trio.Event()
            session = _Session(self._node_id, self._bound, tuple(self._addresses()), self._listener())
            try:
                await trio.to_thread.run_sync(session.open, abandon_on_cancel=True)
                self._fault, self._running = None, True
                await self._changed.wait()
            except Exception as error:  # noqa: BLE001 - zeroconf raises many kinds; none may stop the node
                self._fault = _reason(error)
                _log.warning("mDNS is unavailable: %s", self._fault)
                with trio.move_on_after(RETRY_S):
                    await self._changed.wait()
            finally:
                self._running = False
                await _close(session)

    def _listener(self) -> Callable[[str, tuple[Endpoint, ...] | None], None]:
        token = trio.lowlevel.current_trio_token()

        def heard(name: str, endpoints: tuple[Endpoint, ...] | None) -> None:
            try:
                token.run_sync_soon(self._take, name, endpoints)
            except trio.RunFinishedError:
                _log.debug("mDNS heard %s after the end", name)

        return heard

    def _take(self, name: str, endpoints: tuple[Endpoint, ...] | None) -> None:
        before = self._heard.pop(name, ())
        if endpoints and len(self._heard) < _MAX_HEARD:
            self._heard[name] = endpoints
        now = self._heard.get(name, ())
        if lost := [e for e in before if e not in now]:
            self._gone(lost)
        if now:
            self._found(now)


class _Session:
    """One zeroconf instance, used from worker threads only."""

    def __init__(
        self,
        node_id: NodeId,
        bound: Endpoint,
        addresses: tuple[Endpoint, ...],
        heard: Callable[[str, tuple[Endpoint, ...] | None], None],
    ) -> None:
        self._node_id = node_id
        self._bound = bound
        self._addresses = addresses
        self._heard = heard
        self._zeroconf: Any = None

    def open(self) -> None:
        """Announce and browse; takes about a second, for the name is probed first."""
        import zeroconf  # noqa: PLC0415 - 6 MB and 60 ms that a node without mDNS is spared

        where = _interfaces(self._bound, zeroconf)
        self._zeroconf = zeroconf.Zeroconf(interfaces=where, ip_version=_version(self._bound, zeroconf))
        told = [e for e in self._addresses if is_literal(e.host)][:_MAX_ADDRESSES]
        if told:
            info = zeroconf.ServiceInfo(
                SERVICE,
                f"{self._node_id}.{SERVICE}",
                port=told[0].port,
                properties={"id": self._node_id},
                server=f"meshd-{self._node_id}.local.",
                parsed_addresses=[e.host for e in told],
            )
            self._zeroconf.register_service(info, allow_name_change=True)
        zeroconf.ServiceBrowser(self._zeroconf, SERVICE, handlers=[self._browsed])

    def close(self) -> None:
        """Say goodbye and stop the threads."""
        if self._zeroconf is not None:
            self._zeroconf.close()

    def _browsed(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        """Called in zeroconf's browser thread, where waiting is allowed."""
        if state_change.name == "Removed":
            self._heard(name, None)
            return
        info = zeroconf.get_service_info(service_type, name, timeout=_INFO_TIMEOUT_MS)
        if info is None or info.port is None:
            return
        node = (info.properties.get(b"id") or b"").decode("ascii", "replace")
        if node != self._node_id and is_node_id(node):
            hosts = [host for host in info.parsed_scoped_addresses() if "%" not in host][:_MAX_ADDRESSES]
            self._heard(name, tuple(Endpoint(host, info.port) for host in hosts))


async def _close(session: _Session) -> None:
    """Within a moment, or not at all: a goodbye that multicast does not carry is not worth more."""
    with trio.CancelScope(deadline=trio.current_time() + _CLOSE_S, shield=True):
        try:
            await trio.to_thread.run_sync(session.close, abandon_on_cancel=True)
        except Exception as error:  # noqa: BLE001 - as when it opens
            _log.warning("mDNS did not close well: %s", _reason(error))


def _interfaces(bound: Endpoint, zeroconf: Any) -> Any:
    """The one interface bound, or all."""
    if is_literal(bound.host) and not ipaddress.ip_address(bound.host).is_unspecified:
        return [bound.host]
    return zeroconf.InterfaceChoice.All


def _version(bound: Endpoint, zeroconf: Any) -> Any:
    return zeroconf.IPVersion.V6Only if ":" in bound.host else zeroconf.IPVersion.V4Only


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
