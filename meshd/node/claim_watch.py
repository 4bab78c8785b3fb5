"""Weighs what nodes claim against what their answers took, and shows who claims too much, by `routing.overclaim`."""

from __future__ import annotations

from meshd.chain.request import HopReport
from meshd.directory import Member
from meshd.eventlog import EventLog
from meshd.roster import Roster
from meshd.routing.overclaim import OVERCLAIM, Overclaims


class ClaimWatch:
    """Tells the roster each node's ratio, and the log when one sinks below the limit."""

    def __init__(self, roster: Roster, log: EventLog) -> None:
        self._roster = roster
        self._log = log
        self._measured = Overclaims()

    def answered(self, route: tuple[HopReport, ...], tokens: int) -> None:
        """An answer of so many tokens came over ``route``. Hops of jammed nodes and of nodes that left say nothing."""
        for hop in route:
            member = self._roster.directory.get(hop.node_id)
            if member is not None and not member.health.jammed:
                self._weigh(member, hop, tokens)

    def _weigh(self, member: Member, hop: HopReport, tokens: int) -> None:
        node, advert = hop.node_id, member.advert
        run = advert.epoch, advert.generation
        before = self._measured.ratio(node, run)
        claimed_ms = advert.capability.layer_ms_1
        self._measured.add(node, run, hop.layers, compute_ms=hop.compute_ms, claimed_ms=claimed_ms, tokens=tokens)
        ratio = self._measured.ratio(node, run)
        self._roster.set_claim_ratio(advert, ratio)
        if ratio is not None and ratio < OVERCLAIM <= (1.0 if before is None else before):
            name = self._roster.directory.label(node)
            self._log.emit("overclaim", level="warning", node=node, name=name, ratio=round(ratio, 3))
