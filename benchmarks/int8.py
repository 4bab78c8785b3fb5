"""How often int8 weights choose another token than bf16: the argmax after each of 2,000 positions of real text.

The text is this repository's own documentation and code, in windows of 500 tokens, both engines fed the same ids. int8 is another
model to the room: its digest must differ, so that no route ever mixes the two.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import trio

from benchmarks import Recorder
from benchmarks import _greedy as greedy
from meshd.cli.models import ensure
from meshd.cli.room import state_dir
from meshd.inference.worker_engine import WorkerEngine, WorkerOptions
from meshd.models.store import ModelStore
from meshd.vocabulary import SessionId

MODEL = "smollm2-135m"
WINDOW, WINDOWS = 500, 4
ROWS = 100  # in one call: their logits are in memory at once
TEXTS = ("README.md", "CONTRIBUTING.md", "meshd/chain/session.py", "meshd/gossip/core.py")


def run() -> None:
    recorder = Recorder("int8")
    ensure(MODEL)
    store = ModelStore.under(state_dir(None))
    plain, small = store.get(MODEL).spec, store.get(f"{MODEL}@int8").spec
    if plain.digest == small.digest:
        raise RuntimeError("int8 has the same identity as bf16")
    found = {dtype: trio.run(_argmax, name, dtype) for name, dtype in ((MODEL, "bf16"), (f"{MODEL}@int8", "int8"))}
    pairs = list(zip(found["bf16"], found["int8"], strict=True))
    recorder.row(positions=len(pairs), agreement=sum(a == b for a, b in pairs) / len(pairs), own_identity=True)


async def _argmax(name: str, dtype: str) -> list[int]:
    from tokenizers import Tokenizer  # noqa: PLC0415  # benchmarks are listed without the engine extra

    model = ModelStore.under(state_dir(None)).get(name)
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    root = Path(__file__).resolve().parent.parent
    said: list[int] = []
    async with trio.open_nursery() as nursery:
        options = WorkerOptions(threads=1, dtype=dtype)
        engine = await WorkerEngine.spawn(
            nursery, model.path, model.spec, model.spec.whole, generation=1, log=print, options=options
        )
        for text in TEXTS[:WINDOWS]:
            said += await _window(engine, tokenizer.encode((root / text).read_text()).ids[:WINDOW])
        await engine.aclose()
        nursery.cancel_scope.cancel()
    return said


async def _window(engine: WorkerEngine, ids: list[int]) -> list[int]:
    session, said = SessionId(secrets.token_hex(16)), list[int]()
    for start in range(0, len(ids), ROWS):
        piece = ids[start : start + ROWS]
        choices = await greedy.step(
            engine, session, piece, start, prompt_len=len(ids), reserve_tokens=len(ids), emit=len(piece)
        )
        said += [choice.argmax for choice in choices]
    engine.drop(session)
    return said


if __name__ == "__main__":
    run()
