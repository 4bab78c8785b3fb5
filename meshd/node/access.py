"""Who may ask this node what: its API keys and its own names, out of its configuration and the room's keys."""

from __future__ import annotations

import socket

from meshd.api.guards import Access, ApiKey, Guards, Right, host_names, parse_key_file
from meshd.config import Config
from meshd.errors import LocalError
from meshd.identity.mesh_key import KeyRing


def guards_of(config: Config, ring: KeyRing | None) -> Guards:
    """Who may ask what. Raises UsageError, LocalError for the key file."""
    keys = [ApiKey.of(key, Right.ADMIN, own=True) for key in (ring.api_keys() if ring else ())]
    if config.api_key_file is not None:
        try:
            text = config.api_key_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LocalError(f"--api-key-file {config.api_key_file}: {error}") from error
        keys += parse_key_file(text, str(config.api_key_file))
    access = Access(
        tuple(keys),
        trust_loopback=config.api_key_file is None,
        open_read=config.open_read,
        open_all=config.insecure_lan and not keys,
    )
    device = socket.gethostname()  # what the network calls it, whatever --name calls it
    own = [config.name, device, device.partition(".")[0], *([config.advertise.host] if config.advertise else [])]
    return Guards(access, host_names(own))
