"""Which beginnings are kept, for whom, and for how long."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from meshd.inference.prefix_cache import BLOCK_TOKENS, Chain, PrefixCache, chain_of, usable_tokens

FACTS = ("digest", "arith", "0..4", "tenant")


def pack(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def chain(*blocks: int, tail: tuple[int, ...] = (), facts: tuple[str, ...] = FACTS) -> Chain:
    """Each number is a block of 32 such ids; ``tail`` are ids that do not fill one."""
    return chain_of(facts, pack([*(block for block in blocks for _ in range(BLOCK_TOKENS)), *tail]))


def cache_of(budget: int = 100, ttl_s: float = 10.0) -> PrefixCache[str]:
    return PrefixCache(budget, ttl_s)


def test_the_longest_common_beginning_is_found() -> None:
    cache = cache_of()
    cache.keep(chain(1, 2, 3), "123", 30, 0.0)
    cache.keep(chain(1, 2, 4, 5), "1245", 40, 0.0)
    assert cache.find(chain(1, 2, 4, 9), 1.0) == ("1245", 3 * BLOCK_TOKENS)
    assert cache.find(chain(1, 2, 3), 1.0) == ("123", 3 * BLOCK_TOKENS)
    found = cache.find(chain(1, 7), 1.0)
    assert found is not None
    assert found[1] == BLOCK_TOKENS
    assert cache.find(chain(2, 3), 1.0) is None


def test_nothing_passes_between_tenants_models_ranges_or_kernels() -> None:
    cache = cache_of()
    cache.keep(chain(1, 2), "mine", 20, 0.0)
    for place in range(len(FACTS)):
        others = (*FACTS[:place], "other", *FACTS[place + 1 :])
        assert cache.find(chain(1, 2, facts=others), 0.0) is None
    assert cache.find(chain(1, 2), 0.0) is not None


def test_facts_do_not_run_into_each_other() -> None:
    assert chain(1, facts=("a", "bc")) != chain(1, facts=("ab", "c"))


def test_only_whole_blocks_of_another_prompt_all_of_the_same_and_never_the_last_token() -> None:
    cache = cache_of()
    cache.keep(chain(1, 2, tail=(3, 4)), "1234", 20, 0.0)
    assert cache.find(chain(1, 2, tail=(3, 4)), 0.0) == ("1234", 66)
    for other in (
        chain(1, 2),
        chain(1, 2, tail=(3,)),
        chain(1, 2, tail=(3, 5)),
        chain(1, 2, tail=(3, 4, 4)),
        chain(1, 2, 3),
    ):
        assert cache.find(other, 0.0) == ("1234", 64)
    assert cache.find(chain(tail=(1,) * 31), 0.0) is None
    assert [usable_tokens(pack([1] * n)) for n in (0, 1, 32, 33, 64, 65)] == [0, 0, 31, 32, 63, 64]


def test_a_longer_prompt_replaces_the_one_it_continues() -> None:
    cache = cache_of()
    cache.keep(chain(1, 2), "12", 20, 0.0)
    assert not cache.wants(chain(1, 2), 20, 0.0)
    assert cache.wants(chain(1, 2, 3), 30, 0.0)
    cache.keep(chain(1, 2, 3), "123", 30, 0.0)
    assert (len(cache), cache.used_bytes) == (1, 30)
    assert not cache.wants(chain(1, 2), 20, 0.0), "it is a beginning of what is kept"
    cache.keep(chain(1, 2, 3, tail=(4,)), "1234", 31, 0.0)
    cache.keep(chain(1, 2, 3, tail=(5,)), "1235", 31, 0.0)
    assert (len(cache), cache.used_bytes) == (1, 31), "of the same blocks one is kept"
    assert cache.find(chain(1, 2, 3, tail=(4,)), 0.0) == ("1235", 96)
    cache.keep(chain(1, 2, 3, 4), "12344", 40, 0.0)
    assert (len(cache), cache.used_bytes) == (1, 40)


def test_what_was_used_longest_ago_goes_first_and_age_ends_all() -> None:
    cache = cache_of(budget=50)
    cache.keep(chain(1), "1", 25, 0.0)
    cache.keep(chain(2), "2", 25, 1.0)
    assert cache.find(chain(1), 2.0) is not None
    cache.keep(chain(3), "3", 25, 3.0)
    assert cache.find(chain(2), 3.0) is None
    assert cache.find(chain(1), 4.0) is not None
    cache.expire(12.9)
    assert len(cache) == 2
    cache.expire(13.5)
    assert (len(cache), cache.used_bytes) == (1, 25)
    cache.expire(14.0)
    assert (len(cache), cache.used_bytes) == (0, 0)


def test_off_keeps_nothing() -> None:
    assert not cache_of(budget=0).wants(chain(1), 1, 0.0)
    assert not cache_of(budget=10).wants(chain(1), 11, 0.0)
    assert not cache_of().wants(Chain(), 1, 0.0)


@given(st.integers(0, 120))
def test_release_gives_at_least_what_is_asked_if_there_is_as_much(wanted: int) -> None:
    cache = cache_of()
    for block in range(4):
        cache.keep(chain(block), str(block), 20, float(block))
    given_back = cache.release(wanted)
    assert given_back >= min(wanted, 80)
    assert given_back < wanted + 20
    assert cache.used_bytes == 80 - given_back


TAILS = st.lists(st.integers(0, 1), max_size=2).map(tuple)


@dataclass(frozen=True)
class Kept:
    blocks: tuple[int, ...]
    tail: tuple[int, ...]


class Machine(RuleBasedStateMachine):
    """Whatever is found is a state of exactly those ids; sizes add up."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: PrefixCache[Kept] = PrefixCache(60, 20.0)
        self.now = 0.0

    @rule(blocks=st.lists(st.integers(0, 2), max_size=5), tail=TAILS)
    def keep(self, blocks: list[int], tail: tuple[int, ...]) -> None:
        self.now += 1.0
        size, wanted = 5 * len(blocks) + len(tail), chain(*blocks, tail=tail)
        if self.cache.wants(wanted, size, self.now):
            self.cache.keep(wanted, Kept(tuple(blocks), tail), size, self.now)
            assert self.cache.find(wanted, self.now) == (Kept(tuple(blocks), tail), wanted.tokens)

    @rule(blocks=st.lists(st.integers(0, 2), max_size=6), tail=TAILS)
    def find(self, blocks: list[int], tail: tuple[int, ...]) -> None:
        self.now += 1.0
        found = self.cache.find(chain(*blocks, tail=tail), self.now)
        if found is not None:
            kept, tokens = found
            n = tokens // BLOCK_TOKENS
            assert 0 <= n <= len(blocks)
            assert tokens > 0
            assert list(kept.blocks[:n]) == blocks[:n]
            assert tokens == n * BLOCK_TOKENS or (list(kept.blocks), kept.tail) == (blocks, tail)

    @rule(size=st.integers(0, 70))
    def release(self, size: int) -> None:
        self.cache.release(size)

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.cache.expire(self.now)

    @invariant()
    def bounded(self) -> None:
        assert 0 <= self.cache.used_bytes <= 60
        assert (self.cache.used_bytes == 0) == (len(self.cache) == 0)
        assert not self.cache._holders or len(self.cache)
        assert len(self.cache._full) <= len(self.cache)


TestMachine = Machine.TestCase
