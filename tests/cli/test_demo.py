"""What the demo's nodes hold: whichever of them is killed, the layers it had are still there; and how it ends."""

from __future__ import annotations

import os
import signal
import time

import pytest

from meshd.cli.demo import _ended_by_signals, _places, _replicas
from meshd.models.hash_model import parse_hash_model


@pytest.mark.parametrize("layers", [1, 2, 7, 30])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_layer_has_its_replicas(count: int, layers: int) -> None:
    places = _places(parse_hash_model(f"hash:{layers}").spec, count)
    assert list(places) == [f"n{i + 1}" for i in range(count)]
    held = [[name for name, span in places.items() if span and span.start <= i < span.end] for i in range(layers)]
    assert min(map(len, held)) >= _replicas(count) >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_the_demo_ends_its_daemons(number: signal.Signals) -> None:
    def until_ended() -> None:
        with _ended_by_signals():
            os.kill(os.getpid(), number)
            time.sleep(5)

    before = signal.signal(number, signal.SIG_DFL)  # under nohup it would be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            until_ended()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_what_a_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
