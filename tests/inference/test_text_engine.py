"""The text worker as a process: restarts, time limits, cancellation."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from meshd.errors import Busy, CallerError, EngineFailed, ModelRefused
from meshd.inference import text_engine
from meshd.inference.child import Child
from meshd.inference.text_engine import TextEngine
from meshd.inference.text_worker import wire
from tests.inference.tokenizers_on_disk import byte_level

FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SOMETIMES = "{% if messages[0].content == 'slow' %}" + FOR_EVER + "{% endif %}{{ messages[0].content }}"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs tests is a slow one."""
    monkeypatch.setattr(text_engine, "TEMPLATE_S", 20.0)


@asynccontextmanager
async def worker(folder: Path) -> AsyncIterator[TextEngine]:
    async with trio.open_nursery() as nursery:
        engine = await TextEngine.start(nursery, folder, log=print)
        try:
            yield engine
        finally:
            await engine.aclose()


def within(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(60):
            await test()

    trio.run(bounded)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_texts_that_wait_are_decoded_together_and_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_level(tmp_path)
    calls: list[bytes] = []
    exchange = TextEngine._exchange

    async def counted(engine: TextEngine, data: bytes, limit_s: float) -> dict[str, Any]:
        calls.append(data)
        return await exchange(engine, data, limit_s)

    async def scenario() -> None:
        async with worker(tmp_path) as text:
            ids = {word: await text.encode(word) for word in ("one", "two", "three", "four")}
            told: dict[str, str] = {}

            async def read(word: str) -> None:
                told[word] = await text.decode(ids[word])

            async def fail() -> None:
                with pytest.raises(EngineFailed, match="decode"):
                    await text.decode([-1])

            calls.clear()
            async with trio.open_nursery() as nursery:
                for word in ids:
                    nursery.start_soon(read, word)
                nursery.start_soon(fail)
            assert told == {word: word for word in ids}
            assert len(calls) <= 2, "the first to come, then whoever waited meanwhile"

    monkeypatch.setattr(TextEngine, "_exchange", counted)
    within(scenario)


def test_encodes_chats_and_decodes(tmp_path: Path) -> None:
    byte_level(tmp_path)

    async def scenario() -> None:
        async with worker(tmp_path) as text:
            assert text.eos_ids == {2}
            ids = await text.chat(user("a<|im_end|>"))
            assert await text.decode(ids) == "user\na<|im_end|>\nassistant\n"
            assert await text.encode("<|im_end|>", special=True) == [2]
            assert await text.decode(await text.encode("b" * 300_000)) == "b" * 300_000
            with pytest.raises(CallerError, match="role") as refused:
                await text.chat([{"role": "king", "content": ""}])
            assert refused.value.param == "messages"
            with pytest.raises(EngineFailed, match="decode"):
                await text.decode([-1])
            with pytest.raises(CallerError, match="handed"):
                await text.chat([{"role": "user", "content": {1, 2}}])
            with pytest.raises(CallerError, match="handed"):
                await text.encode("\ud800")
        with pytest.raises(EngineFailed, match="stopped"):
            await text.decode([1])
        await text.aclose()

    within(scenario)


def test_a_killed_worker_is_replaced_without_anybody_noticing(tmp_path: Path) -> None:
    byte_level(tmp_path)

    async def scenario() -> None:
        async with worker(tmp_path) as text:
            before = await text.chat(user("a"))
            for _ in range(2):
                assert text.pid is not None
                os.kill(text.pid, signal.SIGKILL)
                assert await text.chat(user("a")) == before
            assert text.eos_ids == {2}

    within(scenario)


@pytest.mark.parametrize("trouble", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("nobody expects it")])
def test_a_worker_that_cannot_be_started_gives_nobody_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    byte_level(tmp_path)

    async def no_child(*_args: object, **_more: object) -> None:
        await trio.sleep(0.01)
        raise trouble

    async def scenario() -> None:
        async with worker(tmp_path) as text:
            ids = await text.encode("a")
            told: list[str] = []

            async def read() -> None:
                try:
                    told.append(await text.decode(ids))
                except EngineFailed:
                    told.append("failed")
                except RuntimeError:
                    told.append("unexpected")

            assert text._child is not None
            text._child.kill()
            await text._child.gone.wait()
            with monkeypatch.context() as patch:
                patch.setattr(Child, "start", no_child)
                async with text._lock, trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(read)
                    await trio.testing.wait_all_tasks_blocked()
                    text._lock.release()  # they wait, and are decoded together
                    while len(told) < 4:
                        await trio.sleep(0.01)
                    await text._lock.acquire()
            assert told.count("failed") == (4 if isinstance(trouble, OSError) else 3)
            assert await text.decode(ids) == "a"

    within(scenario)


