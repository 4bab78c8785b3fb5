"""The mesh key: the one secret that makes a device a member, kept as a ring of up to three keys so that it can be changed.

The first key of the ring is used for everything this node sends; all keys are accepted. A rotation has three steps, each
finished on every device before the next: add the new key (accepted), use it (first), drop the old one. Two devices one step
apart always hold each other's first key.

From each secret HKDF derives what is used, and nothing else ever sees the secret: the gossip key, the seed of the certificate
authority, the API key, and the public ids. The file holds one ``mesh-key-v1:...`` line per key, first first, mode 0600.

Errors: UsageError for a line that cannot be a key (it says what is wrong with it), StateError for a file that cannot be used.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from meshd.errors import StateError, UsageError
from meshd.identity.state_folder import write_whole

SECRET_BYTES: Final = 32
CHECK_BYTES: Final = 4
MAX_KEYS: Final = 3
MAX_FILE_BYTES: Final = 64 << 10
PREFIX: Final = "mesh-key-v1:"
_LINE_CHARS: Final = 58  # 36 bytes in base32, without padding
_LOOKALIKES: Final = str.maketrans("018", "OIB")  # base32 has no 0, 1 or 8: somebody typed what they saw


@dataclass(frozen=True, slots=True)
class MeshKey:
    """One key of the ring. Its secret shows in no repr."""

    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> MeshKey:
        return cls(os.urandom(SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> MeshKey:
        """Read ``mesh-key-v1:...`` or the whole command that carries it. Raises UsageError."""
        _, found, rest = text.partition(PREFIX)
        if not found:
            raise UsageError(f"a mesh key starts with {PREFIX}; `meshd key show` on a device of the room prints it")
        body = "".join(rest.split()).rstrip("=").upper().translate(_LOOKALIKES)
        wrong = next((char for char in body if char not in "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"), None)
        if wrong is not None:
            raise UsageError(f"the mesh key has a typo: {wrong!r} (character {body.index(wrong) + 1}) is in no key")
        if len(body) != _LINE_CHARS:
            raise UsageError(f"the mesh key has {len(body)} characters after {PREFIX} instead of {_LINE_CHARS}")
        try:
            raw = base64.b32decode(body + "=" * (-len(body) % 8))
        except binascii.Error as error:
            raise UsageError("the mesh key has a typo: it is not base32") from error
        key = cls(raw[:SECRET_BYTES])
        if key.line() != PREFIX + body:  # covers the checksum and the two bits that base32 would ignore
            raise UsageError("the mesh key has a typo: its checksum does not match; copy the whole line again")
        return key

    def line(self) -> str:
        """The key as text: secret."""
        return PREFIX + base64.b32encode(self.secret + _check(self.secret)).decode().rstrip("=")

    def add_command(self) -> str:
        """What to run on the next device: secret."""
        return f"meshd key add {self.line()}"

    def gossip_key(self) -> bytes:
        """32 bytes that seal datagrams."""
        return self._derive("gossip", 32)

    def ca_seed(self) -> bytes:
        """32 bytes: the Ed25519 seed of this mesh's certificate authority."""
        return self._derive("certificate authority", 32)

    def api_key(self) -> str:
        """The bearer key of the HTTP interface that every member can derive: secret."""
        return "mesh-" + self._derive("api", 20).hex()

    def mesh_id(self) -> str:
        """12 hex characters that name this key in public: logs, `/status`, `meshd key show`."""
        return self._derive("mesh id", 6).hex()

    def key_id(self) -> bytes:
        """4 bytes by which a datagram says with which key it was sealed."""
        return self._derive("key id", 4)

    def _derive(self, purpose: str, length: int) -> bytes:
        return HKDF(SHA256(), length, salt=b"meshd v1", info=purpose.encode()).derive(self.secret)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """One to three keys; the first sends, all are accepted."""

    keys: tuple[MeshKey, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= MAX_KEYS:
            raise ValueError(f"a ring of {len(self.keys)} keys")

    @property
    def first(self) -> MeshKey:
        return self.keys[0]

    def api_key(self) -> str:
        """The API key to send."""
        return self.first.api_key()

    def api_keys(self) -> tuple[str, ...]:
        """The API keys to accept: during a rotation a client may still send the old one."""
        return tuple(key.api_key() for key in self.keys)

    def mesh_id(self) -> str:
        return self.first.mesh_id()

    def add(self, key: MeshKey) -> KeyRing:
        """Accept ``key`` too. Known already: the ring as it is. Raises StateError when there are three."""
        if key in self.keys:
            return self
        if len(self.keys) == MAX_KEYS:
            raise StateError(
                f"the ring holds {MAX_KEYS} keys; drop one first: meshd key drop {self.keys[-1].mesh_id()}"
            )
        return KeyRing((*self.keys, key))

    def use(self, mesh_id: str | None = None) -> KeyRing:
        """Make a key the first (default: the one added last)."""
        chosen = self._find(mesh_id) if mesh_id else self.keys[-1]
        return KeyRing((chosen, *(key for key in self.keys if key != chosen)))

    def drop(self, mesh_id: str | None = None) -> KeyRing:
        """Accept a key no longer (default: the last of the ring). The key in use cannot be dropped."""
        chosen = self._find(mesh_id) if mesh_id else self.keys[-1]
        if chosen == self.first:
            raise StateError(
                f"{chosen.mesh_id()} is the key in use; make another the first with: meshd key use MESH_ID"
            )
        return KeyRing(tuple(key for key in self.keys if key != chosen))

    def _find(self, mesh_id: str) -> MeshKey:
        found = [key for key in self.keys if key.mesh_id().startswith(mesh_id.strip().lower())]
        if len(found) != 1:
            known = ", ".join(key.mesh_id() for key in self.keys)
            raise UsageError(f"{mesh_id!r} names no single key of the ring ({known})")
        return found[0]


def load(path: Path) -> KeyRing:
    """The ring in a file. Raises StateError naming the file and the cure."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise StateError(f"the mesh key {path} cannot be read: it is a folder", param="--mesh-key")
        if mode & 0o077:
            raise StateError(f"{path} can be read by others; run: chmod 600 {path}", param="--mesh-key")
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        raise StateError(
            f"there is no mesh key at {path}; make one with `meshd key new` or paste the line of another device",
            param="--mesh-key",
        ) from None
    except OSError as error:
        raise StateError(
            f"the mesh key {path} cannot be read: {error.strerror or error}", param="--mesh-key"
        ) from error
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not 1 <= len(lines) <= MAX_KEYS:
        raise StateError(f"the mesh key {path} holds {len(lines)} keys instead of 1 to {MAX_KEYS}", param="--mesh-key")
    try:
        keys = tuple(dict.fromkeys(MeshKey.parse(line) for line in lines))
    except UsageError as error:
        raise StateError(f"the mesh key {path} is damaged: {error.message}", param="--mesh-key") from error
    return KeyRing(keys)


def save(path: Path, ring: KeyRing) -> None:
    """Write the ring, 0600, whole or not at all. Raises StateError."""
    text = "# The mesh key: whoever has this file is a member of the room. The first key sends, all are accepted.\n"
    text += "".join(f"{key.line()}\n" for key in ring.keys)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise StateError(
            f"the mesh key {path} cannot be written: {error.strerror or error}", param="--mesh-key"
        ) from error


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"mesh key checksum" + secret).digest()[:CHECK_BYTES]
