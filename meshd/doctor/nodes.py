"""Findings about single nodes and how they compare with the others: versions, speed, memory, arithmetic, power."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from meshd.doctor.finding import Document, Documents, Finding, at, shell, status_of

SLOW_RATIO: Final = 3.0  # a hop so much slower than the median sets the pace of every route through it
SLOW_RTT_MS: Final = 150.0  # a token crosses every link once; what a busy radio does now and then is below
LOW_FREE_MB: Final = 256  # what the election leaves to the device
OVERCLAIM: Final = 1 / 3
UPGRADE: Final = "git pull && pip install '.[engine]'"
UPGRADED_IN: Final = "in the checkout that it was installed from (a fleet: deploy/mass-equip upgrade)"
HOT_C: Final = 90.0
THROTTLED: Final = 0.8


def findings(documents: Documents) -> Iterator[Finding]:
    """In order of urgency."""
    yield from _failed(documents)
    for peer in documents.present:
        yield from _jammed(peer)
        yield from _low_memory(peer)
        yield from _incompatible(peer)
        yield from _overclaims(peer)
        yield from _throttles(peer)
    yield from _versions(documents)
    yield from _slow_hops(documents)
    yield from _lone_dtype(documents)


def _failed(documents: Documents) -> Iterator[Finding]:
    """Of the node that was asked alone: why another one failed is told by its own ``/status``."""
    if documents.status.get("state") != "failed":
        return
    name = str(documents.status.get("name") or "this node")
    text = f"{name} has failed and holds nothing: {documents.status.get('reason') or 'its log says why'}"
    remedy = "cure what it names and start it again; it also tries again by itself, which shows in"
    command = shell("meshd", "status", *at(documents.me), "--watch")
    yield Finding("failed_node", "error", text, remedy, command, (name,))


def _jammed(peer: Document) -> Iterator[Finding]:
    if status_of(peer).get("jammed"):
        name = str(peer["name"])
        text = f"{name} is jammed: its load, queue or memory is far beyond what it can do, and routes avoid it"
        remedy = "hand over its work, see what else runs on it, then let it resume (meshd resume)"
        yield Finding("jammed_node", "error", text, remedy, shell("meshd", "drain", *at(peer)), (name,))


def _low_memory(peer: Document) -> Iterator[Finding]:
    health = status_of(peer)
    free, total = health.get("ram_free_mb") or 0, health.get("ram_total_mb") or 0
    if not total or free >= min(LOW_FREE_MB, total * 0.1):
        return
    name, capacity = str(peer["name"]), int(peer.get("capacity_mb") or 0)
    less = max(0, capacity - (LOW_FREE_MB - free) - LOW_FREE_MB)
    text = f"{name} has {free} MB of {total} MB free: its system may kill the worker at any time"
    remedy = "end what else runs there, or start it with a smaller capacity"
    yield Finding("low_memory", "error", text, remedy, shell("meshd", "start", "--capacity-mb", str(less)), (name,))


def _incompatible(peer: Document) -> Iterator[Finding]:
    if peer.get("incompatible"):
        name = str(peer["name"])
        text = f"{name} is here but cannot work with this node: {peer['incompatible']}"
        remedy = f"bring both to the same version, {UPGRADED_IN}"
        yield Finding("incompatible", "error", text, remedy, UPGRADE, (name,))


def _overclaims(peer: Document) -> Iterator[Finding]:
    ratio = peer.get("claim_ratio")
    if ratio is not None and ratio < OVERCLAIM and peer.get("layers"):
        name = str(peer["name"])
        text = f"{name} delivers {ratio:.0%} of the speed it claims; routes count with what was measured"
        remedy = "it measures itself at its start: end what else runs on it, drain it, and start it again"
        yield Finding("overclaim", "warning", text, remedy, shell("meshd", "drain", *at(peer)), (name,))


def _throttles(peer: Document) -> Iterator[Finding]:
    health, ratio = status_of(peer), peer.get("claim_ratio")
    if health.get("on_ac") is not False or not peer.get("layers"):
        return
    temperature, charge = health.get("temp_c"), health.get("battery_pct")
    signs = []
    if ratio is not None and ratio < THROTTLED:
        signs.append(f"runs at {ratio:.0%} of its claimed speed")
    if temperature is not None and temperature >= HOT_C:
        signs.append(f"is {temperature:.0f} C hot")
    if charge is not None and charge <= 20:
        signs.append(f"has {charge} % left")
    if signs:
        name = str(peer["name"])
        text = f"{name} is on battery and {' and '.join(signs)}: it throttles, and every route through it with it"
        remedy = "plug it in; or hand over its work until it is"
        yield Finding("throttling_on_battery", "warning", text, remedy, shell("meshd", "drain", *at(peer)), (name,))


# --- compared with the others -----------------------------------------------------------------------------------------


def _versions(documents: Documents) -> Iterator[Finding]:
    present = [peer for peer in documents.present if peer.get("version")]
    counts = Counter(str(peer["version"]) for peer in present)
    if len(counts) < 2:
        return
    newest = max(counts, key=_version_key)
    behind = tuple(str(peer["name"]) for peer in present if peer["version"] != newest)
    text = f"versions differ: {', '.join(f'{count} x {version}' for version, count in sorted(counts.items()))}"
    remedy = f"bring {', '.join(behind)} to {newest}, one at a time while the room goes on, {UPGRADED_IN}"
    yield Finding("version_mix", "warning", text, remedy, UPGRADE, behind)


def _version_key(version: str) -> tuple[tuple[int, str], ...]:
    """0.10 after 0.9; words after numbers."""
    return tuple((int(part), "") if part.isdigit() else (1 << 30, part) for part in version.split("."))


def _slow_hops(documents: Documents) -> Iterator[Finding]:
    hops = [peer for peer in documents.serving if (peer.get("layer_ms") or 0) > 0]
    for peer in hops:
        others = [float(other["layer_ms"]) for other in hops if other is not peer]
        own = float(peer["layer_ms"])  # as claimed: one that delivers less is an overclaim, which has its own cure
        usual = median(others) if others else own
        if own > SLOW_RATIO * usual:
            start, end = peer["layers"]
            fewer = max(1, round((end - start) * usual / own))
            text = f"{peer['name']} takes {own:.2f} ms a layer, the others {usual:.2f}: its {end - start} layers set the pace"
            remedy = "let it hold fewer layers (on that device), or let the election decide (--layers auto)"
            command = shell("meshd", "start", "--layers", f"{start}..{start + fewer}")
            yield Finding("slow_hop", "warning", text, remedy, command, (str(peer["name"]),))
    for peer in documents.serving:
        if (peer.get("rtt_ms") or 0) > SLOW_RTT_MS:
            text = f"{peer['name']} is {peer['rtt_ms']:.0f} ms away; every token through it waits that long"
            remedy = "use a cable or a nearer access point; see what the link does"
            host = str(peer.get("mesh") or "").rpartition(":")[0].strip("[]")
            yield Finding("slow_hop", "warning", text, remedy, shell("ping", "-c", "20", host), (str(peer["name"]),))


def _lone_dtype(documents: Documents) -> Iterator[Finding]:
    serving: Sequence[Document] = [peer for peer in documents.serving if peer.get("dtype")]
    counts = Counter(str(peer["dtype"]) for peer in serving)
    if len(counts) < 2:
        return
    usual, most = counts.most_common(1)[0]
    for peer in serving:
        dtype = str(peer["dtype"])
        if counts[dtype] == 1 and most > 1:
            text = (
                f"{peer['name']} computes in {dtype}, the others in {usual}: when an answer moves to or from it, near-ties"
                " may fall differently"
            )
            remedy = "start it in the room's arithmetic"
            flag = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(usual, usual)
            yield Finding(
                "lone_dtype", "warning", text, remedy, shell("meshd", "start", "--dtype", flag), (str(peer["name"]),)
            )
