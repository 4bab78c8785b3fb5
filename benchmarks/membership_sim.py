#!/usr/bin/env python3
"""What membership costs and how fast it is, in the simulator: one JSON line a configuration, and what it should be.

  python -m benchmarks.membership_sim detect --n 2,3,5,10,20,40 [--kills 20]     # suspect, dead, rejoin, join, leave; bytes
  python -m benchmarks.membership_sim loss   --n 20 --loss 0.1,0.2,0.3 [--secs 120] [--seeds 3]
  python -m benchmarks.membership_sim split  --n 100 [--secs 120]                # half and half, then healed
  python -m benchmarks.membership_sim rules  --n 20 --loss 0.3                   # the loss run with each rule switched off

Common: --preset room|lan|test, --detector swim|window, --seed 1. Times are seconds of simulated time from the event to its line
in the observer's event log; bytes are those sent by a node, IP, UDP and seal included, links estimated (`tests/sim/gossip_net`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from meshd.gossip.settings import PRESETS, GossipSettings
from tests.sim.gossip_net import SimNet

RULES = (
    "lifeguard",
    "fresh_timer",
    "tell_accused",
    "isolation_guard",
    "flap_damping",
    "verify_suspicions",
    "tcp_check",
)
# Members -> what must be reached: (suspect median, dead median, dead max, all joins seen by, bytes/s, with health).
TARGETS = {
    2: (2.5, 6.0, 7.0, 0.5, 300, 1000),
    3: (2.5, 6.0, 7.0, 0.5, 300, 1000),
    5: (2.5, 5.8, 7.0, 0.5, 300, 1000),
    10: (2.5, 6.0, 7.5, 0.7, 300, 1000),
    20: (2.5, 7.5, 9.5, 0.9, 300, 1000),
    40: (3.0, 8.8, 11.0, 1.0, 350, 1100),
}


def summary(values: list[float]) -> dict[str, float | int]:
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "med": round(statistics.median(ordered), 2),
        "p90": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 2),
        "max": round(ordered[-1], 2),
    }


def rate(net: SimNet, seconds: float) -> float:
    """Bytes a node a second, while nothing happens."""
    before = sum(n.sent_bytes + n.link_bytes for n in net.nodes.values())
    net.run(seconds)
    return (sum(n.sent_bytes + n.link_bytes for n in net.nodes.values()) - before) / seconds / len(net.nodes)


def formed(settings: GossipSettings, size: int, seed: int, *, health: bool = False) -> SimNet:
    net = SimNet(settings, seed=seed, health=health)
    net.start_many(size, settle_s=8.0)
    return net


def detect(settings: GossipSettings, size: int, seed: int, kills: int) -> dict[str, Any]:
    net, rng = formed(settings, size, seed), Random(seed)
    bytes_plain = rate(net, 60.0)
    bytes_health = rate(formed(settings, size, seed, health=True), 30.0)
    suspect: list[float] = []
    dead: list[float] = []
    dead_each: list[float] = []
    rejoin: list[float] = []
    missing = 0
    for _ in range(kills):
        victim = rng.randrange(1, size)
        net.run(rng.random() * 3)
        at = net.now
        net.kill(victim)
        net.run(16 * settings.period_s)
        died, suspected = net.times("failed", victim, at), net.times("suspect", victim, at)
        missing += size - 1 - len(died)
        dead_each += died.values()
        if len(died) == len(suspected) == size - 1:
            suspect.append(max(suspected.values()))
            dead.append(max(died.values()))
        at = net.now
        net.start(victim, join=(0,))
        net.run(3)
        rejoin.append(max(net.times("join", victim, at).values()))
    join: list[float] = []
    leave: list[float] = []
    for i in range(3):
        at = net.now
        net.start(size + i, join=(rng.randrange(size),))
        net.run(2)
        join.append(max(net.times("join", size + i, at).values()))
        at = net.now
        net.leave(size + i)
        net.run(2)
        leave.append(max(net.times("left", size + i, at).values()))
    found: dict[str, Any] = {
        "suspect_all": summary(suspect),
        "dead_all": summary(dead),
        "dead_each": summary(dead_each),
        "rejoin_all": summary(rejoin),
        "join_all": summary(join),
        "leave_all": summary(leave),
        "observers_never": missing,
        "bytes_s_node": round(bytes_plain),
        "bytes_s_node_health": round(bytes_health),
        "largest_datagram": max(n.largest for n in net.nodes.values()),
    }
    if size in TARGETS and suspect:
        reached = (
            statistics.median(suspect),
            statistics.median(dead),
            max(dead),
            max(*rejoin, *join, *leave),
            bytes_plain,
            bytes_health,
        )
        found["missed"] = [
            name
            for name, got, goal in zip(
                ("suspect", "dead_med", "dead_max", "seen", "bytes", "bytes_health"),
                reached,
                TARGETS[size],
                strict=True,
            )
            if got > goal
        ]
    return found


def loss(settings: GossipSettings, size: int, seed: int, share: float, seconds: float) -> dict[str, Any]:
    net = formed(settings, size, seed)
    net.faults.loss = share
    at = net.now
    traffic = rate(net, seconds)
    seen = [s for s in net.seen if s.at >= at]
    failed = [s for s in seen if s.name == "failed"]
    return {
        "loss": share,
        "secs": seconds,
        "false_dead_nodes": len({s.subject for s in failed}),
        "false_dead_pairs": len(failed),
        "suspect_pairs": sum(s.name == "suspect" for s in seen),
        "refutations": sum(s.name == "refute" and s.observer == s.subject for s in seen),
        "bytes_s_node": round(traffic),
    }


def split(settings: GossipSettings, size: int, seed: int, seconds: float) -> dict[str, Any]:
    net = formed(settings, size, seed)
    half = size // 2
    net.partition(range(half), range(half, size))
    net.run(seconds)
    live = [net.core(0).live_peers + 1, net.core(size - 1).live_peers + 1]
    net.heal()
    took = net.run_until(net.agreed, 120, step_s=0.25)
    return {"secs": seconds, "halves": live, "agreed_after_s": round(took, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("mode", choices=["detect", "loss", "split", "rules"])
    add("--n", default="2,3,5,10,20,40")
    add("--kills", type=int, default=20)
    add("--loss", default="0.1,0.2,0.3")
    add("--secs", type=float, default=120.0)
    add("--seeds", type=int, default=1)
    add("--seed", type=int, default=1)
    add("--preset", choices=sorted(PRESETS), default="room")
    add("--detector", choices=["swim", "window"], default="swim")
    a = parser.parse_args()
    settings = replace(PRESETS[a.preset], detector=a.detector)
    for size in map(int, a.n.split(",")):
        for seed in range(a.seed, a.seed + a.seeds):
            base = {"mode": a.mode, "n": size, "seed": seed, "preset": a.preset, "detector": a.detector}
            if a.mode == "detect":
                print(json.dumps({**base, **detect(settings, size, seed, a.kills)}), flush=True)
            elif a.mode == "split":
                print(json.dumps({**base, **split(settings, size, seed, a.secs)}), flush=True)
            else:
                for share in map(float, a.loss.split(",")):
                    for rule in ("", *RULES) if a.mode == "rules" else ("",):
                        off: dict[str, Any] = {rule: False} if rule else {}
                        run = loss(replace(settings, **off), size, seed, share, a.secs)
                        print(json.dumps({**base, "without": rule, **run}), flush=True)


if __name__ == "__main__":
    main()
