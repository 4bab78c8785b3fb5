"""What is said of a document that is not as meshd answers: where, and what is there instead."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshd.client.shapes import ABSENT, ANSWER, DOCUMENTS, RANGE, Each, Row, event_misfit, misfit
from tests.api.rig import Rig, client
from tests.fakes.chain import FakeChain


@pytest.mark.parametrize(
    ("found", "shape", "wrong"),
    [
        ({"a": 1, "b": 2}, {"a": int}, ""),
        ({}, {"a": int}, "a is missing"),
        ({"a": {"b": [1, "x"]}}, {"a": {"b": [int]}}, 'a.b[1] is "x"'),
        (None, {"a": int}, "it is null"),
        (None, ({"a": int}, None), ""),
        ({"a": "x"}, ({"a": int}, None), 'a is "x"'),
        ([1, "n1"], Row((int, str)), ""),
        ([[1]], [Row((int, str))], "[0] is [1]"),
        ({"x": {"n": 1}, "y": {}}, Each({"n": int}), "y.n is missing"),
        ([0, 15], RANGE, ""),
        ({"layers": [15, 15]}, {"layers": RANGE}, "layers is [15, 15]"),
        ([0, True], RANGE, "[0, true]"),
        ({}, {"a": (int, ABSENT)}, ""),
        ({"a": None}, {"a": (int, ABSENT)}, "a is null"),
        ("x" * 80, int, f'it is "{"x" * 56}...'),
    ],
)
def test_the_first_place_that_does_not_fit(found: Any, shape: Any, wrong: str) -> None:
    assert misfit(found, shape).endswith(wrong)
    assert bool(misfit(found, shape)) is bool(wrong)


def test_whatever_a_node_says_fits() -> None:
    with client(Rig(FakeChain(tuple(b"yes")))) as http:
        for path, shape in DOCUMENTS.items():
            found = (http.post if path.startswith("/admin") else http.get)(path).json()
            assert not misfit(found, shape), path
        whole = http.post("/chain", json={"prompt": "x", "max_tokens": 3}).json()
    assert not event_misfit(whole)
    for key in ANSWER:
        half = copy.deepcopy(whole)
        del half[key]
        assert event_misfit(half) == f"{key} is missing"
    whole["route"][0]["compute_ms"] = "fast"
    assert event_misfit(whole) == 'route[0].compute_ms is "fast"'
