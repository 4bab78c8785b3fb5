"""The probing side: brings the book's verdicts about.

Owns when to look (at once when the room changes) and the exchange of one probe; the verdicts are the book's, the judgement is
`qspec`'s. A probe that could not be made (no link, a busy or restarting node, no answer in time) is no verdict. Without
something to compare with nobody is judged: peers stay "not yet probed" with the reason, until an expectation is had.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any, Final

import trio

from meshd.admission.book import Subject, VerdictBook, subject_of
from meshd.admission.expected import WIRE_DTYPES, Case, Expected
from meshd.admission.probe_wire import ProbeAnswer, ProbeRequest, answer_untrusted, request_message
from meshd.admission.qspec import Answer, Judgement, judge, sitting_s
from meshd.directory import Directory, Member
from meshd.errors import BadFrame, BadTensor, MeshdError
from meshd.links.wire import Links, Message
from meshd.vocabulary import NodeId, NodeStatus

_log = logging.getLogger(__name__)

ANSWER_S: Final = 4.0
"""A probe is a few small forwards; a device that takes longer says so in its advert's layer_ms."""

_RETRY_S: Final = 1.0

Expectations = Callable[[str], Awaitable[Expected]]
"""What is expected of stages of the model with a digest. Raises MeshdError saying why there is nothing."""

OnEvent = Callable[[str, Mapping[str, Any]], None]


class Prober:
    """Run it in a nursery; call `look` whenever the room changed. ``on_verdict`` is called after each news."""

    def __init__(
        self,
        book: VerdictBook,
        links: Links,
        *,
        directory: Callable[[], Directory],
        digest: Callable[[], str],
        expectations: Expectations,
        rng: Random,
        on_verdict: Callable[[], None],
        on_event: OnEvent,
    ) -> None:
        """``digest`` is the model this node serves or enters ("": none yet)."""
        self._book = book
        self._links = links
        self._directory = directory
        self._digest = digest
        self._expectations = expectations
        self._rng = rng
        self._on_verdict = on_verdict
        self._on_event = on_event
        self._news = trio.Event()
        self.counters = {"probes_passed": 0, "probes_failed": 0, "probes_missed": 0, "quarantined": 0}

    def look(self) -> None:
        """The room may have changed."""
        self._news.set()

    def quarantine(self, node: NodeId, reason: str) -> None:
        """A running node computed something wrong: no more traffic until it passes a probe again."""
        member = self._directory().get(node)
        subject = subject_of(member.advert) if member is not None else None
        if subject is not None and self._book.quarantine(subject, reason, trio.current_time()):
            self.counters["quarantined"] += 1
            self._told("quarantine", subject, reason)
            self.look()

    async def doubt(self, node: NodeId) -> None:
        """Probe an admitted node again, now; quarantine it if it fails. Nothing happens if it cannot be probed."""
        member = self._directory().get(node)
        subject = subject_of(member.advert) if member is not None else None
        if member is None or subject is None:
            return
        try:
            verdict = await self._examine(subject, member, await self._expectations(subject.digest))
        except (BadFrame, BadTensor) as error:
            verdict = Judgement(False, error.message)
        except MeshdError:
            return
        if not verdict.passed:
            self.quarantine(node, verdict.reason)

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as probes:  # the book says how many
            while True:
                self._news = trio.Event()
                now = trio.current_time()
                self._book.observe((m.advert for m in self._directory().peers if _present(m)), now)
                digest = self._digest()
                subject = self._book.next_probe(digest, now) if digest else None
                if subject is not None:
                    probes.start_soon(self._probe, subject)
                    continue
                deadline = self._book.deadline(digest) if digest else trio.current_time() + _RETRY_S
                with trio.move_on_at(deadline):
                    await self._news.wait()

    async def _probe(self, subject: Subject) -> None:
        await self._bring_verdict(subject)
        self.look()  # the next may go out

    async def _bring_verdict(self, subject: Subject) -> None:
        member = self._directory().get(subject.node_id)
        if member is None or subject_of(member.advert) != subject:
            return  # it has just gone, or begun to be another: the book will see
        try:
            expected = await self._expectations(subject.digest)
        except MeshdError as error:
            self._missed(subject, error.message)
            return
        except Exception as error:  # noqa: BLE001  # such as a disk's refusal; it must not end the node
            self._failed(subject, error)
            return
        try:
            verdict = await self._examine(subject, member, expected)
        except (BadFrame, BadTensor) as error:  # it answers, and what it says is no answer
            verdict = Judgement(False, error.message)
        except MeshdError as error:
            self._missed(subject, error.message)
            return
        except Exception as error:  # noqa: BLE001  # one peer's probe must not end the node
            self._failed(subject, error)
            return
        if verdict.passed:
            if self._book.passed(subject):
                self.counters["probes_passed"] += 1
                self._told("admit", subject, f"off by {verdict.error:.2%}")
        elif self._book.failed(subject, verdict.reason, trio.current_time()):
            self.counters["probes_failed"] += 1
            self._told("quarantine", subject, verdict.reason)

    async def _examine(self, subject: Subject, member: Member, expected: Expected) -> Judgement:
        """Ask and judge. Raises MeshdError when there is no answer to judge."""
        dtype, limit_s = member.advert.dtype, _limit_s(member)
        cases = await trio.to_thread.run_sync(expected.cases, subject.layers, dtype, self._rng)
        with trio.move_on_after(limit_s):
            answer = await self._ask(subject, cases)
            return await trio.to_thread.run_sync(judged, answer, cases, expected, dtype)
        raise MeshdError(f"no answer to a probe within {limit_s:.1f} s")

    async def _ask(self, subject: Subject, cases: list[Case]) -> ProbeAnswer:
        link = await self._links.get(subject.node_id)
        stream = await link.open(request_message(request_for(subject, cases)))
        try:
            await stream.end()
            message: Message | None = await stream.receive()
        finally:
            stream.cancel()
        if message is None:
            raise MeshdError("the node ended a probe without an answer")
        answer = answer_untrusted(message)
        if (answer.digest, answer.generation, answer.layers) != (subject.digest, subject.generation, subject.layers):
            raise MeshdError("another engine than the probed one answered")
        return answer

    def _missed(self, subject: Subject, reason: str) -> None:
        if self._book.unavailable(subject, reason, trio.current_time()):
            self.counters["probes_missed"] += 1
            self._on_verdict()

    def _failed(self, subject: Subject, error: Exception) -> None:
        """Something that nobody expected: logged whole."""
        _log.error("a probe of %s failed", subject.node_id, exc_info=error)
        self._missed(subject, "the probe could not be made")

    def _told(self, name: str, subject: Subject, reason: str) -> None:
        label = self._directory().label(subject.node_id)
        self._on_event(
            name,
            {
                "text": f"{label} {subject.layers}: {reason}",
                "peer": subject.node_id,
                "peer_name": label,
                "layers": subject.layers.json(),
                "reason": reason,
            },
        )
        self._on_verdict()


