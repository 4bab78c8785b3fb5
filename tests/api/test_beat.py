"""Signs of life in a stream that has nothing to say, for clients that ask for them."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
import trio.testing

from meshd.api import beat
from meshd.api.message import Headers, Response, Writer
from meshd.errors import StageUnavailable
from meshd.vocabulary import LayerRange
from tests.api.rig import Rig, client, events_of
from tests.fakes.chain import FakeChain

IDS = tuple(b"a quiet night")
BEAT = {"X-Mesh-Beat": "1"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat, "BEAT_S", 0.02)


def stream(http: httpx.Client, **headers: str) -> tuple[int, list[str]]:
    """Status and lines, up to the second comment or the end."""
    lines: list[str] = []
    body = {"prompt": "x", "max_tokens": len(IDS), "stream": True}
    with http.stream("POST", "/chain", json=body, headers=headers) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if lines.count(": still here") == 2:
                break
        return answer.status_code, lines


@pytest.mark.parametrize("hold_at", [0, 4])
def test_a_silent_stream_gives_signs_of_life(hold_at: int) -> None:
    with client(Rig(FakeChain(IDS, hold_at=hold_at))) as http:
        status, lines = stream(http, **BEAT)
    assert status == 200
    assert sum(line.startswith('data: {"tokens"') for line in lines) == hold_at, lines
    assert lines.count(": still here") == 2


def test_nobody_who_did_not_ask_sees_one() -> None:
    with client(Rig(FakeChain(IDS))) as http:
        answer = http.post("/chain", json={"prompt": "x", "max_tokens": 3, "stream": True})
    assert len(events_of(answer.text)) == 5


def test_a_failure_before_the_first_token_is_a_status_while_that_can_be() -> None:
    with client(Rig(FakeChain(IDS, error=StageUnavailable([LayerRange(15, 30)])))) as http:
        status, lines = stream(http, **BEAT)
    assert status == 503
    assert "stage_unavailable" in lines[0]


class Pause:
    """Waited for like an event that is set after a while."""

    async def wait(self) -> None:
        await trio.sleep(0.2)


def test_a_later_failure_is_an_event() -> None:
    gone = StageUnavailable([LayerRange(15, 30)])
    chain = FakeChain(IDS, hold_at=0, release=Pause(), error=gone, error_at=1)  # type: ignore[arg-type]  # only waited for
    with client(Rig(chain)) as http:
        answer = http.post("/chain", json={"prompt": "x", "max_tokens": 3, "stream": True}, headers=BEAT)
    assert answer.status_code == 200
    assert answer.text.startswith(": still here")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["error"]["code"] == "stage_unavailable"
    assert events[-1]["error"]["status"] == 503


class Sent:
    """A writer that keeps the times at which something was sent."""

    started = False

    def __init__(self) -> None:
        self.times: list[float] = []
        self.began = trio.current_time()

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        self.times.append(trio.current_time() - self.began)
        await trio.lowlevel.checkpoint()


def test_an_entry_that_hears_nobody_gives_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device sends may arrive though nothing reaches it: its client would wait for as long as that lasts."""
    monkeypatch.setattr(beat, "BEAT_S", 0.5)

    async def run(_writer: Writer) -> Response | None:
        await trio.sleep(10.0)
        return None

    async def scenario() -> None:
        sent = Sent()
        await beat.beating(sent, run, deaf=lambda: 2.1 < trio.current_time() - sent.began < 7.0)
        assert not [at for at in sent.times if 2.1 < at < 7.0]
        assert len([at for at in sent.times if at < 2.1]) == 4
        assert [at for at in sent.times if at < 7.2][-1] >= 7.0, "at once when it hears again"

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
