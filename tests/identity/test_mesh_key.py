"""The mesh key ring: lines survive copying or name their fault; rotation never leaves two neighbours apart."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import StateError, UsageError
from meshd.identity import mesh_key
from meshd.identity.mesh_key import KeyRing, MeshKey

secrets = st.binary(min_size=32, max_size=32)


def key(n: int) -> MeshKey:
    return MeshKey(bytes([n]) * 32)


@given(secrets)
def test_a_line_reads_back_however_it_was_pasted(secret: bytes) -> None:
    made = MeshKey(secret)
    line = made.line()
    body = line.removeprefix(mesh_key.PREFIX)
    for pasted in (
        line,
        made.add_command() + "\n",
        f"  {line}  ",
        mesh_key.PREFIX + body.lower(),
        mesh_key.PREFIX + " ".join(body[i : i + 8] for i in range(0, len(body), 8)),
        mesh_key.PREFIX + body.replace("O", "0").replace("I", "1").replace("B", "8"),
    ):
        assert MeshKey.parse(pasted) == made


@given(secrets, st.data())
def test_one_wrong_character_is_a_typo(secret: bytes, data: st.DataObject) -> None:
    line = MeshKey(secret).line()
    at = data.draw(st.integers(len(mesh_key.PREFIX), len(line) - 1))
    other = data.draw(st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
    changed = line[:at] + other + line[at + 1 :]
    if changed == line:
        return
    with pytest.raises(UsageError, match="typo"):
        MeshKey.parse(changed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "starts with mesh-key-v1:"),
        ("mesh-key-v2:AAAA", "starts with mesh-key-v1:"),
        ("mesh-key-v1:ABC", "3 characters .* instead of 58"),
        ("mesh-key-v1:AB-C", "'-' .character 3."),
        ("mesh-key-v1:ABÄ", "'Ä'"),
        ("mesh-key-v1:" + "A" * 58, "checksum"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        MeshKey.parse(text)


def test_derived_values_differ_by_purpose_and_key_and_never_show_the_secret() -> None:
    a, b = key(1), key(2)
    derived = [a.gossip_key().hex(), a.ca_seed().hex(), a.api_key(), a.mesh_id(), a.key_id().hex()]
    derived += [b.gossip_key().hex(), b.ca_seed().hex(), b.api_key(), b.mesh_id(), b.key_id().hex()]
    assert len(set(derived)) == len(derived)
    assert len(a.gossip_key()) == len(a.ca_seed()) == 32
    assert a.secret.hex() not in repr(a) + repr(KeyRing((a,)))
    assert "\\x01" not in repr(a)


def test_derivation_is_pinned() -> None:
    """Other versions of the same room must derive the same."""
    zero = MeshKey(bytes(32))
    assert (zero.mesh_id(), zero.key_id().hex()) == (PINNED_MESH_ID, PINNED_KEY_ID)
    assert zero.line() == PINNED_LINE


PINNED_MESH_ID = "07f6e1a073ee"
PINNED_KEY_ID = "09c86a23"
PINNED_LINE = "mesh-key-v1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAC3PDIII"


def test_a_file_reads_back_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "mesh.key"
    ring = KeyRing((key(1), key(2)))
    mesh_key.save(path, ring)
    assert path.stat().st_mode & 0o777 == 0o600
    assert mesh_key.load(path) == ring


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_can_reach_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "mesh.key"
    mesh_key.save(path, KeyRing((key(1),)))
    path.chmod(mode)
    with pytest.raises(StateError, match=f"chmod 600 {path}"):
        mesh_key.load(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds 0 keys"),
        ("# only a comment\n", "holds 0 keys"),
        ("nonsense\n", "damaged"),
        (key(1).line()[:-5] + "\n", "53 characters"),
        ("".join(key(n).line() + "\n" for n in range(4)), "holds 4 keys"),
        ("\xff\x00", "damaged"),
    ],
)
def test_a_damaged_file_names_itself_and_the_flag(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "mesh.key"
    mesh_key.save(path, KeyRing((key(1),)))
    path.write_text(content, encoding="latin-1")
    with pytest.raises(StateError, match=words) as caught:
        mesh_key.load(path)
    assert str(path) in caught.value.message
    assert caught.value.param == "--mesh-key"


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="meshd key new"):
        mesh_key.load(tmp_path / "none")
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    with pytest.raises(StateError, match="cannot be read"):
        mesh_key.load(folder)
    with pytest.raises(StateError, match="cannot be written"):
        mesh_key.save(folder, KeyRing((key(1),)))


def test_ring_operations() -> None:
    ring = KeyRing((key(1),))
    assert ring.add(key(1)) == ring
    both = ring.add(key(2))
    assert both.first == key(1)
    assert both.use() == KeyRing((key(2), key(1)))
    assert both.use(key(1).mesh_id()) == both
    assert both.use().drop() == KeyRing((key(2),))
    assert both.api_keys() == (key(1).api_key(), key(2).api_key())
    with pytest.raises(StateError, match="key in use"):
        both.drop(key(1).mesh_id())
    with pytest.raises(StateError, match="key in use"):
        ring.drop()
    with pytest.raises(UsageError, match="names no single key"):
        both.use("zzz")
    with pytest.raises(StateError, match="drop one first"):
        both.add(key(3)).add(key(4))


def test_a_rotation_never_parts_two_devices_one_step_apart() -> None:
    old = KeyRing((key(1),))
    steps = [old, old.add(key(2)), old.add(key(2)).use(), old.add(key(2)).use().drop()]
    for before, after in itertools.pairwise(steps):
        assert before.first in after.keys
        assert after.first in before.keys
