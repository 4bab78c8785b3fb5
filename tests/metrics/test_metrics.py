"""What is counted, and that Prometheus can read it."""

from __future__ import annotations

import io
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio
import trio.testing
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from meshd.api.node import NodeFacts
from meshd.chain.request import Finished, GenerationRequest, HopReport, Recovery, RouteUse, Started, Timings
from meshd.directory import Directory
from meshd.errors import Busy, StageUnavailable
from meshd.eventlog import EventLog
from meshd.inference.engine import Run
from meshd.inference.hash_engine import HashEngine
from meshd.metrics.collector import RoomCollector, Sources
from meshd.metrics.instruments import Instruments
from meshd.metrics.measured import MeasuredChain, MeasuredEngine
from meshd.models.hash_model import parse_hash_model
from meshd.vocabulary import LayerRange, NodeStatus, SessionId
from tests.api.rig import SPEC, TWO
from tests.fakes.chain import N1, N2, FakeChain

SESSION = SessionId("a" * 32)


def scraped(instruments: Instruments) -> bytes:
    """What ``/metrics`` answers; in an event loop, as there: engines look at its clock."""

    async def scrape() -> bytes:
        return generate_latest(instruments.registry)

    return trio.run(scrape)


def values(instruments: Instruments) -> dict[str, float]:
    """Every sample as ``name{label="value"}``, read by Prometheus' own parser."""
    found = {}
    for family in text_string_to_metric_families(scraped(instruments).decode()):
        assert family.documentation or family.type == "unknown", family.name
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def run_of(start: int, n: int, prompt_len: int) -> Run:
    ids = b"".join(token.to_bytes(4, "little") for token in range(start, start + n))
    return Run(SESSION, LayerRange(0, 3), start, n, 1, prompt_len, ids, reserve_tokens=64)


def test_an_engines_work_is_layers_times_tokens_by_phase() -> None:
    instruments = Instruments()
    spec = parse_hash_model("hash:6").spec

    async def work() -> None:
        engine = MeasuredEngine(HashEngine(spec, LayerRange(0, 3)), instruments)
        await engine.run(run_of(0, 5, prompt_len=5))
        await engine.run(run_of(5, 1, prompt_len=5))
        await engine.run(run_of(3, 4, prompt_len=5))  # a replay: two prompt positions again, two of the answer

    trio.run(work)
    found = values(instruments)
    assert found['meshd_layer_tokens_total{phase="prefill"}'] == 3 * (5 + 2)
    assert found['meshd_layer_tokens_total{phase="decode"}'] == 3 * (1 + 2)
    assert found["meshd_hop_compute_seconds_count"] == found["meshd_engine_batch_sessions_count"] == 3


def test_what_an_engine_refuses_is_no_work() -> None:
    instruments = Instruments()
    spec = parse_hash_model("hash:6").spec

    async def work() -> None:
        engine = MeasuredEngine(HashEngine(spec, LayerRange(0, 3), kv_bytes=1), instruments)
        with pytest.raises(Busy):
            await engine.run(run_of(0, 5, prompt_len=5))

    trio.run(work)
    found = values(instruments)
    assert found['meshd_engine_refusals_total{reason="busy"}'] == 1
    assert found['meshd_layer_tokens_total{phase="prefill"}'] == 0


@dataclass
class Scripted:
    """A chain whose events are given, each after a pause."""

    events: list[Any]
    pause_s: float = 0.5
    seen: list[Any] = field(default_factory=list)

    def generate(self, request: GenerationRequest) -> Any:
        return _Played(self)


class _Played:
    def __init__(self, script: Scripted) -> None:
        self._events = iter(script.events)
        self._pause_s = script.pause_s

    async def __aenter__(self) -> _Played:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def __aiter__(self) -> _Played:
        return self

    async def __anext__(self) -> Any:
        event = next(self._events, None)
        if event is None:
            raise StopAsyncIteration
        await trio.sleep(self._pause_s)
        if isinstance(event, Exception):
            raise event
        return event


def answered(events: list[Any]) -> tuple[Instruments, list[tuple[Started, Finished, int]]]:
    """Metrics and answers after one request of these events, on a clock that jumps."""
    instruments, told = Instruments(), list[tuple[Started, Finished, int]]()
    chain = MeasuredChain(Scripted(events), instruments, lambda *answer: told.append(answer))

    async def ask() -> None:
        async with chain.generate(GenerationRequest((1, 2, 3), 8)) as answer:
            async for _ in answer:
                pass

    trio.run(ask, clock=trio.testing.MockClock(autojump_threshold=0))
    return instruments, told


def tokens(count: int) -> Any:
    from meshd.chain.request import Tokens
    from meshd.inference.engine import Choice

    return Tokens(tuple(Choice(position, 1, 1, 0.0) for position in range(count)))


FINISHED = Finished(
    "length",
    (HopReport(N1, LayerRange(0, 15), 8.0, 2.0), HopReport(N2, LayerRange(15, 30), 8.0, 4.0)),
    RouteUse("cold", "s"),
    (Recovery(LayerRange(15, 30), N2, N1, "reset", 212.0, 31, exact=True),),
    Timings(500.0, 2000.0, 2.0),
)


