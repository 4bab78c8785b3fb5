"""The rows of ``/v1/routing``: what the bandit knows, for people and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshd.directory import Directory
from meshd.routing.policy import Candidate
from meshd.routing.signature import label


def candidate_rows(
    directory: Directory, digest: str, candidates: Sequence[Candidate], shares: Sequence[float]
) -> list[dict[str, Any]]:
    """One row a candidate, best prior first. ``shares`` are unrounded, so that the column sums to 1."""
    proven = [c.arm.tps for c in candidates if c.arm.status == "proven" and c.arm.tps is not None]
    best = max(proven, default=0.0)
    paired = sorted(zip(candidates, shares, strict=True), key=lambda pair: -pair[0].prior_tps)
    return [_row(directory, digest, candidate, share, best) for candidate, share in paired]


def _row(directory: Directory, digest: str, candidate: Candidate, share: float, best: float) -> dict[str, Any]:
    arm = candidate.arm
    return {
        "signature": label(directory, digest, candidate.hops),
        "hops": [
            {"node": hop.node_id, "name": directory.label(hop.node_id), "layers": hop.layers.json()}
            for hop in candidate.hops
        ],
        "tps": arm.tps,
        "prior_tps": candidate.prior_tps,
        "coefficient": arm.tps / best if arm.tps is not None and best > 0.0 else None,
        "expected_share": share,
        "samples": arm.samples,
        "weight": arm.mass,
        "status": arm.status,
    }
