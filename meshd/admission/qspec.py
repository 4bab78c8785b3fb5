"""What a probe asks and what answers pass: the pure half of admission.

A golden prompt has its ids, greedy ids and margins at every position. A probe of layers ``[a, b)`` feeds it as a prefill of all
but three positions and three cached steps, in a slot that another session has just used, and compares the last four rows
at ``b`` with the recorded ones. Rows are compared in float32 after decoding; see `rows`.

Why rows and not the greedy id: the id alone passes a stage that skips a layer for 22 of 30 layers of SmolLM2-135M. Why
cached steps: a stage that keeps a stale cache or counts positions wrongly gets a fresh prefill right. Ids are compared only where
the recorded margin between the best two logits is above `MARGIN`: honest bf16 flips closer ones.

Why medians over rows: honest rounding now and then sends one row far off, a large activation that rounds differently (6.5 % on a
prompt of SmolLM2-135M) or a mixture's gate that was nearly undecided, so a gate on the worst row would refuse honest stages. What
is compared is the median of all cached rows; then no prompt and no position may be far beyond that (`WORST`, by its lower
median), which catches what only some prompts or only the prefill's row meet. Measured on SmolLM2-135M against fp32, ranges of 1
to 30 layers: honest bf16 0.3-2.1 % and int8 0.8-3.8 %; any one layer left out, doubled or swapped 11 % or more, positions that
shift after the prefill 6.3 %, a stale slot 35 %. With 32 untrained experts of GPT-OSS in 8 layers a third of the honest rows is
off by more than the gate: such a probe fails now and then and is made again. The gates for fp16 and fp32 follow from their
precision and are not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median, median_low
from typing import Final

from meshd.admission.rows import all_finite, decode_untrusted, relative_error, relative_errors
from meshd.vocabulary import LayerRange

COMPARED: Final = 4  # trailing positions: the end of the prefill and the three cached steps
STEPS: Final = 3
PROMPTS: Final = 4
MARGIN: Final = 1.0
WORST: Final = 4.0  # how far beyond the gate one prompt or position may be
TOLERANCE: Final = {"bf16": 0.04, "fp16": 0.02, "fp32": 0.01, "int8": 0.08}
EXACT: Final = "hash"  # the rehearsal engine's dtype: rows are digests and equal or wrong
_FORWARDS: Final = 20  # what a probe may come to on a device that computes its prompts one by one
_LONGEST_S: Final = 240.0  # whoever claims to need more is waited for no longer


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    """``argmax[p]`` is the greedy id after position p, ``margin[p]`` the distance of the best two fp32 logits there."""

    ids: tuple[int, ...]
    argmax: tuple[int, ...]
    margin: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """Rows ``[start, start + n)`` go in, the last ``emit`` come back."""

    start: int
    n: int
    emit: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's outcome. ``got``: the four rows as they came, ``want``: as recorded (fp32; digests for `EXACT`).

    ``greedy``: the ids after the four positions, where the probed range ends the model.
    """

    prompt: GoldenPrompt
    got: bytes
    want: bytes
    greedy: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """``reason`` says what was wrong, for the peer list; ``error`` is the median relative error of the cached rows."""

    passed: bool
    reason: str
    error: float = 0.0


def probe_steps(length: int) -> list[ProbeStep]:
    """How a prompt of so many ids (at least `COMPARED`) is run."""
    prefill = length - STEPS
    return [ProbeStep(0, prefill, 1), *(ProbeStep(at, 1, 1) for at in range(prefill, length))]


def sitting_s(layers: LayerRange, layer_ms_64: float) -> float:
    """How long a device of that speed may compute at a probe of ``layers``: a small board with wide layers needs a minute."""
    return min(_LONGEST_S, max(0.0, _FORWARDS * len(layers) * layer_ms_64 / 1000.0))


def choose_prompts(prompts: Sequence[GoldenPrompt], rng: Random, count: int = PROMPTS) -> list[int]:
    """Indexes of the prompts of one probe, other ones each time: a stage must not pass by remembering answers."""
    usable = [i for i, prompt in enumerate(prompts) if len(prompt.ids) >= COMPARED]
    return rng.sample(usable, min(count, len(usable)))


def judge(answers: Sequence[Answer], *, hidden_size: int, dtype: str, wire_dtype: str) -> Judgement:
    """Whether these answers come from honest arithmetic. ``dtype`` sets the tolerance, rows arrive in ``wire_dtype``.

    Raises BadTensor for rows of the wrong size.
    """
    if not answers:
        return Judgement(False, "the qspec has no prompt long enough")
    wrong_id = next((words for answer in answers if (words := _wrong_id(answer))), "")
    if dtype == EXACT:
        equal = all(answer.got == answer.want for answer in answers)
        return Judgement(
            equal and not wrong_id, "" if equal and not wrong_id else wrong_id or "other rows than the qspec's"
        )
    table: list[list[float]] = []  # by prompt, then by row
    for answer in answers:
        got = decode_untrusted(answer.got, COMPARED, hidden_size, wire_dtype)
        if not all_finite(got):
            return Judgement(False, "rows that are not finite", float("inf"))
        table.append(relative_errors(got, decode_untrusted(answer.want, COMPARED, hidden_size, "fp32"), COMPARED))
    gate, middle = TOLERANCE.get(dtype, TOLERANCE["bf16"]), median(error for rows in table for error in rows[-STEPS:])
    worst = max(median_low(group) for group in (*table, *zip(*table, strict=True)))
    for error, limit in ((middle, gate), (worst, gate * WORST)):
        if error > limit:
            return Judgement(False, f"rows are off by {error:.1%}, {dtype} allows {limit:.0%}", middle)
    return Judgement(not wrong_id, wrong_id, middle)


def _wrong_id(answer: Answer) -> str:
    """What is wrong with the greedy ids, where there are any and the margin leaves no doubt."""
    prompt, first = answer.prompt, len(answer.prompt.ids) - COMPARED
    for i, got in enumerate(answer.greedy):
        if prompt.margin[first + i] > MARGIN and prompt.argmax[first + i] != got:
            return f"id {got} instead of {prompt.argmax[first + i]} at position {first + i}"
    return ""


def odd_one_out(rows: Sequence[bytes], n: int, *, hidden_size: int, dtype: str, wire_dtype: str) -> int | None:
    """Which of three replicas' rows of one prefill disagrees with the other two; None if that cannot be said."""
    pairs = ((0, 1, 2), (0, 2, 1), (1, 2, 0))
    left_out = [
        other for a, b, other in pairs if agree(rows[a], rows[b], n, hidden_size, dtype=dtype, wire_dtype=wire_dtype)
    ]
    return left_out[0] if len(left_out) == 1 else None


def agree(a: bytes, b: bytes, n: int, hidden_size: int, *, dtype: str, wire_dtype: str) -> bool:
    """Whether two replicas' rows may both be honest."""
    if a == b or dtype == EXACT:
        return a == b
    left, right = (decode_untrusted(rows, n, hidden_size, wire_dtype) for rows in (a, b))
    # Both may be off by the tolerance, in opposite directions.
    return relative_error(left, right) <= 2 * TOLERANCE.get(dtype, TOLERANCE["bf16"])
