"""Deaths, freezes and drains while an answer runs: the tokens stay, the stall is short. Virtual time, so the bounds are exact."""

from __future__ import annotations

import random
import statistics

import pytest
import trio

from meshd.chain.codec import to_wire
from meshd.chain.messages import Lost, Why
from meshd.chain.request import GenerationRequest
from meshd.errors import StageUnavailable
from meshd.inference.hash_stage import reference
from meshd.vocabulary import LayerRange, NodeId, SessionId
from tests.chain.room import LAYERS, Outcome, Room, node_id, open_room, run, three_stages

PROMPT = tuple(b"The capital of France is")
LONG = tuple(i % 251 for i in range(1500))


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("victims", [(1,), (2,), (3,), (1, 2), (2, 3)])
@pytest.mark.parametrize("at", [1, 2, 20, 63])
def test_stages_are_lost_between_steps(how: str, victims: tuple[int, ...], at: int) -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)

            def on_token(count: int) -> None:
                for victim in victims if count == at else ():
                    _strike(room, how, victim)

            out = await room.ask(9, GenerationRequest(PROMPT, 64), on_token=on_token)
            assert out.tokens == reference(PROMPT, 64, LAYERS)
            assert out.worst_stall_s <= (0.5 if how == "kill" else 1.2)
            assert out.finished is not None
            recoveries = sorted(out.finished.recoveries, key=lambda r: r.layers)
            for recovery, victim in zip(recoveries, victims, strict=True):
                assert recovery.reason == ("reset" if how == "kill" else "silent")
                assert (recovery.from_node, recovery.to_node) == (node_id(victim), node_id(victim + 3))
                assert recovery.exact
                assert recovery.replayed_tokens == len(PROMPT) + at - 1
            _thaw_all(room)
            await room.quiet()

    run(main)


def test_stages_are_lost_inside_steps() -> None:
    """Any moment, any stage or two: the median stall is that of the requirement, nothing takes 3 s."""
    rng = random.Random(7)
    stalls: dict[str, list[float]] = {"kill": [], "freeze": []}

    async def once(how: str, victims: tuple[int, ...], delay_s: float) -> None:
        async with open_room() as room:
            await three_stages(room, step_ms=30.0)
            out = Outcome()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ask_into, room, PROMPT, out)
                await trio.sleep(delay_s)
                for victim in victims:
                    _strike(room, how, victim)
            assert out.tokens == reference(PROMPT, 24, LAYERS)
            stalls[how].append(out.worst_stall_s)

    for how in stalls:
        for _ in range(20):
            victims = tuple(rng.sample([1, 2, 3], rng.choice([1, 1, 2])))
            delay_s = rng.uniform(0.0, 0.7)
            run(lambda how=how, victims=victims, delay_s=delay_s: once(how, victims, delay_s))  # type: ignore[misc] # bound
    assert statistics.median(stalls["kill"]) <= 0.5
    assert statistics.median(stalls["freeze"]) <= 1.2
    assert max(stalls["kill"] + stalls["freeze"]) <= 3.0


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("victim", [1, 2, 3])
@pytest.mark.parametrize("delay_s", [0.001, 0.1, 0.35])
def test_a_stage_is_lost_in_a_prompt(how: str, victim: int, delay_s: float) -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room, step_ms=90.0)
            out = Outcome()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ask_into, room, LONG, out)
                await trio.sleep(delay_s)
                _strike(room, how, victim)
            assert out.tokens == reference(LONG, 24, LAYERS)
            assert out.finished is not None
            assert len(out.finished.recoveries) == 1
            assert out.finished.timings.total_ms < 6000.0

    run(main)


def test_every_replica_in_turn() -> None:
    """A replacement that dies is replaced; a node that came back is used again."""

    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            async with trio.open_nursery() as nursery:

                def on_token(count: int) -> None:
                    if count == 10:
                        room.kill(2)
                    if count == 20:
                        nursery.start_soon(room.restart, 2)
                    if count == 40:
                        room.kill(5)

                out = await room.ask(9, GenerationRequest(PROMPT, 64), on_token=on_token)
            assert out.tokens == reference(PROMPT, 64, LAYERS)
            assert out.finished is not None
            assert [r.to_node for r in out.finished.recoveries] == [node_id(5), node_id(2)]

    run(main)


