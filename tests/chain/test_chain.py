"""The chain end to end: services, fake links, hash engines; equality with the undisturbed answer is the oracle."""

from __future__ import annotations

import pytest
import trio

from meshd.chain.codec import to_wire
from meshd.chain.request import Finished, GenerationRequest, Started, Tokens
from meshd.errors import Busy, CallerError, ContextLengthExceeded, DeadlineExceeded, NotReady, StageUnavailable
from meshd.inference.engine import Sampling
from meshd.inference.hash_stage import reference
from meshd.vocabulary import Hop, LayerRange
from tests.chain.room import DIGEST, LAYERS, Outcome, Room, node_id, open_room, run, three_stages
from tests.chain.steps import STEP, changed

PROMPT = tuple(b"The capital of France is")
LONG = tuple(i % 251 for i in range(1500))


@pytest.mark.parametrize("entry", [1, 3, 9])
def test_answer_equals_the_reference(entry: int) -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            out = await room.ask(entry, GenerationRequest(PROMPT, 64))
            assert out.tokens == reference(PROMPT, 64, LAYERS)
            assert out.finished is not None
            assert out.finished.reason == "length"
            assert out.finished.recoveries == ()
            assert [hop.node_id for hop in out.finished.route] == [node_id(1), node_id(2), node_id(3)]
            assert out.finished.timings.ttft_ms <= out.finished.timings.total_ms
            await room.quiet()

    run(main)


def test_events_come_in_order() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            async with room.nodes[9].service.generate(GenerationRequest(PROMPT, 3)) as events:
                kinds = [type(event) async for event in events]
            assert kinds == [Started, Tokens, Tokens, Tokens, Finished]

    run(main)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, seed=11),
        Sampling(temperature=0.7, seed=12, presence_penalty=0.5),
        Sampling(logprobs=3),
    ],
)
def test_sampling_travels(sampling: Sampling) -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            out = await room.ask(9, GenerationRequest(PROMPT, 24, sampling=sampling))
            assert out.tokens == reference(PROMPT, 24, LAYERS, sampling=sampling)

    run(main)


@pytest.mark.parametrize("sticky", [True, False])
def test_resume_sends_only_what_follows(sticky: bool) -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            want = reference(PROMPT, 20, LAYERS)
            request = GenerationRequest(PROMPT, 20, forced=tuple(want[:7]), sticky=sticky)
            assert (await room.ask(9, request)).tokens == want[7:]
            complete = GenerationRequest(PROMPT, 20, forced=tuple(want), sticky=sticky)
            out = await room.ask(9, complete)
            assert out.tokens == []
            assert out.finished is not None
            await room.quiet()

    run(main)


def test_stateless_equals_sticky() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            out = await room.ask(9, GenerationRequest(PROMPT, 8, sticky=False))
            assert out.tokens == reference(PROMPT, 8, LAYERS)
            await room.quiet()

    run(main)


def test_end_token_ends_the_answer() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            want = reference(PROMPT, 30, LAYERS)
            first = want.index(want[9])
            out = await room.ask(9, GenerationRequest(PROMPT, 30, eos_ids=frozenset({want[9]})))
            assert out.tokens == want[: first + 1]
            assert out.finished is not None
            assert out.finished.reason == "stop"

    run(main)


def test_a_token_costs_one_message_a_hop() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)

            async def sent(tokens: int) -> int:
                before = room.net.sent.total()
                await room.ask(1, GenerationRequest(PROMPT, tokens))
                await room.quiet()
                return room.net.sent.total() - before

            few, many = await sent(4), await sent(14)
            assert many - few == 10 * 3  # 1 -> 2, 2 -> 3, 3 -> 1

    run(main)


def test_stages_work_on_a_prompt_at_the_same_time() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room, step_ms=3000.0)  # a second per stage and forward
            out = await room.ask(9, GenerationRequest(LONG, 1))
            assert out.tokens == reference(LONG, 1, LAYERS)
            chunks, stages = 12, 3
            assert out.finished is not None
            assert out.finished.timings.ttft_ms / 1000.0 < chunks + stages + 1  # one by one: 36 s

    run(main)


@pytest.mark.parametrize("chosen", [(7, 3), (1, 7)])
def test_a_wide_node_serves_part_of_what_it_holds(chosen: tuple[int, int]) -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            await room.add(7, LayerRange(0, 12))
            await room.add(8, LayerRange(4, 12))
            ids = tuple(node_id(n) for n in chosen)
            if chosen == (7, 3):
                room.nodes[7].layers = LayerRange(0, 8)  # what it tells of itself; it holds more
                room.publish()
            out = await room.ask(9, GenerationRequest(PROMPT, 16, pinned=ids))
            assert out.tokens == reference(PROMPT, 16, LAYERS)

    run(main)


