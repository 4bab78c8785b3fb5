"""``meshd chat``: what becomes of a conversation when a question cannot be answered."""

from __future__ import annotations

import io
import sys

import pytest

from meshd.cli import run
from meshd.errors import StageUnavailable
from meshd.vocabulary import LayerRange
from tests.api.rig import Rig, served
from tests.fakes.chain import FakeChain


class Typed(io.StringIO):
    """What a person types, or a script sends."""

    def __init__(self, text: str, *, person: bool) -> None:
        super().__init__(text)
        self.isatty = lambda: person  # type: ignore[method-assign]


def talk(text: str, rig: Rig, monkeypatch: pytest.MonkeyPatch, *, person: bool) -> int:
    monkeypatch.setattr(sys, "stdin", Typed(text, person=person))
    with served(rig) as url:
        return run(["chat", "--max-tokens", "3", "--url", url])


class Once(FakeChain):
    """Fails the first time."""

    def generate(self, request):  # type: ignore[no-untyped-def]  # as its parent's
        self.error = None if self.requests else StageUnavailable([LayerRange(15, 30)])
        return super().generate(request)


def test_a_person_is_told_and_asks_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rig = Rig(Once(tuple(b"yes")))
    assert talk("who?\nand now?\n", rig, monkeypatch, person=True) == 0
    said = capsys.readouterr()
    assert said.err == "meshd: stage 15..30 unavailable: no live replica\n"
    assert "yes" in said.out
    first, second = (bytes(request.prompt).decode() for request in rig.chain.requests)
    assert "who?" in first
    assert "who?" not in second


def test_a_script_ends_with_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk("who?\nand now?\n", Rig(Once(tuple(b"yes"))), monkeypatch, person=False) == 1
    assert "stage 15..30 unavailable" in capsys.readouterr().err
