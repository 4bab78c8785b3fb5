"""What others feel while somebody's 4,000-token prompt is computed: the gaps between their tokens, before and meanwhile.

One daemon with all of SmolLM2, one thread, four people decoding. Undisturbed: every gap up to the long request; disturbed: those
between its arrival and its first token. Nothing is guessed, no prefix is kept. Also the long prompt's own first token, alone and
in company: what the others' patience costs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import trio

from benchmarks import Recorder, quantiles
from benchmarks._clients import Streamed, ask, random_ids
from meshd.cli.local_room import LocalRoom, Node
from meshd.cli.models import ensure
from meshd.vocabulary import ModelSpec

MODEL = "smollm2-135m"
OTHERS = 4
PROMPT_TOKENS, TOKENS = 64, 900
LONG_PROMPT_TOKENS = 4000
ALONE_TOKENS = 60  # of each of the others, before the long request comes
READY_S = 180


def run() -> None:
    recorder = Recorder("long_prompt")
    spec, store = ensure(MODEL)
    with LocalRoom(MODEL, store=store, common=["--threads", "1"]) as room:
        node = room.add("n1", "--layers", f"0..{spec.num_layers}", "--prefix-cache-mb", "0", "--capacity-mb", "2000")
        room.wait(nodes=1, timeout_s=READY_S)
        trio.run(_measure, recorder, node, spec)


async def _measure(recorder: Recorder, node: Node, spec: ModelSpec) -> None:
    await ask(node, **_body(spec, "warm", PROMPT_TOKENS, 8))
    alone = await ask(node, **_body(spec, "alone", LONG_PROMPT_TOKENS, 1))
    times: list[list[float]] = [[] for _ in range(OTHERS)]
    long: list[Streamed] = []
    async with trio.open_nursery() as nursery:
        for number in range(OTHERS):
            nursery.start_soon(_watch, node, _body(spec, number, PROMPT_TOKENS, TOKENS), times[number])
        while min(map(len, times)) < ALONE_TOKENS:
            await trio.sleep(0.05)
        long.append(await ask(node, **_body(spec, "long", LONG_PROMPT_TOKENS, 1)))
        nursery.cancel_scope.cancel()  # the others have told what they can
    (asked,) = long
    before = _gaps_ms(times, max(came[0] for came in times), asked.began)
    meanwhile = _gaps_ms(times, asked.began, asked.times[0])
    undisturbed, disturbed = quantiles(before), quantiles(meanwhile)
    recorder.row(
        tokens=LONG_PROMPT_TOKENS,
        others=OTHERS,
        threads=1,
        undisturbed_ms=undisturbed,
        disturbed_ms=disturbed,
        p95_ratio=disturbed["p95"] / undisturbed["p95"],
        first_ms_alone=alone.first_ms,
        first_ms_in_company=asked.first_ms,
    )


def _body(spec: ModelSpec, seed: object, prompt: int, tokens: int) -> dict[str, Any]:
    return {"tokens": random_ids(seed, prompt, spec.vocab_size), "max_tokens": tokens, "drafts": False}


async def _watch(node: Node, body: dict[str, Any], times: list[float]) -> None:
    """Decode until cancelled; whoever meets an end token says something else next."""
    for turn in itertools.count():
        more = {**body, "tokens": [*body["tokens"][turn:], *body["tokens"][:turn]]}
        await ask(node, came=times, **more)


def _gaps_ms(times: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    return [
        (after - before) * 1e3
        for came in times
        for before, after in itertools.pairwise(came)
        if start <= before and after <= end
    ]


if __name__ == "__main__":
    run()
