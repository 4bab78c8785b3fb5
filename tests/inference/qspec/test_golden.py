"""The golden prompts and the qspec file, without an engine."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import ModelRefused
from meshd.models.golden import LONGEST_TOKENS, PROMPTS, golden_prompts
from meshd.models.qspec_file import QspecFile, QspecWriter
from meshd.vocabulary import ModelSpec

SPEC = ModelSpec("m", "d" * 32, "bf16", 2, 4, 100, (1, 1), 1, 1, False, 1, 64)


def written(path: Path) -> tuple[tuple[int, ...], ...]:
    prompts = golden_prompts(SPEC.vocab_size, {7})
    writer = QspecWriter(path, SPEC, prompts)
    for number, ids in enumerate(prompts):
        n = len(ids)
        for boundary in range(3):
            values = [100.0 * boundary + position for position in range(n) for _ in range(4)]
            writer.residual(number, boundary, struct.pack(f"<{4 * n}f", *values))
        writer.ends(number, [token % 50 for token in ids], [0.5 + position for position in range(n)])
    return prompts


@given(st.integers(1, 200_000), st.sets(st.integers(0, 100), max_size=40))
def test_golden_prompts_hang_on_the_vocabulary_alone(vocab_size: int, avoid: set[int]) -> None:
    prompts = golden_prompts(vocab_size, avoid)
    assert prompts == golden_prompts(vocab_size, frozenset(avoid))
    assert len(prompts) == PROMPTS
    assert all(4 < len(ids) <= LONGEST_TOKENS and 0 <= min(ids) <= max(ids) < vocab_size for ids in prompts)
    if vocab_size > 1000:
        assert not avoid & {token for ids in prompts for token in ids}
        assert len(set(prompts)) == PROMPTS


def test_golden_prompts_are_the_same_for_ever() -> None:
    """Two versions of meshd in one room record and probe with the same ids."""
    assert golden_prompts(49152, {0, 1, 2})[0] == (1200, 9583, 15401, 6104, 19815, 7553, 2117, 11751, 17258)


def test_what_was_put_is_read_back_by_seeking(tmp_path: Path) -> None:
    path = tmp_path / "qspec.safetensors"
    prompts = written(path)
    qspec = QspecFile(path, SPEC)
    assert [prompt.ids for prompt in qspec.golden] == list(prompts)
    assert qspec.golden[3].argmax == tuple(token % 50 for token in prompts[3])
    assert qspec.golden[3].margin[:2] == (0.5, 1.5)
    assert struct.unpack("<8f", qspec.rows(5, 2, 3, 5)) == (203.0,) * 4 + (204.0,) * 4
    for wrong in ((3, 0, 1), (-1, 0, 1), (0, 0, 17), (0, 2, 1)):
        with pytest.raises(ModelRefused, match="no rows"):
            qspec.rows(0, *wrong)


def test_the_official_reader_reads_it_too(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    prompts = written(tmp_path / "q.safetensors")
    with safetensors.safe_open(tmp_path / "q.safetensors", "np") as file:
        assert file.metadata()["digest"] == SPEC.digest
        assert file.metadata()["tool"].startswith("meshd ")
        assert tuple(file.get_tensor("prompt.0.ids")) == prompts[0]
        assert file.get_tensor("prompt.0.residual").shape == (3, len(prompts[0]), 4)


@pytest.mark.parametrize(
    "other",
    [
        ModelSpec("m", "e" * 32, "bf16", 2, 4, 100, (1, 1), 1, 1, False, 1, 64),
        ModelSpec("m", "d" * 32, "bf16", 3, 4, 100, (1, 1, 1), 1, 1, False, 1, 64),
        ModelSpec("m", "d" * 32, "bf16", 2, 8, 100, (1, 1), 1, 1, False, 1, 64),
        ModelSpec("m", "d" * 32, "bf16", 2, 4, 9, (1, 1), 1, 1, False, 1, 64),
    ],
)
def test_a_qspec_of_another_model_is_refused(tmp_path: Path, other: ModelSpec) -> None:
    written(tmp_path / "q.safetensors")
    with pytest.raises(ModelRefused):
        QspecFile(tmp_path / "q.safetensors", other)


@given(st.data())
def test_damage_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("q") / "q.safetensors"
    written(path)
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed[: data.draw(st.sampled_from([len(good), at]))])
    try:
        qspec = QspecFile(path, SPEC)
    except ModelRefused:
        return
    assert len(qspec.rows(0, 1, 0, 4)) == 64
