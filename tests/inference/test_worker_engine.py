"""The daemon's side of a worker: refusals, deaths, cancellation (cases E24 and F41's local half), with a fake worker."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from meshd.errors import DoesNotFit, EngineFailed, MeshdError, ModelRefused
from meshd.inference import worker_engine
from meshd.inference.engine import Ran, Run
from meshd.inference.worker_engine import RUNTIME_BYTES, WorkerEngine, WorkerOptions, config_for
from meshd.vocabulary import MB, LayerRange, ModelSpec, SessionId

SPEC = ModelSpec("tiny", "d1", "bf16", 4, 2, 9, (50 * MB,) * 4, 10 * MB, 10 * MB, True, 8, 64)
WHOLE = LayerRange(0, 4)


@pytest.fixture(autouse=True)
def _fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_engine, "_MODULE", "tests.inference.fake_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def run_of(session: str, rows: bytes = b"abcd") -> Run:
    return Run(SessionId(session), WHOLE, 0, 1, 1, 1, rows)


@asynccontextmanager
async def worker(log: list[str] | None = None, parts: list[float] | None = None) -> AsyncIterator[WorkerEngine]:
    async with trio.open_nursery() as nursery:
        engine = await WorkerEngine.spawn(
            nursery,
            Path(),
            SPEC,
            WHOLE,
            generation=3,
            log=(log if log is not None else []).append,
            progress=(parts if parts is not None else []).append,
        )
        try:
            yield engine
        finally:
            await engine.aclose()


def within(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(60):
            await test()

    trio.run(bounded)


def test_loads_runs_and_ends() -> None:
    log: list[str] = []
    parts: list[float] = []

    async def scenario() -> None:
        async with worker(log, parts) as engine:
            assert (engine.info.arith, engine.info.generation, engine.info.warnings) == ("fake", 3, ("slow",))
            assert parts == [0.0, 0.5, 1.0]
            assert (await engine.run(run_of("a"))).rows == b"abcd"
            assert await engine.lm_head(b"x" * 300_000, 1) == b"x" * 300_000
            engine.drop(SessionId("a"))
            while engine.health().tick != 7:
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert log == ["a fake worker starts"]
        assert engine.health().alive is False
        with pytest.raises(EngineFailed):
            await engine.run(run_of("a"))
        await engine.aclose()
        engine.drop(SessionId("a"))

    within(scenario)


def test_death_fails_pending_and_later_calls_with_its_last_words() -> None:
    async def scenario() -> None:
        async with worker() as engine:
            failed: list[EngineFailed] = []

            async def pending() -> None:
                with pytest.raises(EngineFailed) as caught:
                    await engine.run(run_of("hang"))
                failed.append(caught.value)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(pending)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(EngineFailed, match="the tensor was too heavy"):
                    await engine.run(run_of("die"))
            assert "the tensor was too heavy" in failed[0].message
            with pytest.raises(EngineFailed, match="the tensor was too heavy"):
                await engine.run(run_of("a"))
            assert await engine.closed() == "the tensor was too heavy"
            health = engine.health()
            assert (health.alive, health.reason) == (False, "the tensor was too heavy")
            engine.drop(SessionId("a"))

    within(scenario)


def test_a_kill_from_outside_is_told() -> None:
    async def scenario() -> None:
        async with worker() as engine:
            os.kill(engine.pid, signal.SIGKILL)
            assert "out of memory?" in await engine.closed()

    within(scenario)


def test_a_cancelled_call_is_withdrawn_and_the_next_one_is_answered() -> None:
    async def scenario() -> None:
        async with worker() as engine:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run, run_of("hang"))
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert (await engine.run(run_of("a"))).rows == b"abcd"
            while engine.health().counters["runs"] != 1:  # the fake counts what was withdrawn
                await trio.testing.wait_all_tasks_blocked(0.01)

    within(scenario)


def test_runs_without_a_task_are_answered_refused_withdrawn_and_fail_with_the_worker() -> None:
    async def scenario() -> None:
        async with worker() as engine:
            told: dict[str, Ran | MeshdError] = {}

            def submit(name: str, session: str) -> Callable[[], None]:
                stop = engine.submit(run_of(session), lambda what: told.__setitem__(name, what))
                assert stop is not None
                return stop

            for number in range(3):
                submit(str(number), "a")
            withdraw = submit("withdrawn", "hang")
            assert not told, "nothing is told before the caller has its answer"
            withdraw()
            while len(told) < 3 or engine.health().counters["runs"] != 1:
                await trio.testing.wait_all_tasks_blocked(0.01)
            assert all(isinstance(what, Ran) and what.rows == b"abcd" for what in told.values())
            submit("pending", "hang")
            submit("dying", "die")
            await engine.closed()
            while len(told) < 5:
                await trio.testing.wait_all_tasks_blocked(0.01)
            assert isinstance(told["pending"], EngineFailed)
            assert isinstance(told["dying"], EngineFailed)
            assert "withdrawn" not in told
            assert engine.submit(run_of("a"), lambda what: told.__setitem__("late", what)) is None
            assert "late" not in told

    within(scenario)


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [("die", EngineFailed, "no such instruction"), ("refuse", ModelRefused, "layer 3 is not finite")],
)
def test_a_load_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, mode: str, error: type[Exception], words: str
) -> None:
    monkeypatch.setenv("FAKE_WORKER", mode)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            with pytest.raises(error, match=words):
                await WorkerEngine.spawn(nursery, Path(), SPEC, WHOLE, generation=1, log=print)

    within(scenario)


def test_a_load_without_progress_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER", "stall")
    monkeypatch.setattr(worker_engine, "_STALLED_S", 0.1)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            with pytest.raises(EngineFailed, match="no progress"):
                await WorkerEngine.spawn(nursery, Path(), SPEC, WHOLE, generation=1, log=print)

    within(scenario)


def test_a_worker_that_stays_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER", "stay")
    monkeypatch.setattr(worker_engine, "_DYING_S", 0.1)

    async def scenario() -> None:
        async with worker() as engine:
            pid = engine.pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    within(scenario)


def test_cancelling_the_nursery_leaves_no_process() -> None:
    async def scenario() -> None:
        pids = []
        async with trio.open_nursery() as nursery:
            engine = await WorkerEngine.spawn(nursery, Path(), SPEC, WHOLE, generation=1, log=print)
            pids.append(engine.pid)
            nursery.cancel_scope.cancel()
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0], 0)

    within(scenario)


def test_what_cannot_fit_is_refused_before_a_process_exists() -> None:
    weights = 4 * 50 * MB + 10 * MB
    fits = WorkerOptions(memory_bytes=RUNTIME_BYTES + weights + 64 * MB, kv_bytes=256 * MB)
    config = config_for(Path("/m"), SPEC, WHOLE, fits)
    assert (config.kv_budget_bytes, config.private_budget_bytes) == (64 * MB, 0)
    roomy = config_for(Path("/m"), SPEC, WHOLE, WorkerOptions(memory_bytes=RUNTIME_BYTES + weights + 300 * MB))
    assert (roomy.kv_budget_bytes, roomy.private_budget_bytes) == (256 * MB, 44 * MB)
    small = WorkerOptions(memory_bytes=RUNTIME_BYTES + weights - 5 * MB)
    with pytest.raises(DoesNotFit, match=r"layers 0\.\.4 of tiny take 210 MB .* 5 MB more than the 535 MB"):
        config_for(Path("/m"), SPEC, WHOLE, small)
    with pytest.raises(DoesNotFit):
        config_for(Path("/m"), SPEC, WHOLE, WorkerOptions(dtype="fp32", memory_bytes=fits.memory_bytes))

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            with pytest.raises(DoesNotFit):
                await WorkerEngine.spawn(nursery, Path(), SPEC, WHOLE, generation=1, log=print, options=small)
            assert not nursery.child_tasks

    within(scenario)
