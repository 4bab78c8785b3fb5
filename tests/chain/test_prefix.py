"""Prompts that were computed before, through whole chains: fewer rows, the same answers, nobody else's."""

from __future__ import annotations

import pytest
import trio

from meshd.chain.request import GenerationRequest
from meshd.inference.hash_engine import HashEngine
from meshd.inference.hash_stage import reference
from meshd.vocabulary import LayerRange
from tests.chain.room import LAYERS, Outcome, Room, node_id, open_room, run, three_stages

PROMPT = tuple(i % 251 for i in range(512))
CHAT = tuple(7 * i % 250 for i in range(1000))


async def ask(room: Room, prompt: tuple[int, ...], n: int = 8, *, tenant: str = "a", entry: int = 9) -> Outcome:
    """The answer, which is always the right one."""
    out = await room.ask(entry, GenerationRequest(prompt, n, tenant=tenant))
    assert out.tokens == reference(prompt, n, LAYERS)
    assert out.finished is not None
    assert all(hop.cached_tokens in (0, out.finished.cached_tokens) for hop in out.finished.route)
    await room.quiet()
    return out


def cached(out: Outcome) -> int:
    assert out.finished is not None
    return out.finished.cached_tokens


def rows_sent(room: Room, kinds: tuple[str, ...] = ("chain.step", "chain.fill")) -> int:
    """Bytes of rows that went over links so far."""
    return sum(len(message.body) for _, _, message in room.net.log if message.kind in kinds)


def test_the_same_prompt_again_is_neither_sent_nor_computed() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            assert cached(await ask(room, PROMPT, 1)) == 0
            cold = rows_sent(room)
            out = await ask(room, PROMPT, 1)
            assert cached(out) == 511, "the last token is computed: it draws the answer's first one"
            assert rows_sent(room) - cold < cold / 100
            assert out.finished is not None
            assert [hop.cached_tokens for hop in out.finished.route] == [511] * 3

    run(main)


def test_a_second_turn_computes_only_what_is_new() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            first = await ask(room, CHAT, 64)
            turn = (*CHAT, *first.tokens, *b"And then?")
            out = await ask(room, turn, 16)
            assert cached(out) == len(CHAT) // 32 * 32, (
                "positions of the answer are not reused: they had other roundings"
            )
            assert cached(await ask(room, turn, 16)) == len(turn) - 1, "the very same prompt is kept to its end"

    run(main)


def test_another_tenant_is_cold() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            await ask(room, PROMPT, tenant="a")
            assert cached(await ask(room, PROMPT, tenant="b")) == 0
            assert cached(await ask(room, PROMPT, tenant="a")) == 511
            assert cached(await ask(room, PROMPT, tenant="")) == 0
            assert cached(await ask(room, PROMPT, tenant="a", entry=1)) == 511, "whichever entry it comes through"

    run(main)


def test_a_short_prompt_asks_nobody() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            for _ in range(2):
                assert cached(await ask(room, PROMPT[:63])) == 0
            assert not any(message.kind == "chain.open" for _, _, message in room.net.log)
            await ask(room, PROMPT[:65])
            asks = [to for _, to, message in room.net.log if message.kind == "chain.open"]
            assert sorted(asks) == [node_id(1), node_id(2), node_id(3)], "one message a hop"

    run(main)


def test_the_chain_begins_where_all_hops_agree() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            await ask(room, PROMPT)
            room.kill(2)
            await room.restart(2)
            assert cached(await ask(room, PROMPT)) == 0, "a node that has restarted holds nothing"
            assert cached(await ask(room, PROMPT)) == 511

    run(main)


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_death_after_a_warm_start_is_recovered_from(victim: int) -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            await ask(room, PROMPT, 40)
            out = await room.ask(9, GenerationRequest(PROMPT, 40, tenant="a"), on_token=room.at(10, room.kill, victim))
            assert out.tokens == reference(PROMPT, 40, LAYERS)
            assert out.finished is not None
            (recovery,) = out.finished.recoveries
            assert recovery.replayed_tokens >= len(PROMPT), "the newcomer is filled from logs that were copied too"
            hops = {hop.node_id: hop.cached_tokens for hop in out.finished.route}
            assert hops[recovery.to_node] == 0
            assert sorted(hops.values()) == [0, 511, 511]

    run(main)


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_hop_that_does_not_answer_delays_and_no_more(victim: int) -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            await ask(room, PROMPT, 4)
            room.net.freeze(node_id(victim))
            out = await room.ask(9, GenerationRequest(PROMPT, 4, tenant="a"))
            assert out.tokens == reference(PROMPT, 4, LAYERS)
            room.net.thaw(node_id(victim))
            await room.quiet()

    run(main)


def test_a_dead_hop_is_found_out_by_asking() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            for victim in (1, 2, 3):
                room.kill(victim)
                out = await room.ask(9, GenerationRequest(PROMPT, 4, tenant="a"))
                assert out.tokens == reference(PROMPT, 4, LAYERS)

    run(main)


def test_a_client_that_leaves_while_hops_are_asked_leaves_nothing() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            await ask(room, PROMPT, 4)
            with trio.move_on_after(0.0006):
                await room.ask(9, GenerationRequest(PROMPT, 4, tenant="a"))
            await room.quiet()

    run(main)


def test_sessions_come_before_what_is_kept() -> None:
    """Memory for one session and a half: what is kept goes, nobody is refused."""

    async def main() -> None:
        async with open_room() as room:
            kv_bytes = 64 * LAYERS * 1200
            await room.add(1, LayerRange(0, LAYERS), kv_bytes=kv_bytes)
            for i in range(4):
                other = tuple((i + 1) * j % 251 for j in range(700))
                assert cached(await ask(room, other, entry=1)) == 0
            engine = room.nodes[1].engine
            assert isinstance(engine, HashEngine)
            assert engine.health().kv_used_bytes == 0

    run(main)


def test_off_is_off() -> None:
    async def main() -> None:
        async with open_room() as room:
            room.prefix_bytes = 0
            await three_stages(room)
            for _ in range(2):
                assert cached(await ask(room, PROMPT)) == 0

    run(main)


def test_stateless_requests_keep_nothing() -> None:
    async def main() -> None:
        async with open_room() as room:
            await three_stages(room)
            for _ in range(2):
                out = await room.ask(9, GenerationRequest(PROMPT, 3, sticky=False))
                assert out.tokens == reference(PROMPT, 3, LAYERS)
                assert cached(out) == 0
            assert not any(message.kind == "chain.open" for _, _, message in room.net.log)

    run(main)
