"""What ``meshd elect`` and ``meshd plan`` make of figures that nobody can have measured."""

from __future__ import annotations

import pytest

from meshd.cli.plan import devices_of
from meshd.election.capacity import lane_budget, weight_budget
from meshd.election.settings import Settings
from tests.doctor.documents import peer


@pytest.mark.parametrize("capacity_mb", [1e308, 10**400, float("inf"), float("nan"), -1.0])
def test_a_claim_beyond_any_device_counts_as_none(capacity_mb: float) -> None:
    """It comes from other devices: it must stop no election."""
    claimed = devices_of([peer("n1", None, capacity_mb=capacity_mb)], "d1")[0].capacity_mb
    assert (weight_budget(claimed, Settings()), lane_budget(claimed, Settings())) == (0, 0)
