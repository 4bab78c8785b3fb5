"""The certificates of a mesh: an authority that every member derives from the mesh key, and a leaf for each node's own key.

A certificate says two things at once: signed by the authority, so its holder has the mesh key; and it names the public key
whose hash is the node id, so its holder is that node. Valid from 1970 to 9999, because the clocks of such devices lie; a key is
withdrawn by rotating the mesh key, not by time. Ed25519 signatures and fixed fields make the authority byte-equal everywhere.
"""

from __future__ import annotations

import datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshd.errors import WrongPeer
from meshd.identity.mesh_key import MeshKey
from meshd.identity.node_key import NodeKey, node_id_of
from meshd.vocabulary import NodeId

_FROM: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_UNTIL: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # RFC 5280: no end


def authority_pem(mesh_key: MeshKey) -> bytes:
    """The certificate of the mesh's authority."""
    private = _authority_key(mesh_key)
    name = _authority_name(mesh_key)
    identifier = x509.SubjectKeyIdentifier.from_public_key(private.public_key())
    builder = (
        _certificate(name, name, private.public_key(), serial=1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    return builder.sign(private, None).public_bytes(Encoding.PEM)


def leaf_pem(node_key: NodeKey, mesh_key: MeshKey) -> bytes:
    """The node's certificate under that authority."""
    issuer = _authority_key(mesh_key)
    public = node_key.private.public_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node_key.node_id)])
    builder = (
        _certificate(subject, _authority_name(mesh_key), public, serial=int(node_key.node_id[1:], 16) + 2)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
    )
    return builder.sign(issuer, None).public_bytes(Encoding.PEM)


def node_id_untrusted(certificate_der: bytes | None) -> NodeId:
    """The node id that a verified peer certificate proves. Raises only WrongPeer."""
    if not certificate_der:
        raise WrongPeer("the peer showed no certificate")
    try:
        public = x509.load_der_x509_certificate(certificate_der).public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise WrongPeer(f"the peer's certificate cannot be read: {error}") from error
    if not isinstance(public, Ed25519PublicKey):
        raise WrongPeer("the peer's certificate is not for an Ed25519 key")
    return node_id_of(public.public_bytes(Encoding.Raw, PublicFormat.Raw))


def _authority_key(mesh_key: MeshKey) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(mesh_key.ca_seed())


def _authority_name(mesh_key: MeshKey) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"meshd {mesh_key.mesh_id()}")])


def _certificate(
    subject: x509.Name, issuer: x509.Name, public: Ed25519PublicKey, *, serial: int
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(issuer, subject, public, serial, _FROM, _UNTIL)


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=certificates,
        encipher_only=False,
        decipher_only=False,
    )
