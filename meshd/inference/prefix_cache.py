"""Prompts that were computed before: which of their beginnings are kept, and for whom. Pure.

An entry is the state of one prompt, and answers for each of its beginnings of whole blocks of 32 positions too: ``chain_of``
turns a prompt into one key per block and one for all of it, each over everything before it, the model's digest, the range, the
arithmetic and the tenant. So another model, range, kernel or tenant never meets the same key. Only prompt positions are ever
kept: those of an answer were computed one row at a time, with other roundings than a later prompt would give them. A block that
is full was computed from itself and what lies before it, whatever followed, and one that is not full is only used for the very
same prompt, so what is copied equals what would be computed, bit for bit. That is so while the stages before are of one
arithmetic: in a mixed room the residuals that came then may differ in last bits from those now.

Of prompts with the same whole blocks one is kept, the newest: a longer one takes the place of those that it continues.

Owns the order of eviction (used longest ago first; unused for ``ttl_s``) and the sum of sizes. Must not know tensors, sessions,
clocks: states are whatever is given. Units: bytes, tokens, seconds. Never raises.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

BLOCK_TOKENS: Final = 32  # the grid of block arithmetic
ID_BYTES: Final = 4

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class Chain:
    """The keys of a prompt of ``tokens``: one per block of it, the last of which need not be full."""

    keys: tuple[bytes, ...] = ()
    tokens: int = 0

    def tokens_at(self, index: int) -> int:
        """How long the beginning is that key ``index`` stands for."""
        return min((index + 1) * BLOCK_TOKENS, self.tokens)

    @property
    def full(self) -> tuple[bytes, ...]:
        """The keys of whole blocks."""
        return self.keys[: self.tokens // BLOCK_TOKENS]


def chain_of(facts: tuple[str, ...], ids: bytes) -> Chain:
    """The chain of ``ids`` (int32). ``facts`` are what else the rows depend on, and whose they are."""
    digest = hashlib.sha256(repr(facts).encode())
    keys = []
    step = BLOCK_TOKENS * ID_BYTES
    for at in range(0, len(ids), step):
        digest.update(ids[at : at + step])
        keys.append(digest.digest())
    return Chain(tuple(keys), len(ids) // ID_BYTES)


def usable_tokens(ids: bytes) -> int:
    """How many positions need not be sent: the last id's row is, for it draws the first token."""
    return max(0, len(ids) // ID_BYTES - 1)


@dataclass(slots=True)
class _Entry(Generic[Kept]):
    chain: Chain
    state: Kept
    size_bytes: int
    used_at: float


class PrefixCache(Generic[Kept]):
    """States by prompt. ``budget_bytes`` 0 keeps nothing."""

    def __init__(self, budget_bytes: int, ttl_s: float) -> None:
        self.used_bytes = 0
        self.evicted = 0
        self._budget_bytes = budget_bytes
        self._ttl_s = ttl_s
        self._entries: OrderedDict[bytes, _Entry[Kept]] = OrderedDict()  # by the last key; used longest ago first
        self._holders: dict[bytes, dict[bytes, None]] = {}  # a beginning -> the entries that have it
        self._full: dict[bytes, bytes] = {}  # the last whole block of an entry -> the entry

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keeps(self) -> bool:
        """False where nothing is ever kept."""
        return self._budget_bytes > 0

    def find(self, chain: Chain, now: float) -> tuple[Kept, int] | None:
        """The state that has the longest beginning of ``chain``, and how many tokens of it are the same."""
        for index in reversed(range(len(chain.keys))):
            holders = self._holders.get(chain.keys[index])
            if holders:
                entry = self._use(next(reversed(holders)), now)
                return entry.state, chain.tokens_at(index)
        return None

    def wants(self, chain: Chain, size_bytes: int, now: float) -> bool:
        """False for what is kept already (then it counts as used) and for what can never fit."""
        if not chain.keys or size_bytes > self._budget_bytes:
            return False
        holders = self._holders.get(chain.keys[-1])
        if holders:
            self._use(next(reversed(holders)), now)
        return not holders

    def keep(self, chain: Chain, state: Kept, size_bytes: int, now: float) -> None:
        """Keep a state that `wants` has asked for; others go as far as needed, shorter ones of the same beginning first."""
        for key in chain.full:
            if key in self._full:
                self._remove(self._full[key])
        self.release(self.used_bytes + size_bytes - self._budget_bytes)
        last = chain.keys[-1]
        self._entries[last] = _Entry(chain, state, size_bytes, now)
        self.used_bytes += size_bytes
        for key in chain.keys:
            self._holders.setdefault(key, {})[last] = None
        if chain.full:
            self._full[chain.full[-1]] = last

    def release(self, size_bytes: int) -> int:
        """Give back at least ``size_bytes`` if there is as much; how many were given."""
        before = self.used_bytes
        while self._entries and before - self.used_bytes < size_bytes:
            self._remove(next(iter(self._entries)))
            self.evicted += 1
        return before - self.used_bytes

    def expire(self, now: float) -> None:
        """Forget what nobody has used for ``ttl_s``."""
        while self._entries:
            key, oldest = next(iter(self._entries.items()))
            if now < oldest.used_at + self._ttl_s:
                return
            self._remove(key)

    def _use(self, key: bytes, now: float) -> _Entry[Kept]:
        entry = self._entries[key]
        entry.used_at = now
        self._entries.move_to_end(key)
        return entry

    def _remove(self, last: bytes) -> None:
        entry = self._entries.pop(last)
        self.used_bytes -= entry.size_bytes
        if entry.chain.full:
            del self._full[entry.chain.full[-1]]
        for key in entry.chain.keys:
            holders = self._holders[key]
            del holders[last]
            if not holders:
                del self._holders[key]
