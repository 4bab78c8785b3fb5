"""Datagrams: nothing forged, mutated or repeated gets in, and nothing hostile keeps the next genuine one out."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import BadDatagram
from meshd.identity.mesh_key import KeyRing, MeshKey
from meshd.identity.sealed import (
    MAX_CIPHERS,
    MAX_DATAGRAM_BYTES,
    MAX_RUNS,
    OVERHEAD_BYTES,
    WINDOW,
    Opener,
    RejectedDatagram,
    ReplayWindow,
    Sealer,
)
from meshd.vocabulary import NodeId

A, B = MeshKey(b"a" * 32), MeshKey(b"b" * 32)
RING = KeyRing((A,))
ME = NodeId("0123456789abcdef" * 2)
BOOT = b"bootboot"


def refused(opener: Opener, data: bytes) -> str:
    with pytest.raises(RejectedDatagram) as caught:
        opener.open_untrusted(data)
    assert isinstance(caught.value, BadDatagram)
    return caught.value.reason


@pytest.mark.parametrize("ring", [RING, None])
def test_what_is_sealed_opens_once(ring: KeyRing | None) -> None:
    sealer, opener = Sealer(ring, ME, BOOT), Opener(ring)
    for payload in (b"", b"hello", b"x" * (MAX_DATAGRAM_BYTES - OVERHEAD_BYTES)):
        data = sealer.seal(payload)
        assert len(data) <= MAX_DATAGRAM_BYTES
        assert opener.open_untrusted(data) == (ME, BOOT, payload)
        assert refused(opener, data) == "replayed"
    assert opener.rejected == {"replayed": 3}


def test_a_payload_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="above"):
        Sealer(RING, ME, BOOT).seal(bytes(MAX_DATAGRAM_BYTES))


def test_the_payload_is_not_in_the_datagram() -> None:
    assert b"secret payload" not in Sealer(RING, ME, BOOT).seal(b"secret payload")


@pytest.mark.parametrize("bursts", [500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_hundreds_of_mutations_and_the_genuine_ones_between(bursts: int) -> None:
    rng = random.Random(5)
    sealer, opener = Sealer(RING, ME, BOOT), Opener(RING)
    for _ in range(bursts):
        genuine = sealer.seal(rng.randbytes(rng.randrange(80)))
        for _ in range(100):
            mutated = bytearray(genuine)
            where = rng.randrange(len(mutated))
            mutated[where] ^= rng.randrange(1, 256)
            if rng.random() < 0.1:
                del mutated[rng.randrange(len(mutated)) :]
            try:
                opener.open_untrusted(bytes(mutated))
            except RejectedDatagram:
                continue
            pytest.fail("a mutated datagram was accepted")
        opener.open_untrusted(genuine)
    assert sum(opener.rejected.values()) == 100 * bursts


def test_one_forged_counter_does_not_mute_the_sender() -> None:
    sealer, opener = Sealer(RING, ME, BOOT), Opener(RING)
    opener.open_untrusted(sealer.seal(b"first"))
    forged = bytearray(sealer.seal(b"second"))
    forged[31:39] = b"\xff" * 8
    assert refused(opener, bytes(forged)) == "forged"
    assert opener.open_untrusted(sealer.seal(b"third"))[2] == b"third"


def test_strangers_leave_no_trace() -> None:
    opener, stranger = Opener(RING), Sealer(RING, ME, BOOT)
    forged = bytearray(stranger.seal(b"x"))
    for n in range(2000):
        forged[7:23] = n.to_bytes(16, "big")
        assert refused(opener, bytes(forged)) == "forged"
    assert len(opener._windows) == 0  # the bound is the point


def test_ciphers_are_kept_for_the_latest_runs_and_windows_for_all() -> None:
    opener = Opener(RING)
    sealers = [Sealer(RING, ME, n.to_bytes(8, "big")) for n in range(MAX_CIPHERS + 50)]
    first = sealers[0].seal(b"first")
    opener.open_untrusted(first)
    for sealer in sealers[1:]:
        opener.open_untrusted(sealer.seal(b"x"))
    assert len(opener._ciphers) == MAX_CIPHERS  # the bound is the point
    assert refused(opener, first) == "replayed"
    assert opener.open_untrusted(sealers[0].seal(b"again"))[2] == b"again"


def test_the_table_of_runs_is_bounded() -> None:
    opener = Opener(None)
    for n in range(MAX_RUNS + 50):
        opener.open_untrusted(Sealer(None, ME, n.to_bytes(8, "big")).seal(b""))
    assert len(opener._windows) == MAX_RUNS  # the bound is the point


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "short"),
        (b"mS", "short"),
        (bytes(2000), "long"),
        (bytes(100), "magic"),
        (b"mS\x02" + bytes(100), "version"),
        (b"mS\x01" + bytes(100), "key"),
        (Sealer(None, ME, BOOT).seal(b"x" * 50), "plain"),
        (Sealer(KeyRing((B,)), ME, BOOT).seal(b""), "key"),
    ],
)
def test_each_refusal_has_its_counter(data: bytes, reason: str) -> None:
    opener = Opener(RING)
    assert refused(opener, data) == reason
    assert opener.rejected == {reason: 1}


def test_a_node_without_a_key_takes_no_sealed_datagram() -> None:
    assert refused(Opener(None), Sealer(RING, ME, BOOT).seal(b"x")) == "sealed"


def test_two_runs_of_one_node_use_different_keys_and_windows() -> None:
    opener = Opener(RING)
    one, two = Sealer(RING, ME, BOOT), Sealer(RING, ME, b"other000")
    first, second = one.seal(b"same"), two.seal(b"same")
    assert first[39:] != second[39:]
    assert opener.open_untrusted(first)[1] == BOOT
    assert opener.open_untrusted(second)[1] == b"other000"


def test_every_step_of_a_rotation_is_heard() -> None:
    old = KeyRing((A,))
    steps = [old, old.add(B), old.add(B).use(), old.add(B).use().drop()]
    for before, after in itertools.pairwise(steps):
        sealer, opener = Sealer(before, ME, BOOT), Opener(after)
        opener.open_untrusted(sealer.seal(b"x"))
        sealer.rekey(after)
        opener.open_untrusted(sealer.seal(b"y"))
        opener.rekey(before)
        last = sealer.seal(b"z")
        opener.open_untrusted(last)
        assert refused(opener, last) == "replayed"


@given(st.lists(st.integers(0, 3 * WINDOW), max_size=200))
def test_a_window_takes_each_counter_once_and_only_recent_ones(counters: list[int]) -> None:
    window = ReplayWindow()
    seen: set[int] = set()
    for counter in counters:
        expected = counter not in seen and counter > max(seen, default=-1) - WINDOW
        assert window.is_new(counter) == expected
        if expected:
            window.commit(counter)
            seen.add(counter)


@given(st.binary(max_size=1300))
def test_noise_raises_only_bad_datagram(noise: bytes) -> None:
    for opener in (Opener(RING), Opener(None)):
        try:
            opener.open_untrusted(noise)
        except RejectedDatagram:
            continue
        assert noise.startswith(b"mP\x01")
