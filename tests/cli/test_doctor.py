"""``meshd doctor`` and ``meshd dashboard`` against a node of fakes: what they print and how they exit."""

from __future__ import annotations

import json
import socket

import pytest

from meshd.api.guards import Access, ApiKey, Guards, Right
from meshd.cli import run
from meshd.cli.doctor import probes
from meshd.directory import Directory
from tests.api.rig import Rig, member, served
from tests.doctor.documents import peer
from tests.fakes.chain import N1, N2

KEY = "correct-horse-battery-staple"


def test_findings_are_printed_with_their_cure_and_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Rig()) as url:
        assert run(["doctor", "--url", url, "--no-probe"]) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert "warning: layers 0..15 hang on n1 alone" in text
    assert "$ meshd start --model tiny --layers 0..15 --join 10.0.0.1:8091" in text
    assert "without n2: layers 15..30 are gone" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Rig()) as url:
        assert run(["doctor", "--url", url, "--no-probe", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert [finding["code"] for finding in document["findings"]] == ["single_replica", "single_replica"]
    assert document["what_if"][0] == {"name": "n1", "layers": [[0, 15]]}


def test_a_room_that_is_well_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    lanes = Directory(N1).replace([member(N1, "n1", (0, 30)), member(N2, "n2", (0, 30))])
    with served(Rig(directory=lanes)) as url:
        assert run(["doctor", "--url", url, "--no-probe"]) == 0
    text = capsys.readouterr().out
    assert "nothing is wrong" in text
    assert "every layer is still there" in text


def test_nobody_there_exits_1_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("doctor", "dashboard"):
        assert run([command, "--url", "http://127.0.0.1:9"]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_addresses_are_tried_from_here() -> None:
    with served(Rig()) as url, socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it, and not listening
        here, gone = (f"127.0.0.1:{each.getsockname()[1]}" for each in (listening, closed))
        found = probes(
            [
                peer("n2", None, http=url, mesh=here),
                peer("n3", None, http=f"http://{gone}", mesh=gone),
                peer("n4", None, http="http://not an address", mesh="nor this", state="suspect"),
                peer("n5", None, state="dead"),
                peer("n6", None, http="http://☃:1", mesh="..:1"),
            ],
            peer("n1", None, mesh=here),
        )
    assert [probe.name for probe in found] == ["n2", "n3", "n4", "n6"]
    assert (found[0].http, found[0].mesh, found[1].http, found[1].mesh) == ("ok", "ok", "refused", "refused")
    assert found[0].clock_offset_s is not None
    assert abs(found[0].clock_offset_s) < 60
    assert found[2].http == ""
    assert found[2].mesh not in ("", "ok")
    assert found[3].http not in ("", "ok")
    assert found[3].mesh not in ("", "ok")


def test_the_dashboard_is_opened_with_its_key_only_where_it_is_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_page(page: str) -> bool:
        opened.append(page)
        return True

    monkeypatch.setattr("webbrowser.open", open_page)
    monkeypatch.setenv("MESHD_API_KEY", KEY)
    with served(Rig()) as url:
        assert run(["dashboard", "--url", url]) == 0
        assert opened == [f"{url}/"]
    guards = Guards(Access((ApiKey.of(KEY, Right.READ),), trust_loopback=False))
    with served(Rig(), guards=guards) as url:
        assert run(["dashboard", "--url", url]) == 0
        assert opened[1:] == [f"{url}/#key={KEY}"]
        assert KEY not in capsys.readouterr().out
        assert run(["dashboard", "--url", url, "--print"]) == 0
        assert capsys.readouterr().out == f"{url}/#key={KEY}\n"
