"""What the demo's nodes hold: whichever of them is killed, the layers it had are still there."""

from __future__ import annotations

import pytest

from meshd.cli.demo import _places, _replicas
from meshd.models.hash_model import parse_hash_model


@pytest.mark.parametrize("layers", [1, 2, 7, 30])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_layer_has_its_replicas(count: int, layers: int) -> None:
    places = _places(parse_hash_model(f"hash:{layers}").spec, count)
    assert list(places) == [f"n{i + 1}" for i in range(count)]
    held = [[name for name, span in places.items() if span and span.start <= i < span.end] for i in range(layers)]
    assert min(map(len, held)) >= _replicas(count) >= 2