def test_slow_is_not_dead_and_the_faster_one_wins() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            _slow(room, 2, 8.0)
            out = await room.ask(9, GenerationRequest(PROMPT, 24))
            assert out.tokens == reference(PROMPT, 24, LAYERS)
            assert out.finished is not None
            assert [(r.reason, r.to_node) for r in out.finished.recoveries] == [("slow", node_id(5))]
            assert out.finished.timings.total_ms < 2000.0
            others = await room.ask(9, GenerationRequest(PROMPT, 5, pinned=tuple(node_id(n) for n in (1, 5, 3))))
            assert others.worst_stall_s < 0.1
            await trio.sleep(20.0)
            await room.quiet()

    run(main)


def test_both_slow_finishes_late_without_ping_pong() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            _slow(room, 2, 8.0)
            _slow(room, 5, 8.0)
            out = await room.ask(9, GenerationRequest(PROMPT, 5, deadline_s=None))
            assert out.tokens == reference(PROMPT, 5, LAYERS)
            assert room.nodes[9].service.counters["hedges"] <= 2
            assert out.times[-1] - out.times[0] < 40.0
            await trio.sleep(30.0)
            await room.quiet()

    run(main)


def test_a_broken_pair_is_routed_around() -> None:
    """The link between two hops dies while both live: whoever can be reached takes over."""

    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            out = await room.ask(
                9, GenerationRequest(PROMPT, 24), on_token=room.at(5, lambda _: room.net.cut(node_id(1), node_id(2)), 0)
            )
            assert out.tokens == reference(PROMPT, 24, LAYERS)
            assert out.worst_stall_s < 3.0

    run(main)


def test_the_exit_cannot_reach_the_entry() -> None:
    """No link between exit and entry: the reply travels back along the chain."""

    async def main() -> None:
        async with open_room() as room:
            for number, layers in enumerate((LayerRange(0, 6), LayerRange(6, 12)), 1):
                await room.add(number, layers)
            room.net.forbid(node_id(1), node_id(9))
            await room.add(9, None)
            room.net.forbid(node_id(9), node_id(2))
            out = await room.ask(9, GenerationRequest(PROMPT, 4, deadline_s=5.0))
            assert out.tokens == reference(PROMPT, 4, LAYERS)

    run(main)


def test_draining_hands_over_without_a_stall() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)

            def on_token(count: int) -> None:
                if count == 10:
                    room.nodes[2].draining = True
                    room.publish()

            out = await room.ask(9, GenerationRequest(PROMPT, 64), on_token=on_token)
            assert out.tokens == reference(PROMPT, 64, LAYERS)
            assert out.finished is not None
            (recovery,) = out.finished.recoveries
            assert (recovery.reason, recovery.from_node, recovery.to_node) == ("drain", node_id(2), node_id(5))
            assert recovery.replayed_tokens <= len(PROMPT) + 64
            assert out.worst_stall_s < 0.05
            assert room.nodes[2].service.sessions == 0
            await room.quiet()

    run(main)


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_evicted_state_is_made_again(victim: int) -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)

            def on_token(count: int) -> None:
                if count % 9 == 0:
                    engine = room.nodes[victim].engine
                    assert engine is not None
                    for key in list(engine._sessions._states):
                        engine.evict(*key)

            out = await room.ask(9, GenerationRequest(PROMPT, 40), on_token=on_token)
            assert out.tokens == reference(PROMPT, 40, LAYERS)
            assert out.worst_stall_s < 0.2

    run(main)


def test_the_entry_was_paused() -> None:
    """Nobody is blamed for silence that was ours."""

    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            out = Outcome()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ask_into, room, PROMPT, out)
                await trio.sleep(0.03)
                room.net.freeze(node_id(9))
                await trio.sleep(0.4)
                room.net.thaw(node_id(9))
            assert out.tokens == reference(PROMPT, 24, LAYERS)
            assert out.finished is not None
            assert out.finished.recoveries == ()

    run(main)


