"""Signatures of small facts that others pass on: who says it can be checked by anybody who knows the node id.

Pure. A signature is the raw public key and the Ed25519 signature, 96 bytes: the key must hash to the node id in whose name the
fact is told, so nothing has to be looked up. ``context`` keeps a signature for one purpose from being used for another.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from meshd.identity.node_key import NodeKey, node_id_of
from meshd.vocabulary import NodeId

PUBLIC_BYTES: Final = 32
SIGNATURE_BYTES: Final = PUBLIC_BYTES + 64


class Signer:
    """Signs with the node's key. A callable, so that it can be handed to a core that knows no keys."""

    def __init__(self, key: NodeKey, context: bytes = b"statement") -> None:
        self._key = key
        self._context = context

    def __call__(self, data: bytes) -> bytes:
        return self._key.public + self._key.private.sign(_message(self._context, data))


def verify_untrusted(node_id: NodeId, data: bytes, signature: bytes, context: bytes = b"statement") -> bool:
    """True when the owner of ``node_id`` signed ``data`` for this purpose. Never raises."""
    if len(signature) != SIGNATURE_BYTES or node_id_of(signature[:PUBLIC_BYTES]) != node_id:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(signature[:PUBLIC_BYTES])
        key.verify(signature[PUBLIC_BYTES:], _message(context, data))
    except (InvalidSignature, ValueError):
        return False
    return True


def _message(context: bytes, data: bytes) -> bytes:
    return b"meshd v1 " + bytes([len(context)]) + context + data
