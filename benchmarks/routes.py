"""What learned routes are worth in rooms of real daemons (hash engine): equal lanes, a lane that slows down, a node that flaps.

* ``lanes``: N lanes of equal speed under N clients against one lane under one client; 1 = N times as many tokens.
* ``slowed``: of two lanes one comes back three times slower, later as fast as before. Tokens per second of one client after 60
  requests against always asking the faster lane, and the slow lane's share; then its share once it has recovered.
* ``flapping``: a third node, needed for nothing, is killed and restarted every 5 s; tokens per second against the calm room.

``ROUTES_TOKENS`` (32) an answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import Any

from benchmarks import Recorder
from meshd.cli.local_room import LocalRoom

TOKENS = int(os.environ.get("ROUTES_TOKENS", "32"))
STEP_MS = 10
SLOWER = 3
LANE = ("--layers", "0..8", "--capacity-mb", "200")
STEERED = ("--route-weight-alpha", "4", "--route-explore-share", "0.1")


def model(step_ms: int) -> str:
    return f"hash:8,step_ms={step_ms},layer_mb=1"


def run() -> None:
    record = Recorder("routes")
    for lanes in (2, 3, 4, 5):
        _equal_lanes(record, lanes)
    _slowed(record, "default")
    _slowed(record, "steered", *STEERED)
    _flapping(record)


def _equal_lanes(record: Recorder, lanes: int) -> None:
    with LocalRoom(model(STEP_MS), common=["--preset", "room"]) as room:
        room.add("e0", "--capacity-mb", "0")
        for lane in range(lanes):
            room.add(f"n{lane}", *LANE)
        room.wait(nodes=lanes + 1, replicas=lanes, timeout_s=120)
        alone = _rate(room, 1, 30, route=["n0"])
        _rate(room, 1, 4 * lanes)  # each lane has been measured
        together, taken = _counted(room, lanes, 30)
        record.row(
            what="lanes", lanes=lanes, tokens_per_s=together, of_n_lanes=together / (lanes * alone), answers=taken
        )


def _slowed(record: Recorder, settings: str, *flags: str) -> None:
    with LocalRoom(model(STEP_MS), common=["--preset", "room"]) as room:
        room.add("e0", "--capacity-mb", "0", *flags)
        for lane in ("n0", "n1"):
            room.add(lane, *LANE)
        room.wait(nodes=3, replicas=2, timeout_s=120)
        _rate(room, 1, 20)
        _restart(room, "n1", model(SLOWER * STEP_MS))
        _rate(room, 1, 60)
        learned, taken = _counted(room, 1, 40)
        best = _rate(room, 1, 20, route=["n0"])
        _restart(room, "n1", model(STEP_MS))
        _rate(room, 1, 60)
        _, later = _counted(room, 1, 40)
        record.row(
            what="slowed",
            settings=settings,
            tokens_per_s=learned,
            of_the_best=learned / best,
            slow_share=taken["n1"] / sum(taken.values()),
            recovered_share=later["n1"] / sum(later.values()),
        )


def _flapping(record: Recorder) -> None:
    with LocalRoom(model(STEP_MS), common=["--preset", "room"]) as room:
        room.add("e0", "--capacity-mb", "0")
        for lane in ("n0", "n1"):
            room.add(lane, *LANE)
        room.add("flapper", "--capacity-mb", "0")
        room.wait(nodes=4, replicas=2, timeout_s=120)
        _rate(room, 2, 10)
        calm = _rate(room, 2, 40)
        stop = threading.Event()
        flapper = threading.Thread(target=_flap, args=(room, stop))
        flapper.start()
        try:
            restless = _rate(room, 2, 60)
        finally:
            stop.set()
            flapper.join()
        record.row(what="flapping", tokens_per_s=restless, of_the_calm_room=restless / calm)


def _flap(room: LocalRoom, stop: threading.Event) -> None:
    while not stop.wait(2.5):
        room.kill("flapper")
        stop.wait(2.5)
        room.start("flapper")


def _restart(room: LocalRoom, name: str, as_model: str) -> None:
    """The same node, as fast as ``as_model`` says."""
    room.kill(name)
    node = room.nodes[name]
    node.flags = [*LANE, "--model", as_model, *node.flags[node.flags.index("--join") :]]
    room.start(name)
    room.wait(nodes=len(room.nodes), replicas=2, timeout_s=60, at=["e0"])


def _rate(room: LocalRoom, clients: int, answers: int, **body: Any) -> float:
    return _counted(room, clients, answers, **body)[0]


def _counted(room: LocalRoom, clients: int, answers: int, **body: Any) -> tuple[float, Counter[str]]:
    """Tokens per second while each of so many clients takes so many answers one after the other, and who computed them."""
    taken: Counter[str] = Counter()

    def one(client_number: int) -> None:
        with room.client("e0") as client:
            for i in range(answers):
                prompt = f"client {client_number} question {i}"
                answer = client.post("/chain", {"prompt": prompt, "max_tokens": TOKENS, **body})
                taken[answer["route"][0]["name"]] += 1

    threads = [threading.Thread(target=one, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients * answers * TOKENS / (time.perf_counter() - began), taken
