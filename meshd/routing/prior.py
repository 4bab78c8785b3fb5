"""How fast a hop should be before anybody measured it.

Owns the arithmetic from a member's own claim (``layer_ms_1``), its health and its claim ratio to milliseconds a layer. A
route's prior is that of its slowest hop: under load a chain delivers what its slowest stage does. Unknown, zero, negative
or non-finite claims count as `UNKNOWN_LAYER_MS`; nothing here divides by zero.
"""

from __future__ import annotations

import math
from typing import Final

from meshd.directory import Member

UNKNOWN_LAYER_MS: Final = 5.0  # a slow laptop's decode row; only has to lie among the values that devices really claim
_FASTEST_LAYER_MS: Final = 1e-4
_CLAIM_RATIO: Final = (0.01, 4.0)  # a single odd measurement moves a prior by no more than this


def layer_ms(member: Member, own_outstanding: int = 0) -> float:
    """Milliseconds one decode row spends in one layer of this member, other people's load included.

    ``own_outstanding`` requests of this entry are part of what the member reports; they are accounted for elsewhere.
    """
    claimed = member.advert.capability.layer_ms_1
    unknown = not math.isfinite(claimed) or claimed <= 0.0
    base = UNKNOWN_LAYER_MS if unknown else max(claimed, _FASTEST_LAYER_MS)
    ratio = member.claim_ratio
    if ratio is not None and math.isfinite(ratio) and ratio > 0.0:
        base /= min(max(ratio, _CLAIM_RATIO[0]), _CLAIM_RATIO[1])
    others = max(0, member.health.queue_depth + member.health.in_flight - own_outstanding)
    return base * (1 + others)


def tokens_per_s(ms_per_layer: float, layers: int) -> float:
    """What a hop of ``layers`` layers delivers alone."""
    return 1000.0 / (max(ms_per_layer, _FASTEST_LAYER_MS) * max(layers, 1))
