"""The verdicts of this node on its peers, and whom to probe next.

Owns what is known of each *subject*: one engine start of one node with one range of one model. A verdict dies with its
subject, so a restart, another range or another model is proven anew. Local: no verdict is taken from a peer. A pure core:
`next_probe` says whom to probe, the prober reports `passed`, `failed` or `unavailable`, `deadline` says when to ask again.

Invariants: probes go one by one, but a silent peer holds up the others for `OVERDUE_S` only, and at most `MAX_OUT` are out; an
answer about a subject that no probe is out for is dropped; nothing is admitted without a probe unless admission is off. A probe
that could not be made (link lost, target busy) is no verdict and is tried again soon; a failed one is tried again ever later,
because what failed may have been mended. Seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from meshd.admission.qspec import sitting_s
from meshd.vocabulary import Advert, LayerRange, NodeId

PROBE_S: Final = 20.0  # a probe is given up so long after the device may have computed it: its task must have died
OVERDUE_S: Final = 0.5  # an answer takes less, but from a device that is slow, or hangs
MAX_OUT: Final = 8
_FAILED_S: Final = (5.0, 300.0)  # first and longest pause after a failed probe
_UNAVAILABLE_S: Final = (0.5, 30.0)
_QUARANTINE_S: Final = 60.0
NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True, order=True)
class Subject:
    """What a verdict is about."""

    node_id: NodeId
    epoch: int
    generation: int
    layers: LayerRange
    digest: str


def subject_of(advert: Advert) -> Subject | None:
    """What of this advert can be proven; None while it holds nothing."""
    if advert.layers is None or not advert.digest:
        return None
    return Subject(advert.node_id, advert.epoch, advert.generation, advert.layers, advert.digest)


@dataclass(slots=True)
class _Entry:
    admitted: bool | None = None
    reason: str = "not yet probed"
    due: float = 0.0
    failures: int = 0
    misses: int = 0
    patience_s: float = PROBE_S


class VerdictBook:
    """``enabled`` False (``--no-admit``): everybody is taken at their word, and says so."""

    def __init__(self, me: NodeId, *, enabled: bool = True) -> None:
        self._me, self._enabled = me, enabled
        self._entries: dict[Subject, _Entry] = {}
        self._out: dict[Subject, tuple[float, float]] = {}  # since when, and when it is given up

    def observe(self, adverts: Iterable[Advert], now: float) -> None:
        """Who is there now (alive or suspect). Subjects that are gone are forgotten, with the probe that was out."""
        present = {s: a for a in adverts if (s := subject_of(a)) is not None and s.node_id != self._me}
        for gone in self._entries.keys() - present.keys():
            del self._entries[gone]
        for fresh in present.keys() - self._entries.keys():
            patience_s = PROBE_S + sitting_s(fresh.layers, present[fresh].capability.layer_ms_64)
            self._entries[fresh] = _Entry(due=now, patience_s=patience_s)
        for subject, (_, until) in list(self._out.items()):
            if subject not in self._entries or now >= until:
                del self._out[subject]

    def verdict(self, advert: Advert) -> tuple[bool | None, str]:
        """``admitted`` and ``admission`` of the peer list. None: not yet probed, not routed to."""
        subject = subject_of(advert)
        if subject is None:
            return None, "holds no layers"
        if not self._enabled:
            return True, "admission is off"
        entry = self._entries.get(subject)
        return (entry.admitted, entry.reason) if entry is not None else (None, "not yet probed")

    def next_probe(self, digest: str, now: float) -> Subject | None:
        """Start a probe of this subject now; None if none is due or those that are out are to be waited for.

        Those never probed go first: a newcomer may be the replica that somebody is waiting for.
        """
        if not self._enabled or now < self._free_at():
            return None
        due = [s for s, e in self._entries.items() if e.admitted is not True and s.digest == digest and now >= e.due]
        if not due:
            return None
        chosen = min(due, key=lambda s: (self._entries[s].admitted is not None, self._entries[s].due, s))
        # A probe that never comes back must not be asked for at once again.
        until = self._entries[chosen].due = now + self._entries[chosen].patience_s
        self._out.pop(chosen, None)  # the newest is the last
        self._out[chosen] = now, until
        return chosen

    def passed(self, subject: Subject) -> bool:
        """The probe came out right. True if the verdict is new; an answer that nobody waits for changes nothing."""
        entry = self._take(subject)
        if entry is None:
            return False
        entry.admitted, entry.reason, entry.failures, entry.misses = True, "probed", 0, 0
        return True

    def failed(self, subject: Subject, reason: str, now: float) -> bool:
        """The probe came out wrong."""
        entry = self._take(subject)
        if entry is None:
            return False
        entry.admitted, entry.reason = False, reason
        entry.due = now + _pause(_FAILED_S, entry.failures)
        entry.failures += 1
        return True

    def unavailable(self, subject: Subject, reason: str, now: float) -> bool:
        """The probe could not be made."""
        entry = self._take(subject)
        if entry is None:
            return False
        entry.due = now + _pause(_UNAVAILABLE_S, entry.misses)
        entry.misses += 1
        if entry.admitted is None:
            entry.reason = f"not yet probed: {reason}"
        return True

    def quarantine(self, subject: Subject, reason: str, now: float) -> bool:
        """A running node computed something wrong: refused from now, probed again after a while. True if it is news."""
        entry = self._entries.get(subject)
        if entry is None or entry.admitted is False:
            return False
        entry.admitted, entry.reason = False, reason
        entry.due = now + max(_QUARANTINE_S, _pause(_FAILED_S, entry.failures))
        entry.failures += 1
        return True

    def deadline(self, digest: str) -> float:
        """When `next_probe` may have something."""
        if not self._enabled:
            return NEVER
        due = min(
            (e.due for s, e in self._entries.items() if e.admitted is not True and s.digest == digest), default=NEVER
        )
        return max(due, self._free_at())

    def _free_at(self) -> float:
        """When one more probe may go out."""
        out = list(self._out.values())
        full = sorted(until for _, until in out)[-MAX_OUT] if len(out) >= MAX_OUT else 0.0
        return max(full, out[-1][0] + OVERDUE_S) if out else 0.0

    def _take(self, subject: Subject) -> _Entry | None:
        return self._entries.get(subject) if self._out.pop(subject, None) is not None else None


def _pause(bounds: tuple[float, float], times: int) -> float:
    first, longest = bounds
    return min(longest, first * 2.0 ** min(times, 30))


class ProbeGate:
    """The other side: a node lets itself be probed by one peer at a time, or a joiner would do nothing else for a while."""

    def __init__(self) -> None:
        self._inside: tuple[NodeId, float] | None = None

    def enter(self, prober: NodeId, now: float, limit_s: float = PROBE_S) -> bool:
        """True if the probe may run. The same prober may start over; a place not left in time is free."""
        if self._inside is not None and self._inside[0] != prober and now < self._inside[1]:
            return False
        self._inside = prober, now + limit_s
        return True

    def leave(self, prober: NodeId) -> None:
        if self._inside is not None and self._inside[0] == prober:
            self._inside = None
