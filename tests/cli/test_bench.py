"""What ``meshd bench`` says of a room: speed-ups on one basis, and no power state that nobody told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import pytest

from meshd.cli import bench, run
from meshd.cli.bench import label_of
from meshd.client import Client
from meshd.errors import MeshdError
from tests.api.rig import Rig, served
from tests.doctor.documents import hive, peer
from tests.fakes.chain import FakeChain


def test_one_client_is_the_basis_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Rig(chain=FakeChain(ids=tuple(b"a lamp turns")))) as url:
        words = ["--concurrency", "1,2", "--requests", "2", "--max-tokens", "5"]
        assert run(["bench", "--url", url, *words, "--json"]) == 0
    cold, warm, one, two = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in (cold, warm, one, two)] == ["cold", "warm", "warm", "warm"]
    assert (one["clients"], one["requests"], one["speed_up"]) == (1, 2, 1.0)
    assert one["tokens_per_s"] == warm["tokens_per_s"]
    assert (two["clients"], two["requests"], two["failed"]) == (2, 4, 0)
    assert {row["answer_tokens"] for row in (cold, warm, one, two)} == {5}
    assert two["speed_up"] == pytest.approx(two["tokens_per_s"] / one["tokens_per_s"], abs=0.01)


def test_making_clients_is_no_part_of_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(urls: Iterable[str] | None) -> Client:
        time.sleep(2)
        return Client(list(urls or ()))

    monkeypatch.setattr(bench, "connect", slowly)
    with served(Rig()) as url:
        measured = bench._together([url], 0, 2, 1, 5)
    assert len(measured.samples) == 2
    assert measured.wall_s < 2


def test_a_client_that_fails_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = bench._together(["http://127.0.0.1:9"], 0, 3, 2, 5)
    assert (list(measured.samples), measured.failed, measured.tokens_per_s) == ([], 6, 0.0)


def test_what_failed_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(_room: Client, _number: int, _max_tokens: int) -> bench.Sample:
        if asked.pop(0) == "cold":
            return bench.Sample(0.1, 0.2, 5, "n1[0:30]")
        raise MeshdError("the room is full")

    asked = ["cold", "warming", "a", "b"]
    monkeypatch.setattr(bench, "_ask", ask)
    with served(Rig()) as url:
        assert run(["bench", "--url", url, "--concurrency", "1", "--requests", "2"]) == 1
    said = capsys.readouterr()
    assert said.err == "meshd: 2 requests failed, the first with: the room is full\n"
    assert "None" not in said.out


@pytest.mark.parametrize(
    ("told", "power"),
    [
        ((None, None), "unknown"),
        ((True, None), "mains"),
        ((False, None), "battery"),
        ((True, False), "mixed"),
    ],
)
def test_the_power_state_is_what_was_told(told: tuple[bool | None, bool | None], power: str) -> None:
    one, two = (peer(f"n{i}", [0, 30], status={"on_ac": on_ac}) for i, on_ac in enumerate(told))
    assert label_of({"self": one, "peers": [two]}, hive(nodes=2))["power"] == power
