"""What two nodes tell each other when a link opens: who, which run, and where gossip reaches them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshd import __version__
from meshd.identity.node_key import Identity
from meshd.vocabulary import Endpoint

WIRE: Final = 1
MAX_ADDRESSES: Final = 16


def hello_of(identity: Identity, name: str, addresses: Sequence[Endpoint]) -> Mapping[str, Any]:
    """The head of the hello; the pool adds the node id."""
    return {
        "name": name,
        "epoch": identity.epoch,
        "boot": identity.boot,
        "wire": WIRE,
        "version": __version__,
        "mesh": [[endpoint.host, endpoint.port] for endpoint in addresses[:MAX_ADDRESSES]],
    }


def addresses_untrusted(hello: Mapping[str, Any]) -> list[Endpoint]:
    """Where the peer says gossip reaches it; anything that is no address is left out."""
    told = hello.get("mesh")
    found = []
    for pair in told[:MAX_ADDRESSES] if isinstance(told, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], int):
            host = f"[{pair[0]}]" if ":" in pair[0] else pair[0]
            with contextlib.suppress(ValueError):
                found.append(Endpoint.parse(f"{host}:{pair[1]}"))
    return found
