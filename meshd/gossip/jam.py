"""Is this device too busy, hot, full or empty to be given work? Pure, with hysteresis, so that it does not flicker.

Each cause has a limit to become jammed and a milder one to stop; a cause must hold for two samples in a row to count and all
must be gone for four. A device that computes all day on all cores is not jammed: the load limit is far above that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshd.vocabulary import Health

_ENTER_SAMPLES: Final = 2
_LEAVE_SAMPLES: Final = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """``(jammed beyond, free again within)`` of each cause."""

    ram_free_share: tuple[float, float] = (0.03, 0.06)
    load_per_core: tuple[float, float] = (8.0, 5.0)
    temp_c: tuple[float, float] = (98.0, 92.0)
    battery_pct: tuple[float, float] = (5.0, 8.0)  # only without mains
    loop_lag_s: tuple[float, float] = (1.0, 0.3)


class JamJudge:
    """Fed each sample, says whether the device is jammed."""

    def __init__(self, cores: int, limits: Limits | None = None) -> None:
        self._cores = max(1, cores)
        self._limits = limits or Limits()
        self._run = 0  # samples in a row that speak against the present state
        self.jammed = False

    def judge(self, health: Health, loop_lag_s: float) -> bool:
        against = bool(self.causes(health, loop_lag_s)) != self.jammed
        self._run = self._run + 1 if against else 0
        if self._run >= (_LEAVE_SAMPLES if self.jammed else _ENTER_SAMPLES):
            self.jammed, self._run = not self.jammed, 0
        return self.jammed

    def causes(self, health: Health, loop_lag_s: float) -> list[str]:
        """What is beyond its limit: the strict one while jammed, else the wide one."""
        i = 1 if self.jammed else 0
        limits = self._limits
        causes = {
            "memory": health.ram_total_mb > 0 and health.ram_free_mb < limits.ram_free_share[i] * health.ram_total_mb,
            "load": health.load1 > limits.load_per_core[i] * self._cores,
            "heat": health.temp_c is not None and health.temp_c > limits.temp_c[i],
            "battery": health.battery_pct is not None
            and health.on_ac is False
            and health.battery_pct < limits.battery_pct[i],
            "lag": loop_lag_s > limits.loop_lag_s[i],
        }
        return [name for name, beyond in causes.items() if beyond]
