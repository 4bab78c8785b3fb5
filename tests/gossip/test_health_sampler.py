"""The sampler on this device, and its container's limits."""

from __future__ import annotations

import errno
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing

from meshd.gossip import health_sampler
from meshd.gossip.health_sampler import HealthSampler, sample
from meshd.vocabulary import MB, Health


def test_a_sample_of_this_device_is_plausible() -> None:
    health = sample()
    assert 0 < health.ram_free_mb <= health.ram_total_mb
    assert health.load1 >= 0


def test_a_containers_limit_counts_and_its_page_cache_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_sampler, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{64 * MB}\n")
    (tmp_path / "memory.current").write_text(f"{60 * MB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {10 * MB}\nactive_file {20 * MB}\n")
    assert (sample().ram_free_mb, sample().ram_total_mb) == (34, 64)
    (tmp_path / "memory.max").write_text("max\n")
    assert sample().ram_total_mb > 64


def test_a_sensor_that_fails_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a platform's surprise")

    def hidden() -> None:
        raise OSError("Load averages are unobtainable")

    monkeypatch.setattr(psutil, "getloadavg", hidden)
    monkeypatch.setattr(psutil, "sensors_battery", broken)
    monkeypatch.setattr(psutil, "sensors_temperatures", broken, raising=False)
    health = sample()
    assert (health.load1, health.battery_pct, health.on_ac, health.temp_c) == (0.0, None, None, None)


def test_a_device_that_is_out_of_descriptors_is_sampled_once_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    memory = psutil.virtual_memory

    def full() -> object:
        looks.append(1)
        if len(looks) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return memory()

    monkeypatch.setattr(psutil, "virtual_memory", full)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(HealthSampler(lambda _: nursery.cancel_scope.cancel()).run)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(looks) == 3


def test_a_sample_is_completed_by_the_daemon_and_told() -> None:
    told: list[Health] = []

    async def main() -> None:
        def take(health: Health) -> None:
            told.append(health)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(HealthSampler(take, lambda h: Health(ram_total_mb=h.ram_total_mb, in_flight=7)).run)

    trio.run(main)
    assert told[0].in_flight == 7
    assert told[0].ram_total_mb > 0
