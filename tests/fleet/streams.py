"""Clients of a room, run on a host of the lab: `python -m tests.fleet.streams KEY-FILE URL...`

Eight streams, one request after another each, at entries in turn, until stdin ends. Every answer is compared with what any room
must answer. Prints one JSON line: how many were right, and what went wrong. The key is read before each request, as a client
would that is told of a new one.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from meshd.client import Client
from meshd.errors import MeshdError
from meshd.identity import mesh_key
from meshd.inference.hash_stage import reference
from tests.fleet.numbers import LAYERS

STREAMS = 8
TOKENS = 16


def main(key_file: Path, urls: list[str]) -> None:
    stop = threading.Event()
    right, wrong = [0] * STREAMS, list[str]()

    def ask(number: int) -> None:
        turn = number
        while not stop.wait(0.05):
            turn += 1
            entries = [*urls[turn % len(urls) :], *urls[: turn % len(urls)]]
            prompt = f"stream {number}, question {turn}"
            try:
                with Client(entries, key=mesh_key.load(key_file).api_key(), timeout_s=60) as room:
                    pieces = room.stream(prompt, max_tokens=TOKENS, patience_s=60)
                    tokens = [token for piece in pieces for token in piece.tokens]
            except MeshdError as error:
                wrong.append(f"{prompt}: {error.code} {error.message}")
                continue
            if tokens == reference(tuple(prompt.encode()), TOKENS, LAYERS):
                right[number] += 1
            else:
                wrong.append(f"{prompt}: {tokens}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"right": sum(right), "least": min(right), "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
