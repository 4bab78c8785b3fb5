"""A prompt that was computed before against a cold one: SmolLM2 in two daemons, as a client sees the first token.

Twice the same prompt of 512 tokens, and a chat's second turn after a prompt of 1,000 tokens and an answer of 64. Cold is the same
request with a key that nobody has used, which must meet nothing of what the others left. Bytes are those that the daemons' links
carried meanwhile (needs ``ss``), everything else on them included. Logits must be the same.
"""

from __future__ import annotations

import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import Recorder
from meshd.cli.local_room import LocalRoom
from meshd.cli.models import ensure
from meshd.client import Client

MODEL = "smollm2-135m"
PROMPT_TOKENS = 512
CHAT_TOKENS, ANSWER_TOKENS, TURN_TOKENS = 1000, 64, 24
ROUNDS = 3


def run() -> None:
    recorder = Recorder("prefix")
    spec, store = ensure(MODEL)
    rng = random.Random(1)
    half = spec.num_layers // 2
    with tempfile.TemporaryDirectory() as folder, LocalRoom(MODEL, store=store, common=["--threads", "1"]) as room:
        names = [f"person-{i:02d}-1234567890" for i in range(4 * ROUNDS + 1)]
        keys = Path(folder) / "api"
        keys.write_text("".join(f"infer {name}\n" for name in names))
        keys.chmod(0o600)
        room.add("n1", "--layers", f"0..{half}", "--api-key-file", str(keys), "--open-read", "--capacity-mb", "1500")
        room.add("n2", "--layers", f"{half}..{spec.num_layers}", "--capacity-mb", "1500")
        room.wait(nodes=2, timeout_s=180)
        people = iter(names)

        def ids(count: int) -> list[int]:
            return [rng.randrange(100, spec.vocab_size) for _ in range(count)]

        _ask(room, next(people), ids(PROMPT_TOKENS), 4)  # everything is paged in
        _again(recorder, room, people, ids(PROMPT_TOKENS))
        _second_turn(recorder, room, people, ids)


def _again(recorder: Recorder, room: LocalRoom, people: Iterator[str], prompt: list[int]) -> None:
    ratios, shares, cached = [], [], 0
    for _ in range(ROUNDS):
        person, before = next(people), _link_bytes(room)
        cold = _ask(room, person, prompt, 1)
        between = _link_bytes(room)
        warm = _ask(room, person, prompt, 1)
        after = _link_bytes(room)
        stranger = _ask(room, next(people), prompt, 1)
        if _cached(cold) or _cached(stranger):
            raise RuntimeError("a key met another key's prompt")
        if not (_draw(cold) == _draw(warm) == _draw(stranger)):
            raise RuntimeError("warm and cold logits differ")
        ratios.append(warm["timings"]["ttft_ms"] / cold["timings"]["ttft_ms"])
        cached = _cached(warm)
        if before is not None and between is not None and after is not None:
            shares.append((after - between) / (between - before))
    more = {"bytes_warm_against_cold": statistics.median(shares)} if shares else {}
    recorder.row(what="same prompt", tokens=PROMPT_TOKENS, cached=cached, first_token=statistics.median(ratios), **more)


def _second_turn(recorder: Recorder, room: LocalRoom, people: Iterator[str], ids: Any) -> None:
    ratios, cached = [], 0
    for _ in range(ROUNDS):
        person, chat, turn = next(people), ids(CHAT_TOKENS), ids(TURN_TOKENS)
        first = _ask(room, person, chat, ANSWER_TOKENS)
        prompt = [*chat, *first["tokens"], *turn]
        warm = _ask(room, person, prompt, 1)
        cold = _ask(room, next(people), prompt, 1)
        if _draw(cold) != _draw(warm):
            raise RuntimeError("warm and cold logits differ")
        ratios.append(warm["timings"]["ttft_ms"] / cold["timings"]["ttft_ms"])
        cached = _cached(warm)
    tokens = CHAT_TOKENS + ANSWER_TOKENS + TURN_TOKENS
    recorder.row(what="second turn", tokens=tokens, cached=cached, first_token=statistics.median(ratios))


def _ask(room: LocalRoom, key: str, tokens: list[int], count: int) -> Mapping[str, Any]:
    """The answer, once both daemons have forgotten the session (and kept its prompt)."""
    with Client(room.nodes["n1"].url, key=key, timeout_s=120) as client:
        answer: Mapping[str, Any] = client.post("/chain", {"tokens": tokens, "max_tokens": count, "temperature": 0})
    for node in room.nodes.values():
        with Client(node.url, key=key) as client:
            while client.get("/status")["kv_sessions"]:
                time.sleep(0.01)
    time.sleep(0.05)  # an engine keeps what has ended a moment after its daemon has forgotten it
    return answer


def _cached(answer: Mapping[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def _draw(answer: Mapping[str, Any]) -> tuple[Any, ...]:
    return answer["tokens"], answer["argmax"], answer["logit"]


def _link_bytes(room: LocalRoom) -> int | None:
    """Bytes that the daemons have sent each other over TCP so far; None where nobody counts them."""
    if shutil.which("ss") is None:
        return None
    listing = subprocess.run(["ss", "-tinOH", "-p"], capture_output=True, text=True, check=True).stdout
    pids = [f"pid={node.process.pid}," for node in room.nodes.values() if node.process is not None]
    http = {node.http.rpartition(":")[2] for node in room.nodes.values()}
    total = 0
    for line in listing.splitlines():
        found = re.search(r"bytes_sent:(\d+)", line)
        if found and any(pid in line for pid in pids) and line.split()[3].rpartition(":")[2] not in http:
            total += int(found.group(1))
    return total


if __name__ == "__main__":
    run()
