"""What a worker is told to compute: the identity that the room knows, not what a flag or the model's config says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import trio

from meshd.config import Config
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions
from meshd.node.model import Served
from meshd.node.stage_loader import StageLoader, cgroup_free_mb
from meshd.vocabulary import MB, LayerRange, ModelSpec


class Present:
    """Weights that are all here."""

    async def ensure(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("identity", "flag"), [("int8", "auto"), ("bf16", "auto"), ("bf16", "int8"), ("fp32", "fp32")])
def test_the_worker_computes_what_the_digest_promises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, identity: str, flag: str
) -> None:
    """A room of `m@int8` may be joined by its name or by its digest, without `--dtype`; a `--dtype` changes no room."""
    told: list[WorkerOptions] = []

    async def spawn(*_: object, options: WorkerOptions, **_more: Any) -> None:
        told.append(options)

    monkeypatch.setattr(WorkerEngine, "spawn", spawn)
    spec = ModelSpec("m", "d", identity, 4, 64, 97, (1,) * 4, 1, 1, False, 1, 256)

    async def load() -> None:
        async with trio.open_nursery() as nursery:
            loader = StageLoader(
                Config(dtype=flag),
                lambda: Served(spec, tmp_path),
                1000,
                nursery,
                log=lambda _line: None,
                weights=Present(),  # type: ignore[arg-type]  # all of it that is asked here
            )
            await loader(LayerRange(0, 2), 1, lambda _what, _share: None)

    trio.run(load)
    assert [options.dtype for options in told] == [identity]


def test_a_context_only_ever_shortens_the_models() -> None:
    served = Served(ModelSpec("m", "d", "bf16", 4, 64, 97, (1,) * 4, 1, 1, False, 1, 256))
    assert [served.within(n).spec.context for n in (None, 100, 256, 1000)] == [256, 100, 256, 256]


def a_group(folder: Path, limit: str, current_mb: int, cached_mb: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current_mb * MB}\n")
    stat = (
        f"anon 5\nfile {cached_mb * MB}\ninactive_file {cached_mb * MB // 4}\nactive_file {cached_mb * MB // 4 * 3}\n"
    )
    (folder / "memory.stat").write_text(stat)


def test_what_the_groups_of_a_process_leave_it(tmp_path: Path) -> None:
    assert cgroup_free_mb("0::/\n", tmp_path) == math.inf
    a_group(tmp_path, str(2048 * MB), 1900, 1600)
    assert cgroup_free_mb("0::/\n", tmp_path) == 2048 - 300, "files that were read are no use of memory"
    slice_, service = tmp_path / "system.slice", tmp_path / "system.slice/meshd.service"
    a_group(slice_, str(1024 * MB), 100, 0)
    a_group(service, "max", 90, 0)
    own = "9:name=systemd:/\n0::/system.slice/meshd.service\n"
    assert cgroup_free_mb(own, tmp_path) == 1024 - 100, "the tightest counts"
    a_group(service, str(512 * MB), 90, 0)
    assert cgroup_free_mb(own, tmp_path) == 512 - 90
    (service / "memory.current").write_text("what")
    assert cgroup_free_mb(own, tmp_path) == 1024 - 100
    for text in ("", "0::/../../other\n", "nothing"):
        assert cgroup_free_mb(text, tmp_path) == 2048 - 300
