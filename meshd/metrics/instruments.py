"""The counters and histograms that are written to as things happen, and the registry they hang on.

Buckets are chosen for what the quantity can be: a hop on the same host takes a tenth of a millisecond, a prefill on an old
laptop seconds; a stall at failover lies between the 0.1 s of a reset and the seconds of a silent device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics

_SHORT_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FIRST_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ANSWER_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_STALL_S: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_BATCH: Final = (1, 2, 4, 8, 16, 32, 64, 128)


class Instruments:
    """One node's. ``registry`` is what ``/metrics`` prints."""

    def __init__(self) -> None:
        # "_created" series double every counter and say nothing that a restart of the process does not.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests()
        self._work()
        self._room()

    def _requests(self) -> None:
        r = self.registry
        self.requests = Counter(
            "meshd_requests", "Requests owned here that ended, by outcome.", ["outcome"], registry=r
        )
        self.prompt_tokens = Counter("meshd_prompt_tokens", "Prompt tokens of requests owned here.", registry=r)
        self.answer_tokens = Counter("meshd_answer_tokens", "Tokens answered to requests owned here.", registry=r)
        self.first_token_s = Histogram(
            "meshd_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST_S,
            registry=r,
        )
        self.inter_token_s = Histogram(
            "meshd_inter_token_seconds",
            "Between one token of an answer and the next, failovers included.",
            buckets=_TOKEN_S,
            registry=r,
        )
        self.request_s = Histogram(
            "meshd_request_duration_seconds", "Whole answers, finished or not.", buckets=_ANSWER_S, registry=r
        )
        self.hop_wire_s = Histogram(
            "meshd_hop_wire_seconds",
            "Per token and hop of a finished answer: what was not compute.",
            buckets=_SHORT_S,
            registry=r,
        )
        self.stall_s = Histogram(
            "meshd_failover_stall_seconds",
            "How long an answer stood still while a stage was replaced.",
            ["reason"],
            buckets=_STALL_S,
            registry=r,
        )

    def _work(self) -> None:
        r = self.registry
        self.layer_tokens = Counter(
            "meshd_layer_tokens", "Work done by this node's engine: layers x tokens.", ["phase"], registry=r
        )
        # Asked for once: shown as 0 from the start, so that a rate has a beginning, and a step need not look them up.
        self.prefill, self.decode = (self.layer_tokens.labels(phase) for phase in ("prefill", "decode"))
        self.hop_compute_s = Histogram(
            "meshd_hop_compute_seconds", "One step of this node's engine.", buckets=_SHORT_S, registry=r
        )
        self.hop_queue_s = Histogram(
            "meshd_hop_queue_seconds", "How long a step waited for this node's engine.", buckets=_SHORT_S, registry=r
        )
        self.batch_sessions = Histogram(
            "meshd_engine_batch_sessions", "Sessions computed together with a step.", buckets=_BATCH, registry=r
        )
        self.refused = Counter(
            "meshd_engine_refusals", "Steps that this node's engine did not compute, by reason.", ["reason"], registry=r
        )

    def _room(self) -> None:
        r = self.registry
        self.events = Counter("meshd_events", "Entries of the event log.", ["event"], registry=r)
        self.suspicions = Counter("meshd_gossip_suspicions", "Peers that became suspect to this node.", registry=r)
        self.admissions = Counter(
            "meshd_admissions", "Verdicts of this node over peers' shards.", ["verdict"], registry=r
        )

    def event(self, event: Mapping[str, Any]) -> None:
        """A subscriber of the event log."""
        name = str(event["ev"])
        self.events.labels(name).inc()
        if name == "suspect":
            self.suspicions.inc()
        elif name in ("admit", "quarantine"):
            self.admissions.labels(name).inc()
