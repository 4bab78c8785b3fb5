"""Recording over tiny random checkpoints, against transformers' own hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the engine extra")

from meshd.errors import ModelRefused  # noqa: E402  # after the check for the extra
from meshd.inference.worker.record_qspec import main, record  # noqa: E402
from meshd.models.digest import make_manifest  # noqa: E402
from meshd.models.manifest import Manifest, write_manifest  # noqa: E402
from meshd.models.qspec_file import QspecFile  # noqa: E402
from meshd.models.tensor_hashes import TensorHashes  # noqa: E402
from tests.inference.stage.checkpoints import LAYERS, reference  # noqa: E402

pytestmark = pytest.mark.torch


def stored(folder: Path, name: str) -> tuple[object, Manifest]:
    """A tiny model in a folder with a manifest, and transformers' instance of it."""
    model = reference(name, folder, torch.float32)
    manifest = make_manifest(folder, name, "test", TensorHashes(folder / "hashes.json"), lambda *_: None)
    write_manifest(folder, manifest)
    return model, manifest


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "bloom"])
def test_every_boundary_is_what_transformers_computes(tmp_path: Path, name: str) -> None:
    model, manifest = stored(tmp_path, name)
    told: list[tuple[int, int]] = []
    path = record(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert path == tmp_path / "qspec.safetensors"
    assert told == [(layer + 1, LAYERS) for layer in range(LAYERS)]
    qspec = QspecFile(path, manifest.spec)
    for number, prompt in enumerate(qspec.golden[:3]):
        out = model(torch.tensor([prompt.ids]), output_hidden_states=True)  # type: ignore[operator]  # transformers' model
        n = len(prompt.ids)
        for boundary in range(LAYERS):  # transformers' last one is after the final norm
            rows = torch.frombuffer(bytearray(qspec.rows(number, boundary, 0, n)), dtype=torch.float32).view(n, -1)
            torch.testing.assert_close(rows, out.hidden_states[boundary][0].detach(), atol=2e-5, rtol=1e-4)
        best = out.logits[0].topk(2, dim=-1).values
        assert prompt.argmax == tuple(out.logits[0].argmax(-1).tolist())
        assert prompt.margin == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-3)


def test_two_recordings_are_equal(tmp_path: Path) -> None:
    stored(tmp_path, "llama")
    first, second = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert main([str(tmp_path), "--out", str(first)]) == 0
    assert main([str(tmp_path), "--out", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_model_with_a_file_missing_is_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, manifest = stored(tmp_path, "llama")
    name, tensor = next(iter(manifest.tensors.items()))
    lacking = type(tensor)(tensor.file, tensor.dtype, tensor.shape, "")
    tensors = {**manifest.tensors, name: lacking}
    from dataclasses import replace

    from meshd.models.manifest import digest_of

    digest = digest_of(manifest.config_sha256, manifest.tokenizer_sha256, tensors, manifest.spec.dtype)
    write_manifest(tmp_path, replace(manifest, tensors=tensors, spec=replace(manifest.spec, digest=digest)))
    with pytest.raises(ModelRefused, match="needs every layer"):
        record(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert "needs every layer" in capsys.readouterr().err
    assert not (tmp_path / "qspec.safetensors").exists()
