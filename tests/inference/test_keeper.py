"""The keeper: LOAD and DROP carried out, crashes noticed, everything reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import trio
import trio.testing

from meshd.errors import DoesNotFit
from meshd.inference.engine import Engine, EngineHealth
from meshd.inference.hash_engine import HashEngine
from meshd.inference.keeper import HANGS_S, StageKeeper
from meshd.models.hash_model import parse_hash_model
from meshd.vocabulary import LayerRange

MODEL = parse_hash_model("hash:30")
LOW, HIGH, INSIDE = LayerRange(0, 15), LayerRange(15, 30), LayerRange(3, 9)


class Mortal(HashEngine):
    """An engine that can be killed."""

    dead = False
    busy_ms = 0.0

    def health(self) -> EngineHealth:
        health = replace(super().health(), busy_ms=self.busy_ms)
        return replace(health, alive=False, reason="killed") if self.dead else health


@dataclass
class Bench:
    """A keeper with everything it says written down."""

    said: list[str] = field(default_factory=list)
    refuse: list[LayerRange] = field(default_factory=list)
    started: list[Mortal] = field(default_factory=list)
    hang: bool = False
    takes_s: float = 0.0

    async def start(self, layers: LayerRange, generation: int, progress: Callable[[str, float], None]) -> Engine:
        progress("loading", 0.5)
        if layers in self.refuse:
            raise DoesNotFit("too large")
        if self.hang:
            await trio.sleep_forever()
        await trio.sleep(self.takes_s)
        engine = Mortal(MODEL.spec, layers, generation=generation)
        self.started.append(engine)
        return engine

    def progressed(self, progress: float) -> None:
        del progress

    def loaded(self, layers: LayerRange) -> None:
        self.said.append(f"loaded {layers}")

    def failed(self, layers: LayerRange, reason: str) -> None:
        self.said.append(f"failed {layers}: {reason}")

    def dropped(self, layers: LayerRange) -> None:
        self.said.append(f"dropped {layers}")

    def lost(self, layers: LayerRange, reason: str) -> None:
        self.said.append(f"lost {layers}: {reason}")


def kept(story: Callable[[StageKeeper, Bench], object], bench: Bench | None = None) -> Bench:
    """Run a story of (coroutine) steps against a keeper in virtual time."""
    bench = bench or Bench()

    async def main() -> None:
        keeper = StageKeeper(bench.start, lambda: None)
        keeper.report_to(bench)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            await story(keeper, bench)  # type: ignore[misc]  # a coroutine function
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return bench


def test_load_then_drop() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        await trio.sleep(0.05)
        assert (keeper.held.state, keeper.held.layers, keeper.generation) == ("ready", LOW, 1)
        keeper.drop(LOW)
        await trio.sleep(0.05)
        assert (keeper.held.state, keeper.engine) == ("observer", None)

    bench = kept(story)
    assert bench.said == ["loaded 0..15", "dropped 0..15"]


def test_a_load_beside_serves_the_old_range_until_it_is_dropped() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        keeper.load(HIGH)
        await trio.sleep(0.05)
        assert bench.said == ["loaded 0..15", "loaded 15..30"]
        assert keeper.held.layers == LOW
        keeper.drop(LOW)
        await trio.sleep(0.05)
        assert keeper.held.layers == HIGH
        assert keeper.engine is bench.started[1]

    kept(story)


def test_what_was_loaded_beside_can_be_given_up() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        keeper.load(HIGH)
        keeper.drop(HIGH)
        await trio.sleep(0.05)
        assert keeper.held.layers == LOW

    kept(story)


def test_a_part_of_what_is_loaded_needs_no_load() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        keeper.load(INSIDE)
        await trio.sleep(0.05)
        assert (keeper.held.layers, len(bench.started)) == (INSIDE, 1)

    assert kept(story).said == ["loaded 0..15", "loaded 3..9"]


def test_a_refused_load_is_shown_and_reported() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        await trio.sleep(0.05)
        assert (keeper.held.state, keeper.held.reason) == ("failed", "too large")

    assert kept(story, Bench(refuse=[LOW])).said == ["failed 0..15: too large"]


def test_an_engine_that_dies_is_lost_and_the_next_load_waits_a_little() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        await trio.sleep(0.05)
        bench.started[0].dead = True
        await trio.sleep(0.2)
        assert (keeper.held.state, keeper.held.reason) == ("failed", "killed")
        began = trio.current_time()
        keeper.load(LOW)
        while keeper.held.state != "ready":
            await trio.sleep(0.01)
        assert trio.current_time() - began >= 0.5
        assert keeper.generation == 2

    assert kept(story).said == ["loaded 0..15", "lost 0..15: killed", "loaded 0..15"]


def test_an_engine_that_lives_but_never_ends_a_step_is_lost() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        await trio.sleep(1.0)
        (engine,) = bench.started
        engine.busy_ms = 5.0
        await trio.sleep(HANGS_S - 1.0)
        assert keeper.engine is engine, "slow is not dead"
        engine._forwards += 1  # the step ends and another begins
        await trio.sleep(HANGS_S - 1.0)
        assert keeper.engine is engine
        await trio.sleep(2.0)
        assert keeper.held.state == "failed"
        assert engine.health().alive is False, "closed"

    bench = kept(story)
    assert bench.said == [
        "loaded 0..15",
        f"lost 0..15: the engine worker has been in one computation for {HANGS_S:g} s",
    ]


def test_a_daemon_that_was_stopped_does_not_blame_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a suspend: by the clock the step has taken ten minutes, and nobody has looked on."""
    asleep_s = 0.0
    current_time = trio.current_time
    monkeypatch.setattr("meshd.inference.keeper.trio.current_time", lambda: current_time() + asleep_s)

    async def story(keeper: StageKeeper, bench: Bench) -> None:
        nonlocal asleep_s
        keeper.load(LOW)
        await trio.sleep(1.0)
        (engine,) = bench.started
        engine.busy_ms = 600e3
        await trio.sleep(1.0)
        asleep_s = 600.0
        await trio.sleep(1.0)
        assert keeper.engine is engine

    assert kept(story).said == ["loaded 0..15"]