def request_for(subject: Subject, cases: list[Case]) -> ProbeRequest:
    """The probe that puts ``cases`` to ``subject``."""
    return ProbeRequest(
        subject.digest,
        subject.generation,
        subject.layers,
        tuple(len(case.prompt.ids) for case in cases),
        b"".join(case.rows for case in cases),
    )


def judged(answer: ProbeAnswer, cases: list[Case], expected: Expected, dtype: str) -> Judgement:
    """The judgement of an answer to ``cases``; the first of them only warmed up."""
    asked = cases[1:]
    if len(answer.rows) != len(asked):
        return Judgement(False, "answers to another number of prompts")
    if answer.layers.end == expected.num_layers and len(answer.greedy) != len(asked):
        return Judgement(False, "no greedy ids at the model's end")
    greedy = answer.greedy or ((),) * len(asked)
    papers = [
        Answer(case.prompt, got, case.want, ids) for case, got, ids in zip(asked, answer.rows, greedy, strict=True)
    ]
    return judge(papers, hidden_size=expected.hidden_size, dtype=dtype, wire_dtype=WIRE_DTYPES.get(dtype, dtype))


def _present(member: Member) -> bool:
    return member.state in (NodeStatus.ALIVE, NodeStatus.SUSPECT, NodeStatus.DRAINING) and member.incompatible is None


def _limit_s(member: Member) -> float:
    layers = member.advert.layers
    return ANSWER_S + (sitting_s(layers, member.advert.capability.layer_ms_64) if layers is not None else 0.0)
