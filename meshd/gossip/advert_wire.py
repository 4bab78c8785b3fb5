"""An advert as bytes, small enough to travel in one datagram whatever a device has to say.

The blob is a msgpack map with short keys; epoch and incarnation are not in it, they stand in the signed statement that names
the blob by hash (`statement.py`), so a refutation need not repeat the advert. Unknown keys are ignored, missing ones take the
Advert's defaults. A device with more addresses or models than fit says the first of them: best addresses come first.
"""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from typing import Any, Final

import msgpack

from meshd.errors import BadDatagram
from meshd.gossip.limits import array, number, raw, text, unpack_untrusted, whole
from meshd.vocabulary import Advert, Capability, Endpoint, LayerRange, Loading, NodeId, is_host, is_node_name

ADVERT_BYTES: Final = 820  # with its statement and a datagram's head this stays below the payload limit
MAX_ADDRESSES: Final = 16
MAX_MODELS: Final = 16


def encode(advert: Advert) -> bytes:
    """The blob, models and then addresses cut until it fits. The name and the model always fit."""
    addresses, models = advert.addresses[:MAX_ADDRESSES], advert.capability.models[:MAX_MODELS]
    while True:
        trimmed = replace(advert, addresses=addresses, capability=replace(advert.capability, models=models))
        blob: bytes = msgpack.packb(_map(trimmed))
        if len(blob) <= ADVERT_BYTES:
            return blob
        if models:
            models = models[:-1]
        elif len(addresses) > 1:
            addresses = addresses[:-1]
        else:
            raise ValueError(f"the advert of {advert.name} has {len(blob)} bytes with one address and no models")


def decode_untrusted(blob: bytes, node_id: NodeId, epoch: int, incarnation: int) -> Advert:
    """The advert of a blob under the identity its statement names. Raises BadDatagram."""
    m = unpack_untrusted(blob, limit=ADVERT_BYTES)
    if not isinstance(m, dict):
        raise BadDatagram("advert is not a map")
    name = text(m.get("n", ""), "name")
    if not is_node_name(name):
        raise BadDatagram(f"{name!r} is not a node name")
    return Advert(
        node_id=node_id,
        name=name,
        epoch=epoch,
        incarnation=incarnation,
        addresses=tuple(_endpoint(a) for a in array(m.get("a", []), "addresses")[:MAX_ADDRESSES]),
        http=_endpoint(m["h"]) if m.get("h") is not None else None,
        version=text(m.get("v", ""), "version", longest=64),
        wire=whole(m.get("w", 1), "wire version", high=1 << 16),
        model=text(m.get("m", ""), "model"),
        digest=_digest(m.get("d", "")),
        dtype=text(m.get("t", ""), "dtype", longest=32),
        arith=text(m.get("x", ""), "arith", longest=64),
        num_layers=whole(m.get("L", 0), "num_layers", high=1 << 20),
        layers=_layers(m.get("r")),
        generation=whole(m.get("g", 0), "generation"),
        loading=_loading(m.get("l")),
        capability=_capability(m.get("c")),
        entry=m.get("e", False) is True,
        draining=m.get("D", False) is True,
    )


def _map(a: Advert) -> dict[str, Any]:
    c = a.capability
    full: dict[str, Any] = {
        "n": a.name,
        "a": [_pack_endpoint(e) for e in a.addresses],
        "h": _pack_endpoint(a.http) if a.http else None,
        "v": a.version,
        "w": a.wire,
        "m": a.model,
        "d": _pack_digest(a.digest),
        "t": a.dtype,
        "x": a.arith,
        "L": a.num_layers,
        "r": a.layers.json() if a.layers else None,
        "g": a.generation,
        "l": [*a.loading.layers.json(), a.loading.stage, round(a.loading.progress * 100)] if a.loading else None,
        "c": [
            c.device,
            c.capacity_mb,
            _micro(c.layer_ms_1),
            _micro(c.layer_ms_64),
            [_pack_digest(d) for d in c.models],
        ],
        "e": a.entry,
        "D": a.draining,
    }
    return {key: value for key, value in full.items() if value not in (None, "", False)}


def _micro(ms: float) -> int:
    return max(0, min(0xFFFFFFFF, round(ms * 1000)))


def _pack_endpoint(endpoint: Endpoint) -> list[Any]:
    try:
        return [ipaddress.ip_address(endpoint.host).packed, endpoint.port]
    except ValueError:
        return [endpoint.host, endpoint.port]


def _endpoint(value: Any) -> Endpoint:
    host, port = array(value, "address", least=2)[:2]
    if isinstance(host, bytes):
        if len(host) not in (4, 16):
            raise BadDatagram("an address has 4 or 16 bytes")
        host = str(ipaddress.ip_address(host))
    if not is_host(text(host, "host")):
        raise BadDatagram(f"{host!r} is not a host")
    return Endpoint(host, whole(port, "port", low=0, high=65535))


def _pack_digest(digest: str) -> str | bytes:
    """Hex as bytes, half the length; anything else as it is."""
    try:
        packed = bytes.fromhex(digest)
    except ValueError:
        return digest
    return packed if packed and packed.hex() == digest else digest


def _digest(value: Any) -> str:
    return raw(value, "digest").hex() if isinstance(value, bytes) else text(value, "digest", longest=128)


def _layers(value: Any) -> LayerRange | None:
    if value is None:
        return None
    start, end = (whole(v, "layer", high=1 << 20) for v in array(value, "layers", least=2)[:2])
    if start >= end:
        raise BadDatagram(f"{start}..{end} is not a layer range")
    return LayerRange(start, end)


def _loading(value: Any) -> Loading | None:
    if value is None:
        return None
    start, end, stage, percent = array(value, "loading", least=4)[:4]
    layers = _layers([start, end])
    assert layers is not None  # noqa: S101 - a list never decodes to None
    return Loading(layers, text(stage, "stage", longest=32), max(0.0, min(1.0, number(percent, "progress") / 100)))


def _capability(value: Any) -> Capability:
    if value is None:
        return Capability()
    entries = array(value, "capability")[:5]
    defaults: list[Any] = ["cpu", 0, 0, 0, []]
    device, capacity, one, sixty_four, models = entries + defaults[len(entries) :]
    return Capability(
        device=text(device, "device", longest=32),
        capacity_mb=whole(capacity, "capacity"),
        layer_ms_1=whole(one, "layer_ms") / 1000,
        layer_ms_64=whole(sixty_four, "layer_ms") / 1000,
        models=tuple(_digest(d) for d in array(models, "models")[:MAX_MODELS]),
    )
