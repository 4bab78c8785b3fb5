"""Who this device is: an Ed25519 key made at its first start, and which run of it this is.

``node_id`` is the first 32 hex characters of SHA-256 of the raw public key. ``epoch`` is persisted and raised at each start: it
orders the runs of one device, so a restarted node replaces its old self at once. ``boot`` is random and never stored: it keeps
the datagram keys of two runs apart even if a disk was cloned or restored.

Both files live in the locked state folder. Raises StateError for a folder that cannot be written and for a damaged key (a new
identity is never made silently: the device would come back as a stranger). A lost or damaged epoch is replaced by the time,
which is above any count of starts.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from meshd.errors import StateError
from meshd.identity.sealed import BOOT_BYTES
from meshd.identity.state_folder import StateFolder, naming_the_folder
from meshd.vocabulary import NodeId

KEY_FILE: Final = "node.key"
EPOCH_FILE: Final = "epoch"
MAX_EPOCH: Final = (1 << 40) - 1


def node_id_of(public_key: bytes) -> NodeId:
    """The id that a raw 32-byte public key stands for."""
    return NodeId(hashlib.sha256(public_key).hexdigest()[:32])


@dataclass(frozen=True, slots=True)
class NodeKey:
    """The device's key pair."""

    private: Ed25519PrivateKey = field(repr=False)
    public: bytes
    node_id: NodeId

    @classmethod
    def of(cls, private: Ed25519PrivateKey) -> NodeKey:
        public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return cls(private, public, node_id_of(public))

    @classmethod
    def generate(cls) -> NodeKey:
        return cls.of(Ed25519PrivateKey.generate())

    def pem(self) -> bytes:
        """PKCS#8, unencrypted: the file's mode protects it."""
        return self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True, slots=True)
class Identity:
    """This run of this device."""

    key: NodeKey
    epoch: int
    boot: bytes

    @property
    def node_id(self) -> NodeId:
        return self.key.node_id


def begin_run(folder: StateFolder) -> Identity:
    """The device's identity with a new epoch, on disk before this returns. Makes the key at the first start."""
    key = _load(folder)
    if key is None:
        key = NodeKey.generate()
        folder.write(EPOCH_FILE, b"0\n")
        folder.write(KEY_FILE, key.pem())
    return Identity(key, raise_epoch(folder), os.urandom(BOOT_BYTES))


def raise_epoch(folder: StateFolder, *, above: int = 0) -> int:
    """Persist and return an epoch greater than the stored one and than ``above`` (what the room remembers of this node)."""
    epoch = max(_stored_epoch(folder), above) + 1
    folder.write(EPOCH_FILE, f"{epoch}\n".encode())
    return epoch


def show(state_dir: Path) -> NodeKey | None:
    """The key in a folder that a daemon may have locked; None before its first start."""
    return _load(StateFolder(state_dir))


def renew(folder: StateFolder) -> NodeKey:
    """A new identity in place of the old one (a cloned disk). The folder is locked, so no daemon runs on it."""
    key = NodeKey.generate()
    folder.write(EPOCH_FILE, b"0\n")
    folder.write(KEY_FILE, key.pem())
    return key


def _load(folder: StateFolder) -> NodeKey | None:
    raw = folder.read(KEY_FILE)
    if raw is None:
        return None
    path = folder.path / KEY_FILE
    with naming_the_folder(folder.path):
        mode = path.stat().st_mode
    if mode & 0o077:
        raise StateError(f"{path} can be read by others; run: chmod 600 {path}", param="--state-dir")
    try:
        private = load_pem_private_key(raw, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _damaged(path) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise _damaged(path)
    return NodeKey.of(private)


def _damaged(path: Path) -> StateError:
    return StateError(
        f"{path} is not an Ed25519 key; restore it, or make this device a new one with: meshd identity new",
        param="--state-dir",
    )


def _stored_epoch(folder: StateFolder) -> int:
    raw = (folder.read(EPOCH_FILE) or b"").strip()
    if raw.isdigit() and len(raw) <= 13 and int(raw) < MAX_EPOCH:
        return int(raw)
    return int(time.time())
