"""What a probe asks and what answers pass: the pure half of admission.

A golden prompt has its ids, greedy ids and margins at every position. A probe of layers ``[a, b)`` feeds it as a prefill of all
but three positions and three cached steps, in a slot that another session has just used, and compares the last four rows
at ``b`` with the recorded ones. Rows are compared in float32 after decoding; see `rows`.

Why rows and not the greedy id: the id alone passes a stage that skips a layer for 22 of 30 layers of SmolLM2-135M. Why
cached steps: a stage that keeps a stale cache or counts positions wrongly gets a fresh prefill right. Ids are compared only where
the recorded margin between the best two logits is above `MARGIN`: honest bf16 flips closer ones.

Why the median over the prompts: measured on SmolLM2-135M in bf16 against fp32, eight prompts, ranges of 3 to 30 layers, error
of the four rows together: honest medians 0.6-2.2 %, but single prompts up to 6.5 % (large activations that round
differently), while leaving out any one layer costs 12 % on the mildest prompt and 19 % in the median. A gate on the worst prompt
would refuse honest stages or let broken ones in; a looser one beside it (`WORST`) catches a fault that only some prompts
meet. The gates for fp16 and fp32 follow from their precision, that for int8 lies below a missing layer; those are not measured.

Where it is too narrow: rounding sends a row to another expert where a gate is nearly undecided. Small random models with 4 to 32
experts pass (median 0.5-2 %), but with 32 untrained experts of GPT-OSS in 8 layers four honest probes of five fail: a third
of its prompts is off by more than 16 %. Its rows' median is 1.7 % there, and 43 % or more with any layer left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Final

from meshd.admission.rows import all_finite, decode_untrusted, relative_error

COMPARED: Final = 4  # trailing positions: the end of the prefill and the three cached steps
STEPS: Final = 3
PROMPTS: Final = 4
MARGIN: Final = 1.0
WORST: Final = 4.0  # how far beyond the gate one prompt may be
TOLERANCE: Final = {"bf16": 0.04, "fp16": 0.02, "fp32": 0.01, "int8": 0.08}
EXACT: Final = "hash"  # the rehearsal engine's dtype: rows are digests and equal or wrong


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
    """``reason`` says what was wrong, for the peer list; ``error`` is the median relative error."""

    passed: bool
    reason: str
    error: float = 0.0


def probe_steps(length: int) -> list[ProbeStep]:
    """How a prompt of so many ids (at least `COMPARED`) is run."""
    prefill = length - STEPS
    return [ProbeStep(0, prefill, 1), *(ProbeStep(at, 1, 1) for at in range(prefill, length))]


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
    errors: list[float] = []
    for answer in answers:
        got = decode_untrusted(answer.got, COMPARED, hidden_size, wire_dtype)
        if not all_finite(got):
            return Judgement(False, "rows that are not finite", float("inf"))
        errors.append(relative_error(got, decode_untrusted(answer.want, COMPARED, hidden_size, "fp32")))
    gate, middle = TOLERANCE.get(dtype, TOLERANCE["bf16"]), median(errors)
    for error, limit in ((middle, gate), (max(errors), gate * WORST)):
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