def test_a_template_that_takes_too_long_costs_its_own_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level(tmp_path, template=SOMETIMES)
    monkeypatch.setattr(text_engine, "TEMPLATE_S", 0.5)

    async def scenario() -> None:
        async with worker(tmp_path) as text:
            answers: list[list[int]] = []

            async def other() -> None:
                answers.append(await text.encode("fine"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                nursery.start_soon(other)
                with pytest.raises(CallerError, match="did not finish"):
                    await text.chat(user("slow"))
            assert answers[0] == answers[1] == await text.chat(user("fine"))

    within(scenario)


def test_a_template_that_never_ends_leaves_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_level(tmp_path, template=FOR_EVER)
    monkeypatch.setattr(text_engine, "TEMPLATE_S", 0.2)

    async def scenario() -> None:
        async with worker(tmp_path) as text:
            assert text.eos_ids == {2}
            assert await text.decode(await text.encode("a b")) == "a b"

    within(scenario)


def test_a_worker_in_an_endless_template_ends_with_its_daemon(tmp_path: Path) -> None:
    byte_level(tmp_path, template=FOR_EVER)
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, "-m", "meshd.inference.text_worker", str(theirs.fileno()), str(tmp_path)]
    with subprocess.Popen(arguments, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.recv(1000)  # its hello
        ours.sendall(wire.pack({"op": "turn_end"}))
        ours.close()
        assert process.wait(60) == 0


def test_a_caller_that_leaves_does_not_tear_the_exchange(tmp_path: Path) -> None:
    byte_level(tmp_path)

    async def scenario() -> None:
        async with worker(tmp_path) as text:
            with trio.CancelScope() as scope:
                scope.cancel()
                await text.encode("a")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(text.encode, "x" * 100_000)
                nursery.start_soon(text.encode, "y" * 100_000)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert await text.decode(await text.encode("still exact")) == "still exact"

    within(scenario)


def test_too_many_callers_are_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_level(tmp_path)
    monkeypatch.setattr(text_engine, "_MAX_WAITING", 1)

    async def scenario() -> None:
        async with worker(tmp_path) as text:
            outcomes: list[str] = []

            async def one() -> None:
                try:
                    await text.encode("a" * 100_000)
                    outcomes.append("done")
                except Busy:
                    outcomes.append("busy")

            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(one)
            assert sorted(outcomes) == ["busy", "busy", "done", "done"]

    within(scenario)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            with pytest.raises(ModelRefused, match=r"tokenizer\.json"):
                await TextEngine.start(nursery, tmp_path, log=print)

    within(scenario)


def test_without_a_tokenizer_there_are_ids_but_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 9]}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 11}')

    async def scenario() -> None:
        async with worker(tmp_path) as text:
            assert text.eos_ids == {7, 9, 11}
            assert await text.decode([1, 2]) == ""
            with pytest.raises(CallerError, match=r"tokenizer\.json.*tokens"):
                await text.encode("hello")
            with pytest.raises(CallerError, match=r"tokenizer\.json") as refused:
                await text.chat(user("hello"))
            assert refused.value.param == "messages"

    within(scenario)
