"""Only the owner of a node id signs in its name."""

from hypothesis import given
from hypothesis import strategies as st

from meshd.identity.node_key import NodeKey
from meshd.identity.signing import SIGNATURE_BYTES, Signer, verify_untrusted

KEY, OTHER = NodeKey.generate(), NodeKey.generate()


@given(st.binary(max_size=200))
def test_a_signature_holds_for_its_data_owner_and_purpose_only(data: bytes) -> None:
    signature = Signer(KEY)(data)
    assert len(signature) == SIGNATURE_BYTES
    assert verify_untrusted(KEY.node_id, data, signature)
    assert not verify_untrusted(KEY.node_id, data + b"x", signature)
    assert not verify_untrusted(OTHER.node_id, data, signature)
    assert not verify_untrusted(KEY.node_id, data, signature, context=b"verdict")
    assert not verify_untrusted(KEY.node_id, data, Signer(OTHER)(data))
    assert not verify_untrusted(KEY.node_id, data, KEY.public + Signer(OTHER)(data)[32:])


@given(st.binary(max_size=120), st.data())
def test_damaged_signatures_never_hold_and_never_raise(noise: bytes, data: st.DataObject) -> None:
    assert not verify_untrusted(KEY.node_id, b"data", noise)
    signature = bytearray(Signer(KEY)(b"data"))
    signature[data.draw(st.integers(0, len(signature) - 1))] ^= data.draw(st.integers(1, 255))
    assert not verify_untrusted(KEY.node_id, b"data", bytes(signature))
