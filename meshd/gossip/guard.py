"""Are they gone, or are we? Holds back verdicts while the fault may be ours.

Two cases: nothing at all is heard though several peers should be talking (our radio is down), and our own loop did not run
(suspended, frozen, starved). In a room of two the first cannot be told from the other's death, so it needs two live peers;
it ends by itself after ``isolation_max_s``, for then it is the others who are gone.
"""

from __future__ import annotations

from meshd.gossip.settings import GossipSettings


class Guard:
    """Remembers when anybody was heard and when our loop ran."""

    def __init__(self, settings: GossipSettings, now: float) -> None:
        self._settings = settings
        self._heard_at = now
        self._expected = now

    def heard(self, now: float, live_peers: int) -> float:
        """Anybody was heard. Returns for how long nothing had been, if that was isolation; else 0."""
        silent_s = now - self._heard_at
        self._heard_at = now
        return silent_s if self._suspicious(silent_s, live_peers) else 0.0

    def isolated_until(self, now: float, live_peers: int) -> float | None:
        """While verdicts are held back: until when at most."""
        if not self._suspicious(now - self._heard_at, live_peers):
            return None
        until = self._heard_at + self._settings.isolation_s + self._settings.isolation_max_s
        return until if now < until else None

    def entered(self, now: float) -> float:
        """Our loop runs. Returns by how long it is too late, if that is a pause; else 0."""
        late_s = now - self._expected
        if not self._settings.isolation_guard or late_s < self._settings.pause_s:
            return 0.0
        self._heard_at = max(self._heard_at, now - self._settings.isolation_s / 2)
        return late_s

    def expects(self, when: float) -> None:
        """Our loop will run again at ``when`` at the latest."""
        self._expected = when

    def _suspicious(self, silent_s: float, live_peers: int) -> bool:
        s = self._settings
        return s.isolation_guard and live_peers >= 2 and silent_s >= s.isolation_s