def test_one_node_may_serve_two_ranges_of_a_session() -> None:
    async def main() -> None:
        async with open_room() as room:
            await room.add(1, LayerRange(0, 4))
            await room.add(2, LayerRange(4, 8))
            await room.add(3, LayerRange(8, 12))
            await room.add(8, LayerRange(4, 12))
            pinned = (node_id(1), node_id(2), node_id(8))
            out = await room.ask(1, GenerationRequest(PROMPT, 24, pinned=pinned), on_token=room.at(9, room.kill, 2))
            assert out.tokens == reference(PROMPT, 24, LAYERS)
            assert out.finished is not None
            layers = [(hop.node_id, hop.layers) for hop in out.finished.route]
            assert layers[1:] == [(node_id(8), LayerRange(4, 8)), (node_id(8), LayerRange(8, 12))]
            await room.quiet()

    run(main)


def test_concurrent_requests_do_not_mix() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            outs = [Outcome() for _ in range(8)]
            prompts = [(*PROMPT, i) for i in range(8)]
            async with trio.open_nursery() as nursery:
                for out, prompt in zip(outs, prompts, strict=True):
                    nursery.start_soon(_ask_into, room, prompt, out)
                await trio.sleep(0.05)
                room.kill(2)
            for out, prompt in zip(outs, prompts, strict=True):
                assert out.tokens == reference(prompt, 32, LAYERS)
            await room.quiet()

    run(main)


async def _ask_into(room: Room, prompt: tuple[int, ...], out: Outcome) -> None:
    await room.ask(9, GenerationRequest(prompt, 32), outcome=out)


# --- what cannot be answered ------------------------------------------------------------------------------------------


def test_no_replica_is_said_at_once_and_cured_at_once() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            for number in (2, 5):
                room.kill(number)
            began = trio.current_time()
            with pytest.raises(StageUnavailable) as caught:
                await room.ask(9, GenerationRequest(PROMPT, 4))
            assert caught.value.missing == [LayerRange(4, 8)]
            assert trio.current_time() - began < 1.0
            for number in (2, 5):
                room.forget(number)
            with pytest.raises(StageUnavailable):
                await room.ask(9, GenerationRequest(PROMPT, 4))
            await room.add(2, LayerRange(4, 8), epoch=2)
            assert (await room.ask(9, GenerationRequest(PROMPT, 4))).tokens == reference(PROMPT, 4, LAYERS)
            await room.quiet()

    run(main)


def test_both_replicas_die_mid_answer() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            out = Outcome()

            def on_token(count: int) -> None:
                if count == 9:
                    room.kill(2)
                    room.kill(5)

            with pytest.raises(StageUnavailable):
                await room.ask(9, GenerationRequest(PROMPT, 64), on_token=on_token, outcome=out)
            assert out.tokens == reference(PROMPT, 9, LAYERS)
            assert trio.current_time() - out.times[-1] < 1.0
            await room.quiet()

    run(main)


def test_layers_that_are_being_proven_are_waited_for() -> None:
    async def main() -> None:
        async with open_room() as room:
            await room.add(1, LayerRange(0, 12))
            room.nodes[1].admitted = None
            room.publish()
            out = Outcome()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ask_first, room, out)
                await trio.sleep(0.5)
                room.nodes[1].admitted = True
                room.publish()
            assert out.tokens == reference(PROMPT, 4, LAYERS)
            room.nodes[1].admitted = None
            room.publish()
            with pytest.raises(StageUnavailable) as caught:
                await room.ask(1, GenerationRequest(PROMPT, 4))
            assert caught.value.pending

    run(main)


async def _ask_first(room: Room, out: Outcome) -> None:
    await room.ask(1, GenerationRequest(PROMPT, 4), outcome=out)


def test_a_dead_replica_first_in_the_pool() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            room.kill(2)
            for _ in range(3):
                out = await room.ask(9, GenerationRequest(PROMPT, 12))
                assert out.tokens == reference(PROMPT, 12, LAYERS)
                assert out.finished is not None
                assert out.finished.timings.total_ms < 700.0

    run(main)


def test_a_lost_node_is_tried_again_when_there_is_nobody_else() -> None:
    async def main() -> None:
        async with open_room() as room:
            for number, layers in enumerate((LayerRange(0, 6), LayerRange(6, 12)), 1):
                await room.add(number, layers)

            async def blink() -> None:
                room.kill(2)
                await room.restart(2)

            async with trio.open_nursery() as nursery:
                out = await room.ask(
                    1, GenerationRequest(PROMPT, 24), on_token=room.at(7, lambda _: nursery.start_soon(blink), 0)
                )
            assert out.tokens == reference(PROMPT, 24, LAYERS)
            assert out.finished is not None
            assert [r.reason for r in out.finished.recoveries] == ["reset"]

    run(main)


def test_deadlines() -> None:
    async def main() -> None:
        async with open_room() as room:
            await room.add(1, LayerRange(0, 12), step_ms=2000.0)
            began = trio.current_time()
            with pytest.raises(DeadlineExceeded, match=r"after [12] of 64 tokens: waiting for layers 0\.\.12"):
                await room.ask(1, GenerationRequest(PROMPT, 64, deadline_s=5.0))
            assert trio.current_time() - began <= 6.0
            with pytest.raises(DeadlineExceeded, match=r"no token for 1\.0 s: waiting for layers 0\.\.12"):
                await room.ask(1, GenerationRequest(PROMPT, 64, deadline_s=None, token_deadline_s=1.0))
            await room.quiet()

    run(main)


