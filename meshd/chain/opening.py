"""What the hops of a first route keep of the prompt: asked of all at once, used as far as every one of them has it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from meshd.vocabulary import LayerRange, NodeId, Route

ASKED_TOKENS: Final = 64  # shorter prompts are computed in the time it takes to ask who keeps them
OPEN_S: Final = 0.25  # who has not answered by then keeps nothing
Place = tuple[NodeId, LayerRange]


class Opening:
    """Waits until ``until`` (monotonic seconds) for an answer of every place of the route."""

    def __init__(self, route: Route, now: float) -> None:
        self.until = now + OPEN_S
        self._kept: dict[Place, int | None] = dict.fromkeys(((hop.node_id, hop.layers) for hop in route), None)

    def heard(self, place: Place, kept_tokens: int) -> bool:
        """One has answered; whether that was the last. Whoever was not asked is not heard."""
        if place not in self._kept:
            return False
        self._kept[place] = kept_tokens
        return None not in self._kept.values()

    @property
    def cached_tokens(self) -> int:
        """Positions of the prompt that no place has to compute."""
        return min(kept or 0 for kept in self._kept.values())

    @property
    def places(self) -> Iterable[Place]:
        """Who was asked."""
        return self._kept
