"""How a node comes to its model and its tokenizer where something is in the way for a while."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from meshd.config import Config
from meshd.directory import Directory, Member
from meshd.errors import EngineFailed, ModelNotFound, ModelRefused, StoreFull
from meshd.inference.text_engine import TextEngine
from meshd.node.model import Served
from meshd.node.serving import Serving, rooms_digest
from meshd.vocabulary import NodeStatus
from tests.election.specs import advert, node, spec


def test_a_model_that_only_the_dead_served_is_not_the_rooms() -> None:
    new = replace(advert(5, 200, digest="new"), model="new")
    old = [Member(advert(n, 200, (0, 15)), state=state) for n, state in ((2, NodeStatus.DEAD), (3, NodeStatus.LEFT))]
    foreign = [Member(advert(n, 200, (0, 15)), incompatible="speaks wire 9") for n in (4, 6)]
    assert rooms_digest(Directory(node(1)).replace([*old, *foreign, Member(new)])) == "new"
    assert rooms_digest(Directory(node(1)).replace(old)) == ""


def a_serving(tmp_path: Path, **parts: Any) -> Serving:
    room = Directory(node(1)).replace([Member(advert(2, 200, (0, 15)))])
    given: dict[str, Any] = {
        "keeper": None,
        "links": None,
        "fetcher": None,
        "directory": lambda: room,
        "log": SimpleNamespace(emit=lambda *_words, **_more: None),
        "on_change": lambda: None,
        "worker_said": lambda _line: None,
    }
    return Serving(Config(state_dir=tmp_path), SimpleNamespace(), 200, **{**given, **parts})  # type: ignore[arg-type]  # no identity needed


@pytest.mark.parametrize(("error", "most"), [(StoreFull("full"), 3), (ModelNotFound("nobody can be reached"), 100)])
def test_a_full_disk_does_not_fetch_again_and_again(tmp_path: Path, error: Exception, most: int) -> None:
    asked: list[float] = []

    async def meet(_digest: str) -> Served:
        asked.append(trio.current_time())
        raise error

    async def main() -> None:
        with trio.move_on_after(20):
            await a_serving(tmp_path, fetcher=SimpleNamespace(meet=meet)).run()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert most // 2 < len(asked) <= most


@pytest.mark.parametrize(("error", "starts"), [(EngineFailed("no memory"), 3), (ModelRefused("no tokenizer"), 1)])
def test_a_tokenizer_that_did_not_start_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, starts: int
) -> None:
    begun: list[float] = []

    async def start(*_words: object, **_more: object) -> str:
        begun.append(trio.current_time())
        if len(begun) < 3:
            raise error
        return "text"

    async def found() -> Served:
        return Served(spec(), tmp_path)

    async def main() -> Serving:
        serving = a_serving(tmp_path)
        serving._find = found  # type: ignore[method-assign]
        serving._elect = lambda _spec: trio.sleep_forever()  # type: ignore[assignment,method-assign]
        with trio.move_on_after(60):
            await serving.run()
        return serving

    monkeypatch.setattr(TextEngine, "start", start)
    serving = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(begun) == starts
    assert (serving.text, serving.reason) == (("text", "") if starts > 1 else (None, str(error)))
