"""What may be believed of one member, and how beliefs merge.

A `Belief` is a point of a lattice: runs are ordered by epoch, within a run by incarnation, within an incarnation alive <
suspect < dead < left. `merge` is the least upper bound: commutative, associative, idempotent, monotone, so it does not matter
in which order, how often or by which way evidence arrives; only a statement of a higher incarnation, which only its owner can
sign, lifts an accusation. Nothing here knows time, packets or who asks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from meshd.gossip.limits import MAX_JUMP
from meshd.gossip.statement import Statement
from meshd.gossip.wire import Accusation
from meshd.vocabulary import NodeId

MAX_ACCUSERS: Final = 8  # the lowest ids are kept: a cap that is itself a lattice


class Rank(IntEnum):
    """The states of one incarnation, weakest first."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class Belief:
    """The strongest evidence there is, and the newest statement (which may be older than an accusation)."""

    epoch: int
    incarnation: int
    rank: Rank
    accusers: tuple[NodeId, ...] = ()  # of exactly this epoch and incarnation; sorted
    statement: Statement | None = None

    @property
    def standing(self) -> tuple[int, int, Rank]:
        """What evidence is compared by."""
        return (self.epoch, self.incarnation, self.rank)

    @property
    def live(self) -> bool:
        """Alive or suspect: still counted, probed and talked to."""
        return self.rank <= Rank.SUSPECT


def from_statement(statement: Statement) -> Belief:
    """What a (checked) statement is evidence of."""
    rank = Rank.LEFT if statement.left else Rank.ALIVE
    return Belief(statement.epoch, statement.incarnation, rank, statement=statement)


def from_accusation(a: Accusation) -> Belief:
    """What an accusation is evidence of."""
    return Belief(a.epoch, a.incarnation, Rank.DEAD if a.dead else Rank.SUSPECT, (a.accuser,))


def can_have_said(incarnation: int, known: int) -> bool:
    """Whether a node of whose words ``known`` is the newest incarnation we know can have come to ``incarnation``.

    Incarnations rise by one, so a jump to half of all there are is invented. Were it believed, the subject's answer, which has
    to be higher, would leave the numbers that are read, soon or at once. All judge alike: what others believe, it answers.
    """
    return incarnation <= known or incarnation < MAX_JUMP


def merge(a: Belief, b: Belief) -> Belief:
    """The least belief at least as strong as both."""
    strong, weak = (a, b) if a.standing >= b.standing else (b, a)
    accusers = strong.accusers
    if (strong.epoch, strong.incarnation) == (weak.epoch, weak.incarnation) and weak.accusers:
        accusers = tuple(sorted({*strong.accusers, *weak.accusers}))[:MAX_ACCUSERS]
    return replace(strong, accusers=accusers, statement=_newer(a.statement, b.statement))


def _newer(a: Statement | None, b: Statement | None) -> Statement | None:
    if a is None or b is None:
        return a or b
    # Two statements of one version exist only where two devices share a key; the bytes break the tie alike everywhere.
    return a if (a.version, a.encoded) >= (b.version, b.encoded) else b
