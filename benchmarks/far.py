"""Guessed tokens on against off between hosts that are 10 ms apart: SmolLM2 in two daemons behind a switch that delays.

Daemons, links (TLS), HTTP and client are the real ones, each host a network namespace; whatever goes from one to the other takes
10 ms each way. The texts are copied ones, where guesses pay: a list and a rename in code. Rounds alternate between
``drafts: false`` and true, and the tokens must be the same. Skipped with a row that says so where there are no namespaces.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks import Recorder
from benchmarks._delay import delayed
from benchmarks.drafts import PROMPTS
from meshd.cli.chaos.box import Box, boxed
from meshd.cli.chaos.netlab import lacking
from meshd.cli.models import ensure
from meshd.vocabulary import LayerRange

MODEL = "smollm2-135m"
DELAY_S = 0.010
TOKENS = 48
ROUNDS = 2
READY_S = 180


def run() -> None:
    recorder = Recorder("far")
    missing = lacking()
    if missing:
        recorder.row(skipped=missing)
        return
    spec, store = ensure(MODEL)
    half = spec.num_layers // 2
    places: Mapping[str, LayerRange | None] = {"n1": LayerRange(0, half), "n2": LayerRange(half, spec.num_layers)}
    with boxed(MODEL, places, "--threads", "1", store=store) as box, delayed(box.net, DELAY_S), box.inside():
        box.room.wait(nodes=2, timeout_s=READY_S)
        for text in ("list", "rename"):
            _compare(recorder, box, text)


def _compare(recorder: Recorder, box: Box, text: str) -> None:
    ratios, last = [], dict[str, Any]()
    _ask(box, text, drafts=False)
    for _ in range(ROUNDS):
        plain, last = _ask(box, text, drafts=False), _ask(box, text, drafts=True)
        if plain["tokens"] != last["tokens"]:
            raise RuntimeError(f"{text}: guesses changed the answer")
        ratios.append(_decode_ms(plain) / _decode_ms(last))
    recorder.row(
        text=text,
        delay_ms=DELAY_S * 1e3,
        stages=2,
        tokens=len(last["tokens"]),
        on_against_off=statistics.median(ratios),
        timings=last["timings"],
        same_tokens=True,
    )


def _ask(box: Box, text: str, *, drafts: bool) -> dict[str, Any]:
    with box.room.client("n1") as client:
        body = {"prompt": PROMPTS[text], "max_tokens": TOKENS, "temperature": 0, "drafts": drafts}
        answer: dict[str, Any] = client.post("/chain", body)
        return answer


def _decode_ms(answer: Mapping[str, Any]) -> float:
    """From the first token to the last."""
    return float(answer["timings"]["total_ms"] - answer["timings"]["ttft_ms"])


if __name__ == "__main__":
    run()