def test_no_room_for_a_session_is_busy() -> None:
    async def main() -> None:
        async with open_room() as room:
            await room.add(1, LayerRange(0, 6))
            await room.add(2, LayerRange(6, 12), kv_bytes=64 * 6 * 100)
            with pytest.raises(Busy):
                await room.ask(1, GenerationRequest(PROMPT, 200))
            await room.add(3, LayerRange(6, 12))
            out = await room.ask(1, GenerationRequest(PROMPT, 200))
            assert out.tokens == reference(PROMPT, 200, LAYERS)
            assert out.finished is not None
            assert [r.reason for r in out.finished.recoveries] == ["full"]
            await room.quiet()

    run(main)


def test_layers_that_others_have_no_room_for_are_not_said_to_be_nowhere() -> None:
    """The last holder that was tried had died; the one before it is there, and full."""

    async def main() -> None:
        async with open_room() as room:
            await room.add(1, LayerRange(0, 6))
            await room.add(2, LayerRange(6, 12), kv_bytes=64 * 6 * 100)
            await room.add(3, LayerRange(6, 12))
            room.kill(3)
            with pytest.raises(Busy):
                await room.ask(1, GenerationRequest(PROMPT, 200))
            room.kill(2)
            with pytest.raises(StageUnavailable):
                await room.ask(1, GenerationRequest(PROMPT, 200))

    run(main)


def test_requests_that_cannot_be() -> None:
    async def main() -> None:
        async with open_room() as room:
            await room.add(1, LayerRange(0, 12))
            for request, error in (
                (GenerationRequest((), 4), CallerError),
                (GenerationRequest(PROMPT, 0), CallerError),
                (GenerationRequest((256,), 4), CallerError),
                (GenerationRequest((1,) * 8192, 4), ContextLengthExceeded),
            ):
                with pytest.raises(error):
                    await room.ask(1, request)
            out = await room.ask(1, GenerationRequest((1,) * 8190, 100))
            assert len(out.tokens) == 2

    run(main)


def test_a_service_that_does_not_run_says_so() -> None:
    async def main() -> None:
        async with open_room() as room:
            node = await room.add(1, LayerRange(0, 12))
            room.kill(1)
            await trio.testing.wait_all_tasks_blocked()
            node.service._entry._nursery = None
            with pytest.raises(NotReady):
                await room.ask(1, GenerationRequest(PROMPT, 4))

    run(main)


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_every_hop() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            async with room.nodes[9].service.generate(GenerationRequest(PROMPT, 500)) as events:
                seen = 0
                async for event in events:
                    seen += isinstance(event, Tokens)
                    if seen == 5:
                        break
            await trio.sleep(1.0)
            for node in room.nodes.values():
                assert node.service.sessions == 0
                assert node.service.streams == 0
                assert node.engine is None or node.engine.health().sessions == 0

    run(main)


def test_hops_forget_a_session_whose_entry_died() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ask_until_killed, room)
                await trio.sleep(0.2)
                assert room.nodes[1].service.sessions == 1
                room.kill(9)
                nursery.cancel_scope.cancel()
            await trio.sleep(1.0)
            assert (room.nodes[1].service.sessions, room.nodes[1].service.running) == (1, 0)  # nobody waits for it
            await trio.sleep(34.0)
            assert room.nodes[1].service.sessions == 0  # it had a stream with the entry
            await trio.sleep(30.0)
            for number in (2, 3):
                assert room.nodes[number].service.sessions == 0
                engine = room.nodes[number].engine
                assert engine is not None
                assert engine.health().sessions == 0

    run(main)


async def _ask_until_killed(room: Room) -> None:
    await room.ask(9, GenerationRequest(PROMPT, 5000))


def test_a_step_of_a_request_that_this_node_does_not_run_any_more_leaves_nothing() -> None:
    """It was on the way when the entry ended, or was started anew: nobody waits for what would come of it."""

    async def main() -> None:
        async with open_room() as room:
            await three_stages(room, step_ms=0.0)
            route = (Hop(node_id(3), LayerRange(8, LAYERS), 1),)
            step = changed(
                STEP,
                digest=DIGEST,
                origin=LayerRange(4, 8),
                entry=node_id(3),
                route=route,
                start=0,
                n=1,
                rows=bytes(16),
            )
            link = await room.nodes[2].links.get(node_id(3))
            await link.open(to_wire(step))
            for _ in range(200):  # not a wait: a node that talks to itself for ever would stop the test's clock
                await trio.lowlevel.checkpoint()
            assert room.nodes[3].service.sessions == 0
            assert room.nodes[3].service.streams == 0

    run(main)


def test_a_client_that_leaves_at_once_leaves_nothing_in_the_engine() -> None:
    """Step and end come together: the computation has not had its first turn when the session is over."""

    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            for prompt in (PROMPT, LONG):  # of a long one it is asked first what is kept of it
                async with room.nodes[1].service.generate(GenerationRequest(prompt, 5)):
                    pass
                await trio.sleep(1.0)
                assert [node.engine.health().sessions for node in room.nodes.values() if node.engine] == [0] * 6

    run(main)
