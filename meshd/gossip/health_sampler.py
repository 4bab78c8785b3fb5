"""How this device is, every 1.5 s: memory (the container's, if it is tighter), load, battery, mains, temperature, lag.

Reads the system and nothing of meshd; what the daemon alone knows (requests in flight, tokens/s, KV) is added by ``fill``.
A sensor that is absent or fails is None, never an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil
import trio

from meshd.gossip.jam import JamJudge
from meshd.vocabulary import MB, Health

PERIOD_S: Final = 1.5
_CGROUP: Final = Path("/sys/fs/cgroup")
_CPU_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "acpitz")

_log = logging.getLogger(__name__)


class HealthSampler:
    """Samples until cancelled; ``fill`` completes a sample, ``told`` gets it."""

    def __init__(self, told: Callable[[Health], None], fill: Callable[[Health], Health] | None = None) -> None:
        self._told = told
        self._fill = fill
        self._judge = JamJudge(os.cpu_count() or 1)

    async def run(self) -> None:
        lag_s = 0.0
        while True:
            try:
                health = await trio.to_thread.run_sync(sample)
            except OSError as error:  # out of descriptors, for one: what was told last is told on until it is too old
                _log.info("the health of this device cannot be read: %s", error)
            else:
                self._take(health, lag_s)
            due = trio.current_time() + PERIOD_S
            await trio.sleep_until(due)
            lag_s = trio.current_time() - due

    def _take(self, health: Health, lag_s: float) -> None:
        if self._fill is not None:
            health = self._fill(health)
        self._told(replace(health, jammed=self._judge.judge(health, lag_s)))


def sample() -> Health:
    """What the system's sensors say now. Runs in a thread: some of them take milliseconds. Raises OSError without its memory."""
    free_mb, total_mb = _memory_mb()
    battery_pct, on_ac = _battery()
    return Health(
        ram_free_mb=free_mb,
        ram_total_mb=total_mb,
        load1=_load1(),
        battery_pct=battery_pct,
        on_ac=on_ac,
        temp_c=_temperature(),
    )


def _memory_mb() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None and limit < total:
        free, total = min(free, max(0, limit - used + _reclaimable())), limit
    return free // MB, total // MB


def _reclaimable() -> int:
    """Page cache that the container would give up before it runs out; weights that are used from their file are active, and
    count as available outside a container, too."""
    try:
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
    except (OSError, ValueError, IndexError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or "max"
        return None


def _load1() -> float:
    try:
        return psutil.getloadavg()[0]
    except OSError:  # a system that tells it to nobody, as some phones
        return 0.0


def _battery() -> tuple[int | None, bool | None]:
    try:
        battery = psutil.sensors_battery()
    except Exception as error:  # noqa: BLE001 - psutil raises what the platform's files happen to contain
        _log.debug("battery: %s", error)
        return None, None
    if battery is None:
        return None, None
    return round(battery.percent), battery.power_plugged


def _temperature() -> float | None:
    read = getattr(psutil, "sensors_temperatures", None)  # absent on macOS and Windows
    if read is None:
        return None
    try:
        groups = read()
    except Exception as error:  # noqa: BLE001 - as for the battery
        _log.debug("temperature: %s", error)
        return None
    named = [groups[name] for name in _CPU_SENSORS if groups.get(name)] or [g for g in groups.values() if g]
    readings = [reading.current for reading in named[0] if reading.current is not None] if named else []
    return round(max(readings), 1) if readings else None
