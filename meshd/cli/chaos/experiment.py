"""The experiment: a whole room, clients that never stop, and strikes by the schedule; then the verdict.

Owns the order: undisturbed answers first (what all later ones must equal), a calm time, the strikes, the wait until everybody
is back, a calm time again. Raises LocalError when the room does not become whole. What happens is told to ``heard`` as it
happens, so that it can be watched.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from meshd.cli.chaos import verdict
from meshd.cli.chaos.box import Struck
from meshd.cli.chaos.clients import Clients
from meshd.cli.chaos.schedule import OUTAGE, Plan, Strike, strikes
from meshd.cli.chaos.verdict import Asked, Outage, Stall, lost_layers
from meshd.errors import LocalError, MeshdError
from meshd.vocabulary import LayerRange

PROVEN_S: Final = 2.0  # after the first entry has proven a node that came back, the others have too


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients ask. ``deadline_s``: nobody waits longer for a whole answer."""

    prompts: Sequence[str]
    max_tokens: int = 48
    clients: int = 8
    deadline_s: float = 60.0
    calm_s: float = 10.0
    after_s: float = 30.0
    patience_s: float = 120.0  # for the room to be whole

    def body(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "deadline_ms": int(self.deadline_s * 1000)}


@dataclass(slots=True)
class Report:
    """All that was seen. Times are seconds since ``began`` (monotonic; ``unix`` is the same moment in the logs)."""

    places: Mapping[str, LayerRange | None]
    load: Load
    began: float
    unix: float
    expected: list[tuple[int, ...]] = field(default_factory=list)
    answers: list[Asked] = field(default_factory=list)
    done: list[Strike] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    calm_from_s: float = 0.0
    calm_until_s: float = 0.0
    whole_s: float = 0.0
    end_s: float = 0.0
    hanging: int = 0

    def judge(self, asked: Asked) -> str:
        return verdict.judge(asked, self.expected[asked.prompt], self.outages, self.load.deadline_s)

    def faults(self) -> list[tuple[str, Asked]]:
        """Whatever must not be."""
        judged = [(self.judge(asked), asked) for asked in self.answers]
        return [(outcome, asked) for outcome, asked in judged if outcome not in (verdict.RIGHT, verdict.HONEST)]

    def slow(self, over_s: float, outage_over_s: float) -> list[tuple[Stall, Asked]]:
        """Stalls of that length, the longest first; of those that an outage explains only the very long."""
        found = [(stall, one) for one in self.answers for stall in verdict.stalls(one, self.done, self.outages)]
        slow = [
            (stall, one) for stall, one in found if stall.length_s > (outage_over_s if stall.kind == OUTAGE else over_s)
        ]
        return sorted(slow, key=lambda pair: -pair[0].length_s)

    def figures(self) -> dict[str, Any]:
        """Counts, and throughput before and after."""
        known = self.outages
        outcomes = [self.judge(asked) for asked in self.answers]
        before = verdict.tokens_per_s(self.answers, self.calm_from_s, self.calm_until_s)
        after = verdict.tokens_per_s(self.answers, self.whole_s, self.end_s)
        honest = [asked for asked, outcome in zip(self.answers, outcomes, strict=True) if outcome == verdict.HONEST]
        return {
            "requests": len(self.answers),
            "outcomes": verdict.tally(outcomes),
            "hanging": self.hanging,
            "strikes": dict(Counter(one.kind for one in self.done)),
            "tokens_per_s_before": round(before, 1),
            "tokens_per_s_after": round(after, 1),
            "after_to_before": round(after / before, 3) if before else None,
            "noticed_s": sorted(round(verdict.noticed_s(asked, known), 3) for asked in honest),
        }


def _layers(one: LayerRange) -> range:
    return range(one.start, one.end)