def test_an_answer_is_timed_token_by_token_and_told_once() -> None:
    instruments, told = answered([Started(SESSION), tokens(1), tokens(2), FINISHED])
    found = values(instruments)
    assert found['meshd_requests_total{outcome="finished"}'] == 1
    assert (found["meshd_prompt_tokens_total"], found["meshd_answer_tokens_total"]) == (3, 3)
    assert found["meshd_time_to_first_token_seconds_sum"] == pytest.approx(1.0)  # the start came before
    # Two tokens that came together after 0.5 s took 0.25 s each.
    assert (found["meshd_inter_token_seconds_count"], found["meshd_inter_token_seconds_sum"]) == (2, 0.5)
    assert found["meshd_hop_wire_seconds_sum"] == pytest.approx(0.006)
    assert found['meshd_failover_stall_seconds_sum{reason="reset"}'] == pytest.approx(0.212)
    assert told == [(Started(SESSION), FINISHED, 3)]


def test_a_failed_answer_counts_by_its_code_and_is_not_told() -> None:
    instruments, told = Instruments(), list[Any]()
    chain = MeasuredChain(
        Scripted([Started(SESSION), StageUnavailable([LayerRange(15, 30)])]), instruments, lambda *a: told.append(a)
    )

    async def ask() -> None:
        async with chain.generate(GenerationRequest((1,), 8)) as answer:
            async for _ in answer:
                pass

    with pytest.raises(StageUnavailable):
        trio.run(ask, clock=trio.testing.MockClock(autojump_threshold=0))
    assert values(instruments)['meshd_requests_total{outcome="stage_unavailable"}'] == 1
    assert not told


def test_a_stop_reaches_the_chain() -> None:
    from meshd.chain.request import Stoppable

    class Stopping(_Played):
        stopped = False

        def stop(self) -> None:
            Stopping.stopped = True

    class Chain(Scripted):
        def generate(self, request: GenerationRequest) -> Any:
            return Stopping(self)

    async def ask() -> None:
        chain = MeasuredChain(Chain([Started(SESSION)]), Instruments(), lambda *_: None)
        async with chain.generate(GenerationRequest((1,), 8)) as answer:
            assert isinstance(answer, Stoppable)
            answer.stop()
        async with MeasuredChain(FakeChain(), Instruments(), lambda *_: None).generate(
            GenerationRequest((1,), 8)
        ) as answer:
            await anext(answer)

    trio.run(ask)
    assert Stopping.stopped


def test_events_count_suspicions_and_admissions_even_when_the_log_is_quiet() -> None:
    instruments, out = Instruments(), io.StringIO()
    log = EventLog(N1, "n1", level="error", out=out)
    log.subscribe(instruments.event)
    log.emit("suspect", node=N2)
    log.emit("admit")
    log.emit("quarantine", level="warning")
    log.emit("pull", level="debug")
    found = values(instruments)
    assert found["meshd_gossip_suspicions_total"] == 1
    assert found['meshd_admissions_total{verdict="admit"}'] == 1
    assert found['meshd_admissions_total{verdict="quarantine"}'] == 1
    assert 'meshd_events_total{event="pull"}' not in found
    assert out.getvalue() == ""


def collected(directory: Directory = TWO) -> Instruments:
    instruments = Instruments()
    engine = HashEngine(parse_hash_model("hash:30").spec, LayerRange(0, 15), kv_bytes=1000)
    sources = Sources(
        view=lambda: (directory, NodeFacts(state="ready", name="n1", version="1"), SPEC),
        engine=lambda: engine,
        in_flight=lambda: 2,
        tasks=lambda: 8,
        traffic=lambda: {"sent_datagrams": 1, "sent_bytes": 2, "received_datagrams": 3, "received_bytes": 4},
        rejected=lambda: {"key": 5},
        send_errors=lambda: {"EPERM": 6},
        chain=lambda: {"failovers": 7},
    )
    instruments.registry.register(RoomCollector(sources))
    return instruments


def test_the_parts_own_counters_are_read_at_the_scrape() -> None:
    found = values(collected())
    assert found['meshd_members{state="alive"}'] == 2
    assert found["meshd_layer_replicas_min"] == 1
    assert found["meshd_kv_capacity_bytes"] == 1000
    assert found["meshd_gossip_packets_received_total"] == 3
    assert found['meshd_gossip_packets_rejected_total{reason="key"}'] == 5
    assert found['meshd_gossip_send_errors_total{error="EPERM"}'] == 6
    assert found["meshd_failovers_total"] == 7


@pytest.mark.parametrize(("state", "shown"), [(NodeStatus.SUSPECT, 1), (NodeStatus.DEAD, 0), (NodeStatus.LEFT, 0)])
def test_who_is_gone_is_no_peer_that_something_is_wrong_with(state: NodeStatus, shown: int) -> None:
    """It is remembered for a quarter of an hour."""
    peer = replace(TWO.peers[0], state=state, admitted=None, one_way=True, rtt_ms=250.0)
    found = values(collected(TWO.replace([*([TWO.me] if TWO.me else []), peer])))
    assert found["meshd_peers_not_admitted"] == found["meshd_peers_one_way"] == shown
    assert ('meshd_peer_round_trip_seconds{peer="n2"}' in found) == bool(shown)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_to_say() -> None:
    text = scraped(collected())
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
