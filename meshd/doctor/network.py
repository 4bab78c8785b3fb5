"""Findings about finding and reaching each other: mDNS, one-way links, addresses, firewalls, clocks, cloned disks."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final

from meshd.doctor.finding import Document, Documents, Finding, Probe, at, shell

CLOCK_S: Final = 60.0
CONFLICT_S: Final = 300.0  # two devices with one identity are told of once a minute
MESH_PORT: Final = "8091"


def findings(documents: Documents) -> Iterator[Finding]:
    """In order of urgency."""
    yield from _clones(documents)
    for peer in documents.peers:
        yield from _one_way(peer)
    yield from _no_mdns(documents)
    yield from _advertised(documents)
    by_name = {peer.get("name"): peer for peer in documents.peers}
    for probe in documents.probes:
        yield from _reach(probe, by_name.get(probe.name, {}))
    yield from _clocks(documents)


def _clones(documents: Documents) -> Iterator[Finding]:
    seen = set()
    for event in documents.events:
        over = documents.t - float(event.get("t") or 0.0) > CONFLICT_S
        if event.get("ev") != "conflict" or event.get("node") in seen or over:
            continue
        seen.add(event.get("node"))
        name = str(event.get("name", "this node"))
        where = " and ".join(map(str, event.get("addresses") or ())) or "two addresses"
        text = (
            f"two devices run with the identity of {name}, at {where}: a cloned disk; each undoes what the other says"
        )
        remedy = "on the copy: stop meshd, make it an identity of its own, start it again"
        yield Finding("cloned_identity", "error", text, remedy, shell("meshd", "identity", "new"), (name,))


def _one_way(peer: Document) -> Iterator[Finding]:
    if peer.get("one_way") and peer.get("state") in ("alive", "suspect", "draining"):
        name, port = str(peer["name"]), _port(peer)
        text = f"the link with {name} is one-way: one side's packets do not arrive"
        remedy = f"open UDP and TCP port {port} on both devices (firewall, guest network, client isolation of the access point)"
        yield Finding("one_way_link", "error", text, remedy, shell("sudo", "ufw", "allow", port), (name,))


def _no_mdns(documents: Documents) -> Iterator[Finding]:
    state = str(documents.status.get("mdns") or "off")
    heard = any(peer.get("state") in ("alive", "suspect", "draining") for peer in documents.peers)
    if heard and not state.startswith("unavailable"):
        return
    join = ("meshd", "start", "--join", f"HOST:{_port(documents.me)}")
    if state.startswith("unavailable"):
        remedy = "name one node of the room at the start; mDNS is not needed then"
        yield Finding("no_mdns", "warning", f"mDNS does not work here: {state}", remedy, shell(*join))
    elif _is_loopback(documents.me):
        text = "this node listens on loopback only, so no other device can find it"
        remedy = "make a mesh key (or add the room's: meshd key add LINE), then start it again"
        yield Finding("loopback_only", "warning", text, remedy, shell("meshd", "key", "new"))
    else:
        text = f"this node hears no peers (mDNS: {state}); many access points drop multicast without a word"
        remedy = "name one node of the room at the start"
        yield Finding("no_mdns", "warning", text, remedy, shell(*join))


def _advertised(documents: Documents) -> Iterator[Finding]:
    """Loopback told to a room that is not: everybody would dial himself."""
    off_host = [peer for peer in documents.peers if peer.get("state") == "alive" and not _is_loopback(peer)]
    wrong = [peer for peer in documents.everybody if _is_loopback(peer) and peer.get("state") == "alive"]
    for peer in wrong if off_host else ():
        name = str(peer["name"])
        text = f"{name} advertises {peer['mesh']}, which means another device to everybody else"
        remedy = "start it with the address that its peers can reach"
        command = shell("meshd", "start", "--advertise", f"ADDRESS:{_port(peer)}")
        yield Finding("unreachable_address", "error", text, remedy, command, (name,))


def _reach(probe: Probe, peer: Document) -> Iterator[Finding]:
    """From here: a silent port is a firewall's work, a refused one means that the address is somebody else's."""
    if peer.get("state") == "suspect" and "ok" not in (probe.http, probe.mesh):
        text = f"{probe.name} is suspected and does not answer from here either: it has died or lost its network"
        remedy = "look after it on its device; within seconds the room knows whether it is dead"
        command = shell("meshd", "wait", *at(peer))
        yield Finding("silent_node", "error", text, remedy, command, (probe.name,))
        return
    ports = {"mesh": _port(peer), "HTTP": _port(peer, "http")}
    for what, outcome in (("mesh", probe.mesh), ("HTTP", probe.http)):
        port = ports[what]
        if outcome == "timeout":
            text = f"{probe.name}: gossip reaches it, but its {what} port {port} swallows connections: a firewall"
            remedy = "open the port on that device"
            yield Finding(
                "firewall", "error", text, remedy, shell("sudo", "ufw", "allow", f"{port}/tcp"), (probe.name,)
            )
        elif outcome not in ("", "ok"):
            where = peer.get("mesh" if what == "mesh" else "http") or "its address"
            text = f"{probe.name} advertises {where}, where nothing of it answers from here ({outcome})"
            remedy = "start it with the address that its peers can reach"
            command = shell("meshd", "start", "--advertise", f"ADDRESS:{_port(peer)}")
            yield Finding("unreachable_address", "error", text, remedy, command, (probe.name,))


def _clocks(documents: Documents) -> Iterator[Finding]:
    offsets = {probe.name: probe.clock_offset_s for probe in documents.probes if probe.clock_offset_s is not None}
    wrong = {name: offset for name, offset in offsets.items() if abs(offset) > CLOCK_S}
    if len(wrong) > 1 and len(wrong) == len(offsets):
        wrong = {"this device": -next(iter(wrong.values()))}  # all the others agree against this one
    for name, offset in wrong.items():
        text = (
            f"the clock of {name} is {abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}: logs cannot be compared"
        )
        remedy = "meshd does not need it, people who read logs and metrics do: let the device set its clock"
        yield Finding("wrong_clock", "warning", text, remedy, shell("sudo", "timedatectl", "set-ntp", "true"), (name,))


def _port(peer: Document, key: str = "mesh") -> str:
    port = str(peer.get(key) or "").rpartition(":")[2]
    return port if port.isdigit() else MESH_PORT if key == "mesh" else "8090"


def _is_loopback(peer: Document) -> bool:
    host = str(peer.get("mesh") or "").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
