"""Which of this device's addresses peers are told.

Per interface, not "the address of the default route": with a VPN up that is the tunnel's, which nobody in the room reaches.
Loopback, any-address, link-local, tunnels and virtual bridges are never told, except that a node bound to one address tells
that one. Where a packet of ours comes from is what a peer tries first anyway (``Member.source``); these are the others.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import psutil

from meshd.gossip.advert_wire import MAX_ADDRESSES
from meshd.vocabulary import Endpoint

_NOT_FOR_PEERS: Final = (
    *("tun", "tap", "utun", "ppp", "wg", "tailscale", "zt", "ipsec", "gre", "sit", "teredo", "isatap"),
    *("docker", "br-", "virbr", "cni", "flannel", "cali", "vmnet", "vboxnet", "lxcbr", "lxdbr", "podman"),
)
_WIRES_FIRST: Final = ("eth", "en", "em", "wl", "ww", "Ethernet", "Wi-Fi")


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface as the system describes it."""

    name: str
    addresses: tuple[str, ...]
    up: bool = True
    point_to_point: bool = False


def interfaces() -> list[Interface]:
    """What the system has now. Raises OSError."""
    try:
        stats = psutil.net_if_stats()
    except PermissionError:  # phones hide /proc/net: what has an address is up
        stats = {}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        literals = tuple(a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
        state = stats.get(name)
        flags = state.flags.split(",") if state is not None else []
        found.append(Interface(name, literals, state is None or state.isup, "pointopoint" in flags))
    return found


def advertised(bound: Endpoint, advertise: Endpoint | None, present: Iterable[Interface]) -> tuple[Endpoint, ...]:
    """What to tell, best first: ``--advertise`` alone, the one address bound, or those of the interfaces."""
    if advertise is not None:
        return (Endpoint(advertise.host, advertise.port or bound.port),)
    wildcard = _wildcard_version(bound.host)
    if wildcard is None:
        return (bound,)
    told: list[tuple[tuple[bool, bool, str], Endpoint]] = []
    for interface in present:
        if not interface.up or interface.point_to_point or interface.name.startswith(_NOT_FOR_PEERS):
            continue
        for literal in interface.addresses:
            address = ipaddress.ip_address(literal.partition("%")[0])
            if address.version == wildcard and _reachable(address):
                rank = (not interface.name.startswith(_WIRES_FIRST), not address.is_private, interface.name)
                told.append((rank, Endpoint(str(address), bound.port)))
    return tuple(dict.fromkeys(endpoint for _, endpoint in sorted(told)))[:MAX_ADDRESSES]


def _wildcard_version(host: str) -> int | None:
    return {"0.0.0.0": 4, "": 4, "::": 6}.get(host)


def _reachable(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return not (address.is_loopback or address.is_unspecified or address.is_link_local or address.is_multicast)


@lru_cache(maxsize=1024)
def is_literal(host: str) -> bool:
    """True for an address that needs no looking up. The scope of an IPv6 one belongs to it; IPv4 has none."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
