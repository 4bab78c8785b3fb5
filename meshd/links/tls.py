"""Mutual TLS 1.3 between members, from the standard library.

Owns the contexts and what a failed handshake means in words. A handshake proves membership (the certificate chains to an
authority of our ring) and identity (its key hashes to the node id); who may be that peer is the pool's business.

Rotation: the leaf shown is signed under the ring's first key, certificates under any key of the ring are accepted. Contexts are
built once per ring; open links outlive a change of the ring, because dropping a key is about who may come in next.

Session tickets are off: links stay open, and a resumed session would skip the certificates.
"""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

import trio

from meshd.errors import LinkLost, MeshdError, StateError, WrongPeer
from meshd.identity.certificates import authority_pem, leaf_pem, node_id_untrusted
from meshd.identity.mesh_key import KeyRing
from meshd.identity.node_key import NodeKey
from meshd.links.transport import TlsTransport
from meshd.vocabulary import NodeId


class LinkTls:
    """This node's two contexts under one ring."""

    def __init__(self, key: NodeKey, ring: KeyRing) -> None:
        """Raises StateError when there is no temporary folder: ssl reads keys from files only."""
        authorities = "".join(authority_pem(mesh_key).decode() for mesh_key in ring.keys)
        try:
            with tempfile.TemporaryDirectory(prefix="meshd-") as folder:  # 0700
                shown = Path(folder) / "leaf.pem"
                shown.touch(mode=0o600)
                shown.write_bytes(leaf_pem(key, ring.first) + key.pem())
                self._server = _context(ssl.PROTOCOL_TLS_SERVER, shown, authorities)
                self._client = _context(ssl.PROTOCOL_TLS_CLIENT, shown, authorities)
        except ssl.SSLError:
            raise
        except OSError as error:
            raise StateError(f"no temporary folder can be used ({error.strerror or error}); set TMPDIR") from error
        self._server.num_tickets = 0

    def wrap(self, stream: trio.SocketStream, *, dialler: bool) -> TlsTransport:
        """The stream under TLS, not yet shaken hands."""
        return TlsTransport(stream, self._client if dialler else self._server, server_side=not dialler)


def _context(protocol: int, shown: Path, authorities: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
    context.check_hostname = False  # the name is the key's hash, compared after the handshake
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    context.load_cert_chain(shown)
    context.load_verify_locations(cadata=authorities)
    return context


async def prove(stream: TlsTransport) -> NodeId:
    """Shake hands; the node id the peer proved. Raises WrongPeer, LinkLost."""
    try:
        await stream.do_handshake()
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        meaning = explain(error)
        if type(meaning) is LinkLost:
            meaning = LinkLost("the connection closed during the TLS handshake; a peer without a mesh key does that")
        raise meaning from error
    return node_id_untrusted(stream.certificate())


def explain(error: BaseException) -> MeshdError:
    """What a broken connection means."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return WrongPeer(f"the peer belongs to another mesh: {cause.verify_message}")
    reason = (cause.reason or "") if cause is not None else ""
    if "ALERT" in reason and "CLOSE" not in reason:
        return WrongPeer(f"the peer refuses this node's certificate ({reason}): it belongs to another mesh")
    if reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return WrongPeer("the other end does not speak TLS: it has no mesh key, or it is no mesh address")
    return LinkLost(f"the connection broke{f' ({reason})' if reason else ''}")
