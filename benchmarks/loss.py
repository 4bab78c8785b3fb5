"""Twenty real daemons behind a mesh key on hosts of their own; a share of all packets is lost, UDP and TCP: who is called dead?

Nobody dies, so every ``failed`` is false. The hosts are network namespaces on one switch that drops packets at random; the
daemons hold halves of the hash model, so there are links and probes between them beside the gossip. ``false_suspicions`` counts
what was suspected and refuted again. ``LOSS_NODES`` (20), ``LOSS_S`` (120) a share, ``LOSS_SHARES`` (0.1,0.2,0.3). Needs root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from benchmarks import Recorder
from meshd.cli.chaos.box import Box, boxed
from meshd.cli.chaos.netlab import lacking
from meshd.vocabulary import LayerRange

LAYERS = 20
READY_S = 120
CALM_S = 20.0


def run() -> None:
    recorder = Recorder("loss")
    missing = lacking()
    if missing:
        recorder.row(skipped=missing)
        return
    nodes, seconds = int(os.environ.get("LOSS_NODES", "20")), float(os.environ.get("LOSS_S", "120"))
    half = LAYERS // 2
    halves = (LayerRange(0, half), LayerRange(half, LAYERS))
    places: Mapping[str, LayerRange | None] = {f"n{i + 1}": halves[i % 2] for i in range(nodes)}
    with boxed(f"hash:{LAYERS}", places) as box, box.inside():
        box.room.wait(nodes=nodes, timeout_s=READY_S)
        for share in map(float, os.environ.get("LOSS_SHARES", "0.1,0.2,0.3").split(",")):
            time.sleep(CALM_S)
            began = time.time()
            box.net.lose(share)
            time.sleep(seconds)
            box.net.heal()
            failed, suspected = (_about(box, word, began) for word in ("failed", "suspect"))
            recorder.row(
                nodes=nodes,
                loss=share,
                seconds=seconds,
                false_deaths=len(failed),
                false_deaths_about=sorted(set(failed)),
                false_suspicions=len(suspected),
            )


def _about(box: Box, word: str, since: float) -> list[str]:
    """The names that events of this kind are about, at every node."""
    events = (event for node in box.room.nodes.values() for event in node.events())
    return [event["name"] for event in events if event["ev"] == word and event["t"] >= since]


if __name__ == "__main__":
    run()