class Experiment:
    """One run. ``heard(kind, what)``: ("strike" | "release" | "skip", Strike), ("answer", Asked), ("phase", str)."""

    def __init__(
        self,
        struck: Struck,
        places: Mapping[str, LayerRange | None],
        plan: Plan,
        load: Load,
        *,
        seed: int,
        heard: Callable[[str, Any], None] = lambda _kind, _what: None,
    ) -> None:
        self._struck, self._plan, self._load, self._seed = struck, plan, load, seed
        self._strikes = strikes(places, plan, seed)
        self._heard = heard
        self._lock = threading.Lock()
        self._ended: set[Strike] = set()
        self._over = threading.Event()
        self._watching: list[threading.Thread] = []
        self.report = Report(places, load, time.monotonic(), time.time())

    def run(self) -> Report:
        """To the end, whatever the answers are."""
        report, load = self.report, self._load
        with self._struck.inside():
            self._whole()
            self._heard("phase", "undisturbed answers")
            with self._struck.room.client() as client:
                asking = self._clients()
                for i in range(len(load.prompts)):
                    report.expected.append(self._undisturbed(asking.ask(client, i)))
            report.answers.clear()
            asking = self._clients()
            asking.start()
            try:
                self._phases()
            finally:
                self._over.set()
                for thread in self._watching:
                    thread.join()
                asking.stop(load.deadline_s + 10.0)
                report.hanging = asking.hanging
        return report

    def _phases(self) -> None:
        report, load = self.report, self._load
        self._heard("phase", "calm")
        report.calm_from_s = self._now() + 1.0  # the first tokens are still on their way
        self._sleep_until(report.calm_from_s + load.calm_s)
        report.calm_until_s = self._now()
        self._heard("phase", "chaos")
        self._strike_all()
        self._heard("phase", "until everybody is back")
        self._whole()
        report.whole_s = self._now()
        self._heard("phase", "calm again")
        self._sleep_until(report.whole_s + load.after_s)
        report.end_s = self._now()

    def _clients(self) -> Clients:
        return Clients(
            self._struck,
            self._load.prompts,
            count=self._load.clients,
            seed=self._seed,
            body=self._load.body(),
            clock=self._now,
            heard=self._answered,
        )

    def _answered(self, asked: Asked) -> None:
        with self._lock:
            self.report.answers.append(asked)
        self._heard("answer", asked)

    def _undisturbed(self, asked: Asked) -> tuple[int, ...]:
        if asked.code:
            raise LocalError(f"the room does not answer before anything is done to it: {asked.message}")
        return asked.tokens

    def _strike_all(self) -> None:
        """By the clock: each strike and its end in their order."""
        zero, skipped = self._now(), set[Strike]()
        moments = [(one.at_s, False, one) for one in self._strikes] + [(one.end_s, True, one) for one in self._strikes]
        begun: dict[Strike, float] = {}
        for at_s, ends, one in sorted(moments, key=lambda moment: (moment[0], moment[1])):
            self._sleep_until(zero + at_s)
            if one in skipped:
                continue
            if not ends and not self._bearable(one, begun):
                skipped.add(one)
                self._heard("skip", one)
            elif ends:
                self._struck.release(one)
                started_s = begun[one]
                self._ended.add(one)
                self.report.done.append(Strike(started_s, one.kind, one.nodes, self._now() - started_s))
                self._heard("release", one)
                if one.kind == OUTAGE:
                    self._watch_return()
            else:
                begun[one] = self._now()
                if one.kind == OUTAGE:
                    self.report.outages.append(Outage(lost_layers(one, self.report.places), self._now(), math.inf))
                self._struck.strike(one)
                self._heard("strike", one)
        self._sleep_until(zero + self._plan.seconds)

    def _bearable(self, one: Strike, begun: Mapping[Strike, float]) -> bool:
        """True when a replica of each layer is left in fact, not only by the schedule: a busy device comes back late."""
        if one.kind == OUTAGE:
            return True
        struck = {name for other in (*begun, one) if other not in self._ended for name in other.nodes}
        lost = {
            layer for outage in self.report.outages if outage.until_s == math.inf for layer in _layers(outage.layers)
        }
        needed = {layer for held in self.report.places.values() if held for layer in _layers(held)}
        return needed - lost <= self._seen(struck)

    def _watch_return(self) -> None:
        """Note when the layers are held again."""
        at, outage = next((i, out) for i, out in enumerate(self.report.outages) if out.until_s == math.inf)

        def watch() -> None:
            while not (self._over.wait(0.2) or self._seen(set()) >= set(_layers(outage.layers))):
                pass
            # Each entry proves the returned for itself, and none of them at the same time.
            self.report.outages[at] = replace(outage, until_s=self._now() + PROVEN_S)

        self._watching.append(threading.Thread(target=watch))
        self._watching[-1].start()

    def _seen(self, struck: Container[str]) -> set[int]:
        """The layers that can be routed to without the struck, in the eyes of the first node that answers."""
        for name in self.report.places:
            if name not in struck:
                with suppress(MeshdError), self._struck.room.client(name, timeout_s=1.0) as client:
                    return set(self._held(client.get("/mesh/peers"), struck))
        return set()

    def _held(self, seen: Mapping[str, Any], struck: Container[str]) -> Iterator[int]:
        """Layers that one node can route to, but for those of the struck."""
        names = {node.url: name for name, node in self._struck.room.nodes.items()}
        for peer in (seen["self"], *seen["peers"]):
            serves = peer is seen["self"] or (peer["state"] == "alive" and peer["admitted"])
            if serves and peer["layers"] and names.get(peer["http"]) not in struck:
                yield from range(*peer["layers"])

    def _whole(self) -> None:
        """Everybody serves and sees everybody serve."""
        held = [layers for layers in self.report.places.values() if layers is not None]
        replicas = min(sum(layer in one for one in held) for layer in range(max(one.end for one in held)))
        self._struck.room.wait(replicas=replicas, timeout_s=self._load.patience_s)

    def _now(self) -> float:
        return time.monotonic() - self.report.began

    def _sleep_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self._now()))


def trace(report: Report, asked: Asked, struck: Struck) -> str:
    """What the room wrote about a request, and who was struck meanwhile."""
    lines = [
        f"asked at {asked.began_s:.2f} s, ended {asked.ended_s:.2f} s, {len(asked.tokens)} tokens, {asked.message}"
    ]
    lines += [
        f"  {one.at_s:8.2f} .. {one.end_s:.2f} {one.kind} {', '.join(one.nodes)}"
        for one in report.done
        if one.at_s <= asked.ended_s and asked.began_s - 15.0 <= one.end_s
    ]
    for name, node in report_nodes(struck).items():
        for event in node:
            at_s = event.get("t", 0.0) - report.unix
            mine = event.get("session") in asked.sessions
            room = event["ev"] in _ROOM and asked.began_s - 5.0 <= at_s <= asked.ended_s + 0.5
            if mine or room:
                told = {key: value for key, value in event.items() if key not in ("ev", "t", "node", "name")}
                lines.append(f"  {at_s:8.2f} {name} {event['ev']} {told}")
    return "\n".join([lines[0], *sorted(lines[1:], key=_time)])


_ROOM = frozenset({"failed", "suspect", "refute", "join", "left", "ready", "admit", "quarantine", "listening"})


def report_nodes(struck: Struck) -> dict[str, list[dict[str, Any]]]:
    """Every node's event log."""
    return {name: node.events() for name, node in struck.room.nodes.items()}


def _time(line: str) -> float:
    return float(line.split(maxsplit=1)[0])
