"""Datagrams that only members can make and nobody can repeat.

Layout (big-endian): magic 2, version 1, key id 4, sender 16, boot 8, counter 8, then ciphertext and tag 16. The 39 bytes before
the ciphertext are associated data. Each run of each sender has its own ChaCha20-Poly1305 key, HMAC(gossip key, sender + boot),
so a counter from zero never repeats a nonce, whoever else seals with the same mesh key.

Pure: no clock, no socket. Order of checks: length, magic, key id, replay window looked at, decrypt, window moved. Moving it
before the tag is verified would let one forged counter mute a sender for good. Nothing is remembered of a sender until a
datagram of it verified, and of verified ones the most recent `MAX_RUNS` runs.

Without a ring (loopback, or an open LAN on request) the same head travels without ciphertext and tag. A node with a ring takes
no plain datagram, and the other way round.

What this does not stop: a capture replayed after the *receiver* restarted. The facts inside are ordered by epoch and
incarnation, so an old one changes nothing.
"""

from __future__ import annotations

import hmac
import struct
from collections import Counter, OrderedDict
from typing import Final, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from meshd.errors import BadDatagram
from meshd.identity.mesh_key import KeyRing
from meshd.vocabulary import NodeId

MAX_DATAGRAM_BYTES: Final = 1200
WINDOW: Final = 1024
MAX_RUNS: Final = 4096
MAX_CIPHERS: Final = 256  # 2 kB each, and made anew in the time of one datagram
BOOT_BYTES: Final = 8

_HEAD: Final = struct.Struct(">2sB4s16s8sQ")
_SEALED, _PLAIN = b"mS", b"mP"
_VERSION: Final = 1
_TAG_BYTES: Final = 16
_NO_KEY: Final = bytes(4)
OVERHEAD_BYTES: Final = _HEAD.size + _TAG_BYTES

Key = TypeVar("Key")
Value = TypeVar("Value")
_Name = tuple[bytes, bytes]  # of a run: sender and boot


class RejectedDatagram(BadDatagram):
    """``reason`` is the counter it belongs to: long, short, magic, version, plain, sealed, key, replayed, forged."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"datagram refused: {reason}")
        self.reason = reason


def _run_cipher(gossip_key: bytes, sender: bytes, boot: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(hmac.digest(gossip_key, sender + boot, "sha256"))


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "big")


class Sealer:
    """Seals what this run of this node sends, with the first key of the ring."""

    def __init__(self, ring: KeyRing | None, node_id: NodeId, boot: bytes) -> None:
        if len(boot) != BOOT_BYTES:
            raise ValueError(f"boot has {len(boot)} bytes")
        self._sender = bytes.fromhex(node_id)
        self._boot = boot
        self._counter = 0
        self._key_id = _NO_KEY
        self._cipher: ChaCha20Poly1305 | None = None
        self.rekey(ring)

    def rekey(self, ring: KeyRing | None) -> None:
        """Use another ring from now on. The counter goes on, so a return to an old key repeats no nonce."""
        self._key_id = ring.first.key_id() if ring else _NO_KEY
        self._cipher = _run_cipher(ring.first.gossip_key(), self._sender, self._boot) if ring else None

    def seal(self, payload: bytes) -> bytes:
        """The datagram. Raises ValueError for a payload that leaves no room for the head."""
        if len(payload) > MAX_DATAGRAM_BYTES - OVERHEAD_BYTES:
            raise ValueError(f"a payload of {len(payload)} bytes is above {MAX_DATAGRAM_BYTES - OVERHEAD_BYTES}")
        self._counter += 1
        magic = _SEALED if self._cipher else _PLAIN
        head = _HEAD.pack(magic, _VERSION, self._key_id, self._sender, self._boot, self._counter)
        if self._cipher is None:
            return head + payload
        return head + self._cipher.encrypt(_nonce(self._counter), payload, head)


class ReplayWindow:
    """Which counters of one run were seen: the highest, and which of the `WINDOW` below it."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0

    def is_new(self, counter: int) -> bool:
        """Look, change nothing."""
        if counter > self._highest:
            return True
        age = self._highest - counter
        return age < WINDOW and not self._seen >> age & 1

    def commit(self, counter: int) -> None:
        """The datagram with this counter verified."""
        if counter > self._highest:
            shift = min(counter - self._highest, WINDOW)
            self._seen = (self._seen << shift | 1) & ((1 << WINDOW) - 1)
            self._highest = counter
        else:
            self._seen |= 1 << (self._highest - counter)


class Opener:
    """Opens what others sealed with any key of the ring. ``rejected`` counts refusals by reason."""

    def __init__(self, ring: KeyRing | None) -> None:
        self._windows: OrderedDict[_Name, ReplayWindow] = OrderedDict()
        self._ciphers: OrderedDict[tuple[bytes, _Name], ChaCha20Poly1305] = OrderedDict()  # by key id, too
        self._gossip_keys: dict[bytes, bytes] = {}
        self.rejected: Counter[str] = Counter()
        self.rekey(ring)

    def rekey(self, ring: KeyRing | None) -> None:
        """Accept another ring from now on; replay windows are kept."""
        self._gossip_keys = {key.key_id(): key.gossip_key() for key in ring.keys} if ring else {}

    def open_untrusted(self, data: bytes) -> tuple[NodeId, bytes, bytes]:
        """Sender, its boot, and the payload. Raises only RejectedDatagram (a BadDatagram)."""
        try:
            return self._open_untrusted(data)
        except RejectedDatagram as refused:
            self.rejected[refused.reason] += 1
            raise

    def _open_untrusted(self, data: bytes) -> tuple[NodeId, bytes, bytes]:
        key_id, sender, boot, counter = self._head_untrusted(data)
        name = sender, boot
        window = self._windows.get(name)
        if window is not None and not window.is_new(counter):
            raise RejectedDatagram("replayed")
        cipher = self._cipher(key_id, name)
        payload = data[_HEAD.size :]
        if cipher is not None:
            try:
                payload = cipher.decrypt(_nonce(counter), payload, data[: _HEAD.size])
            except InvalidTag:
                raise RejectedDatagram("forged") from None
            _keep(self._ciphers, (key_id, name), cipher, MAX_CIPHERS)
        window = window or ReplayWindow()
        window.commit(counter)
        _keep(self._windows, name, window, MAX_RUNS)
        return NodeId(sender.hex()), boot, payload

    def _head_untrusted(self, data: bytes) -> tuple[bytes, bytes, bytes, int]:
        if len(data) > MAX_DATAGRAM_BYTES:
            raise RejectedDatagram("long")
        if len(data) < _HEAD.size + (_TAG_BYTES if self._gossip_keys else 0):
            raise RejectedDatagram("short")
        magic, version, key_id, sender, boot, counter = _HEAD.unpack_from(data)
        if magic not in (_SEALED, _PLAIN):
            raise RejectedDatagram("magic")
        if version != _VERSION:
            raise RejectedDatagram("version")
        if (magic == _SEALED) != bool(self._gossip_keys):
            raise RejectedDatagram("sealed" if magic == _SEALED else "plain")
        if self._gossip_keys and key_id not in self._gossip_keys:
            raise RejectedDatagram("key")
        return key_id, sender, boot, counter

    def _cipher(self, key_id: bytes, name: _Name) -> ChaCha20Poly1305 | None:
        if not self._gossip_keys:
            return None
        return self._ciphers.get((key_id, name)) or _run_cipher(self._gossip_keys[key_id], *name)


def _keep(kept: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """As the latest of at most so many."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
