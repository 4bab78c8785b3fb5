"""Every number of the membership protocol, and the three named sets of them.

Owns no behaviour. All times are seconds; ``period_s`` is the heartbeat every other time is proportional to.

The defaults are SWIM with Lifeguard's suspicion and local health, as memberlist tuned them for a LAN, with four things made
for radios that blink: a ping is repeated until answered, the check over TCP starts as soon as the datagram is late, news is
spread by short fast rounds while there is any, and a suspicion heard of is looked into by a few others at once. Each rule of
the second group can be switched off, which is how its worth is measured (``benchmarks/membership_sim.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil, log10
from typing import Literal

Detector = Literal["swim", "window"]


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """What a core is tuned to. Same on every node of a room by convention, not by need."""

    detector: Detector = "swim"

    # --- probing
    period_s: float = 1.0
    ping_timeout_s: float = 0.5  # then others are asked, and TCP
    ping_repeats_s: tuple[float, ...] = (0.0, 0.125, 0.25, 0.375)
    helpers: int = 3
    verdict_s: float = 0.9  # after the first ping, and a period later for each point of doubt in ourselves
    nack_after_s: float = 0.3  # a helper says by then that it got no answer either
    tcp_check: bool = True

    # --- suspicion (Lifeguard)
    suspicion_mult: float = 4.0  # shortest: mult * max(1, log10 N) periods
    suspicion_max_mult: float = 6.0  # longest, in shortest ones
    confirmations: int = 2  # others' suspicions that bring it down to the shortest
    awareness_max: int = 7

    # --- rumours and anti-entropy
    retransmit_mult: int = 6
    fanout: int = 3
    spread_s: float = 0.1  # a round of rumours, only while there are any
    push_pull_s: float = 30.0
    catch_up_s: float = 0.5  # the next push-pull after one that found a difference
    reconnect_s: float = 5.0
    tombstone_s: float = 900.0
    progress_s: float = 2.0  # an advert that differs in loading progress only is told this often at most

    # --- guards
    isolation_s: float = 3.0
    isolation_max_s: float = 5.0  # then it is the others who are gone
    pause_s: float = 1.5  # our own loop was this late: we were suspended, not they

    # --- health
    health_others: int = 16
    health_max_age_s: float = 30.0

    # --- the reference detector: all-to-all heartbeats and a window
    window_s: float = 8.0
    window_suspect_s: float = 3.0

    # --- switches
    lifeguard: bool = True  # local health and shrinking suspicion; off: the shortest timer at once
    fresh_timer: bool = True  # a suspicion of a higher incarnation starts a new timer
    tell_accused: bool = True  # a sender we think suspect or dead is told so at once
    isolation_guard: bool = True
    flap_damping: bool = True
    verify_suspicions: bool = True

    def transmissions(self, members: int) -> int:
        """How often one rumour is sent by one node in a room of that many."""
        return self.retransmit_mult * max(1, ceil(log10(members + 1)))

    def suspicion_min_s(self, members: int) -> float:
        """The shortest suspicion in a room of that many."""
        return self.suspicion_mult * max(1.0, log10(max(members, 1))) * self.period_s

    def scaled(self, factor: float) -> GossipSettings:
        """Every duration times ``factor``; counts, tombstones and switches as they are."""
        times = {
            f.name: getattr(self, f.name) * factor
            for f in fields(self)
            if f.name.endswith("_s") and f.name not in ("ping_repeats_s", "tombstone_s")
        }
        return replace(self, ping_repeats_s=tuple(t * factor for t in self.ping_repeats_s), **times)


PRESETS: dict[str, GossipSettings] = {
    "room": GossipSettings(),
    # A wired network does not blink: no repeated pings, longer tolerance of a silent wire, less traffic when things change.
    "lan": GossipSettings(ping_repeats_s=(0.0, 0.25), spread_s=0.2, verify_suspicions=False),
    # The room five times faster, for tests on loopback.
    "test": GossipSettings().scaled(0.2),
}
