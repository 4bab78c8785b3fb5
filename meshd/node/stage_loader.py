"""Starts the engine that holds a range: the rehearsal model in this process, any other in a worker.

Owns the arithmetic between the capacity given to meshd and what a worker may take; refuses before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import psutil
import trio

from meshd.config import Config
from meshd.election.capacity import RUNTIME_MB, check_fit, measured_capacity_mb, weight_budget
from meshd.election.settings import Settings
from meshd.errors import ModelRefused
from meshd.inference.engine import Engine
from meshd.inference.hash_engine import HashEngine
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions
from meshd.node.model import Served
from meshd.node.weights import Weights
from meshd.vocabulary import MB, LayerRange


def election_settings(config: Config) -> Settings:
    """The election's numbers as this node was told them."""
    return Settings(
        target_replicas=config.target_replicas, kv_reserve=config.kv_reserve, lane_fraction=config.lane_fraction
    )


def capacity_mb(config: Config) -> int:
    """What weights and KV may take: told, else what is free now, less the runtime and a reserve for the device."""
    if config.capacity_mb is not None:
        return config.capacity_mb
    return measured_capacity_mb(available_mb())


def available_mb() -> float:
    """Free memory of this device, or of a cgroup that it runs in where that is less."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii", errors="replace")
    except OSError:
        own = ""
    free: float = psutil.virtual_memory().available / MB
    return min(free, cgroup_free_mb(own, Path("/sys/fs/cgroup")))


def cgroup_free_mb(own: str, root: Path) -> float:
    """What the limits of cgroup v2 leave; infinite where there are none. ``own``: the text of ``/proc/self/cgroup``.

    Each group above sets limits too, such as a service manager's slice. Files that were read count as used, but are given back
    when memory is short: after a model was read once, they are most of what a container uses."""
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::/")), "/")
    group, free = Path(path), math.inf
    for folder in (group, *group.parents):
        here = root / str(folder).lstrip("/")
        try:
            limit = (here / "memory.max").read_text(encoding="ascii").strip()
            if limit != "max":
                used = int((here / "memory.current").read_text(encoding="ascii"))
                free = min(free, (int(limit) - used + _given_back(here)) / MB)
        except (OSError, ValueError):
            continue  # no such group to be seen from here, or no limit: the root has none
    return free


def _given_back(group: Path) -> int:
    """Bytes of cached files."""
    pairs = (line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    found = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    return found.get("inactive_file", 0) + found.get("active_file", 0)


class StageLoader:
    """Makes engines for one served model. ``nursery`` holds the workers' tasks."""

    def __init__(
        self,
        config: Config,
        served: Callable[[], Served | None],
        capacity: int,
        nursery: trio.Nursery,
        *,
        log: Callable[[str], None],
        weights: Weights,
    ) -> None:
        self._config = config
        self._served = served
        self._capacity_mb = capacity
        self._nursery = nursery
        self._log = log
        self._weights = weights

    async def __call__(self, layers: LayerRange, generation: int, progress: Callable[[str, float], None]) -> Engine:
        served = self._served()
        if served is None:
            raise ModelRefused("there is no model to load")
        settings = election_settings(self._config)
        check_fit(served.spec, layers, self._capacity_mb, settings)
        kv_bytes = math.floor(self._capacity_mb * MB) - weight_budget(self._capacity_mb, settings)
        prefix_mb = self._config.prefix_cache_mb
        prefix_bytes = None if prefix_mb is None else prefix_mb * MB
        if served.rehearsal is not None:
            model = served.rehearsal
            return HashEngine(
                served.spec,
                layers,
                seed=model.seed,
                step_ms=model.step_ms,
                generation=generation,
                kv_bytes=kv_bytes,
                max_batch=self._config.batch,
                prefix_bytes=prefix_bytes,
                prefix_ttl_s=self._config.prefix_cache_ttl,
            )
        if served.folder is None:
            raise ModelRefused(f"{served.spec.name} has no folder in the store")
        await self._weights.ensure(served, layers, lambda share: progress("fetching", share))
        return await WorkerEngine.spawn(
            self._nursery,
            served.folder,
            served.spec,
            layers,
            generation=generation,
            log=self._log,
            options=WorkerOptions(
                dtype=served.spec.dtype,  # what the digest promises, whatever this node's config or the model's says
                threads=self._config.threads or 0,
                deterministic=self._config.deterministic,
                memory_bytes=(self._capacity_mb + RUNTIME_MB) * MB,
                kv_bytes=kv_bytes,
                max_batch=self._config.batch,
                prefix_bytes=prefix_bytes,
                prefix_ttl_s=self._config.prefix_cache_ttl,
            ),
            progress=lambda share: progress("loading", share),
        )
