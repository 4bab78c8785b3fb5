"""Run seeds of the whole-node simulator: one with its trace, or many with a line each. Exit status 1 if a law was broken."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time

from tests.sim.whole.script import Plan, run

MODES = ("live", "calm", "safety")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.whole", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="so many seeds from this one on")
    parser.add_argument("--mode", choices=("all", *MODES), default="all", help="all: by turns")
    parser.add_argument("--nodes", type=int, default=None, help="devices (default: the seed's choice)")
    parser.add_argument("--faults-s", type=float, default=40.0, help="how long faults go on, in simulated seconds")
    parser.add_argument("--watch-s", type=float, default=60.0, help="how long a settled room is watched (live)")
    parser.add_argument("--quiet", action="store_true", help="no trace, not even of a failure")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of text must have one order
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim.whole", *sys.argv[1:]])
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        mode = options.mode if options.mode != "all" else MODES[seed % len(MODES)]
        began = time.process_time()
        result = run(seed, Plan(mode, options.nodes, options.faults_s, options.watch_s))
        if (result.broken or options.count == 1) and not options.quiet:
            print("\n".join(result.trace))
        failed += bool(result.broken)
        row = {
            "seed": seed,
            "mode": mode,
            "broken": result.broken,
            "cpu_s": round(time.process_time() - began, 2),
            "simulated_s": round(result.simulated_s, 1),
            "settled_s": round(result.settled_s, 1),
            **result.tally,
            "trace": hashlib.sha256("\n".join(result.trace).encode()).hexdigest()[:12],
        }
        print(json.dumps(row), flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