def test_dropping_what_is_being_loaded_stops_the_load() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        await trio.sleep(0.05)
        assert keeper.held.state == "loading"
        keeper.drop(LOW)
        await trio.sleep(0.05)
        assert keeper.held.state == "observer"

    assert kept(story, Bench(hang=True)).said == ["dropped 0..15"]


def test_a_load_that_succeeds_while_the_old_engine_dies_is_no_failure() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        await trio.sleep(0.05)
        bench.takes_s = 1.0
        keeper.load(HIGH)
        await trio.sleep(0.05)
        bench.started[0].dead = True
        await trio.sleep(2.0)
        assert (keeper.held.state, keeper.held.layers) == ("ready", HIGH)
        keeper.drop(HIGH)
        await trio.sleep(0.05)
        assert keeper.held.state == "observer", "what an earlier engine died of is over"

    assert kept(story).said == ["loaded 0..15", "lost 0..15: killed", "loaded 15..30", "dropped 15..30"]


def test_what_was_loaded_beside_serves_when_the_old_engine_dies() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        keeper.load(HIGH)
        await trio.sleep(0.05)
        bench.started[0].dead = True
        await trio.sleep(0.2)
        assert (keeper.held.layers, keeper.engine) == (HIGH, bench.started[1])

    assert kept(story).said == ["loaded 0..15", "loaded 15..30", "lost 0..15: killed"]


def test_a_part_that_leaves_layers_which_serve_waits_for_their_drop() -> None:
    async def story(keeper: StageKeeper, bench: Bench) -> None:
        keeper.load(LOW)
        keeper.load(INSIDE)
        await trio.sleep(0.05)
        keeper.load(LayerRange(5, 12))
        await trio.sleep(0.05)
        assert keeper.held.layers == INSIDE
        keeper.drop(LayerRange(5, 12))
        await trio.sleep(0.05)
        assert (keeper.held.state, keeper.held.layers) == ("ready", INSIDE)
        keeper.load(LOW)
        await trio.sleep(0.05)
        assert keeper.held.layers == LOW
        assert keeper.engine is bench.started[0]

    kept(story)