def _strike(room: Room, how: str, victim: int) -> None:
    if how == "kill":
        room.kill(victim)
    else:
        room.net.freeze(node_id(victim))


def _thaw_all(room: Room) -> None:
    for node in room.nodes.values():
        room.net.thaw(node.id)


def _slow(room: Room, number: int, forward_s: float) -> None:
    engine = room.nodes[number].engine
    assert engine is not None
    engine.step_ms = forward_s * 1000.0 * LAYERS / 4


async def _ask_into(room: Room, prompt: tuple[int, ...], out: Outcome) -> None:
    await room.ask(9, GenerationRequest(prompt, 24), outcome=out)


def test_a_stage_that_left_keeps_nothing_of_who_still_came() -> None:
    """Its refusal goes to the entry on a stream of its own, which nothing but the entry's word could end."""

    async def main() -> None:
        async with open_room() as room:
            await room.add(1, LayerRange(0, 6))
            await room.add(2, LayerRange(6, LAYERS))
            await room.add(9, None)
            believed = room.directory
            room.kill(2)
            await room.add(2, None, epoch=2)
            room.directory = believed
            with pytest.raises(StageUnavailable):
                await room.ask(9, GenerationRequest(PROMPT, 8))
            await room.quiet()

    run(main)


def test_a_refusal_that_comes_too_late_keeps_no_stream_open() -> None:
    async def main() -> None:
        async with open_room() as room:
            await room.add(1, LayerRange(0, 6))
            await room.add(9, None)
            link = await room.nodes[1].links.get(node_id(9))
            late = Lost(SessionId("0" * 32), 1, node_id(1), LayerRange(0, 6), Why.STALE, "gone")
            stream = await link.open(to_wire(late))
            with trio.fail_after(5.0):
                assert await stream.receive() is None
            await room.quiet()

    run(main)


def test_an_old_route_that_is_fallen_back_on_goes_on_without_another_stall() -> None:
    """The hops before its slow one have seen a later attempt, and take no step of an earlier one any more."""

    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            for number in (4, 5):
                room.nodes[number].admitted = False
            out = Outcome()

            async def trouble() -> None:
                while len(out.tokens) < 10:
                    await trio.sleep(0.001)
                room.net.freeze(node_id(3))
                room.net.freeze(node_id(6))
                while not any(kind == "failover" for kind, _ in room.notices):
                    await trio.sleep(0.001)
                room.nodes[3].draining = True  # whoever drains goes on with what it has
                room.publish()
                room.kill(6)
                await trio.sleep(0.1)
                room.net.thaw(node_id(3))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trouble)
                await room.ask(9, GenerationRequest(PROMPT, 40), outcome=out)
            assert out.tokens == reference(PROMPT, 40, LAYERS)
            stalls = [b - a for a, b in zip(out.times, out.times[1:], strict=False) if b - a > 0.1]
            assert len(stalls) == 1, stalls

    run(main)


def test_an_entry_keeps_its_streams_when_its_own_layers_are_replaced() -> None:
    """What the exit says may be on the way when they are, on a wire that is slower than the rest of the route."""

    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            pass_between = room.net.pass_between

            async def pass_slowly(a: NodeId, b: NodeId) -> None:
                if {a, b} == {node_id(1), node_id(3)}:
                    await trio.sleep(0.03)
                await pass_between(a, b)

            room.net.pass_between = pass_slowly  # type: ignore[method-assign] # one pair is far apart
            out = Outcome()

            def on_token(count: int) -> None:
                if count == 10:
                    _slow(room, 1, 8.0)

            await room.ask(1, GenerationRequest(PROMPT, 40), on_token=on_token, outcome=out)
            assert out.tokens == reference(PROMPT, 40, LAYERS)
            stalls = [b - a for a, b in zip(out.times, out.times[1:], strict=False) if b - a > 0.3]
            assert len(stalls) == 1, stalls

    run(main)
