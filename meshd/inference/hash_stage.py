"""The rehearsal model: layers without weights whose residual is a digest. Pure and synchronous.

Owns the arithmetic (`HashStage`) and the sessions' state (`HashSessions`). Layer i of position p computes

    kv[p], r' = split(H(seed, i, p, kv[p-1], r))

so ``kv[p]`` is a running digest over everything the layer has seen up to p, and the head maps the last residual to one of the
ids 32..126. A skipped, doubled or stale layer, a wrong position or another session's kv therefore changes every later token:
an answer that equals the undisturbed one went through exactly the right layers in exactly the right order.

Invariants: a session's kv and its boundary log (the rows this range sent downstream) have one length and are cut and evicted
together; a run truncates at its start first. Must not know of clocks, sockets, tasks. Sizes are in bytes; a residual row is
16 bytes. Errors: NeedRows, Busy, RangeNotHeld, BadTensor, as `meshd.inference.engine.Engine` says.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from meshd.errors import BadTensor, Busy, NeedRows, RangeNotHeld
from meshd.inference.engine import Choice, Opening, Ran, Run, Sampling
from meshd.inference.hash_draw import RANKS, drawn_rank, logprob
from meshd.inference.prefix_cache import Chain, PrefixCache, chain_of, usable_tokens
from meshd.vocabulary import LayerRange, SessionId

ROW_BYTES: Final = 16
ID_BYTES: Final = 4
VOCABULARY: Final = 256
FIRST_ID: Final = 32  # the head emits printable ASCII only
IDLE_S: Final = 10.0  # a session that ran more recently is never evicted for another one's sake
MAX_ALTERNATIVES: Final = 20


@dataclass(slots=True)
class HashState:
    """One session's state in one range: ``kv[layer][position]`` and the rows sent downstream."""

    kv: list[list[bytes]]
    log: list[bytes] = field(default_factory=list)
    reserved_tokens: int = 0
    used_at: float = 0.0

    def __len__(self) -> int:
        return len(self.log)

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on."""
        if length < len(self.log):
            del self.log[length:]
            for digests in self.kv:
                del digests[length:]

    def copy(self, length: int) -> HashState:
        """The first ``length`` positions."""
        return HashState([digests[:length] for digests in self.kv], self.log[:length])


class HashStage:
    """The arithmetic of one model. Holds constants only."""

    def __init__(self, num_layers: int, seed: int = 0) -> None:
        self.num_layers = num_layers
        self.name = f"hash:{num_layers}:{seed}:"
        base = self.name.encode()
        self._layer = [base + f"layer:{i}:".encode() for i in range(num_layers)]
        self._embed = [blake2b(base + b"embed:%d" % i, digest_size=ROW_BYTES).digest() for i in range(VOCABULARY)]
        self._head = base + b"head:"
        self._draw = base + b"draw:"

    def fresh(self, layers: LayerRange) -> HashState:
        """An empty state for a session that will run ``layers``."""
        return HashState([[] for _ in range(len(layers))])

    def rows_in(self, layers: LayerRange, rows: bytes, n: int) -> list[bytes]:
        """The residuals of ``n`` rows: embedded ids at the model's start. Raises BadTensor."""
        size = ID_BYTES if layers.start == 0 else ROW_BYTES
        if len(rows) != n * size:
            raise BadTensor(f"{len(rows)} bytes are not {n} rows of {size} bytes for layers {layers}")
        if layers.start:
            return [rows[i : i + ROW_BYTES] for i in range(0, len(rows), ROW_BYTES)]
        ids = struct.unpack(f"<{n}i", rows)
        if ids and not 0 <= min(ids) <= max(ids) < VOCABULARY:
            raise BadTensor(f"a token id outside 0..{VOCABULARY - 1}")
        return [self._embed[i] for i in ids]

    def extend(self, state: HashState, layers: LayerRange, rows: list[bytes]) -> None:
        """Run ``rows`` as the positions after the state's end; the outputs are appended to its log."""
        for row in rows:
            position = struct.pack("<i", len(state.log))
            residual = row
            for layer, digests in zip(self._layer[layers.start : layers.end], state.kv, strict=True):
                before = digests[-1] if digests else b""
                both = blake2b(layer + position + before + residual, digest_size=2 * ROW_BYTES).digest()
                digests.append(both[:ROW_BYTES])
                residual = both[ROW_BYTES:]
            state.log.append(residual)

    def choice(self, row: bytes, position: int, sampling: Sampling, history: tuple[int, ...] = ()) -> Choice:
        """The token for ``position`` after ``row``. Penalties make the ids so far part of the draw, as in a real model."""
        seen = struct.pack(f"<{len(history)}i", *history) if sampling.needs_history else b""
        digest = blake2b(self._head + row + seen, digest_size=16).digest()
        greedy = FIRST_ID + int.from_bytes(digest[:4]) % RANKS
        token = greedy
        if sampling.temperature > 0.0:
            key = struct.pack("<qq", sampling.seed & 0x7FFF_FFFF_FFFF_FFFF, position)
            noise = blake2b(self._draw + digest + key, digest_size=8).digest()
            token = _ranked(greedy, drawn_rank(sampling, noise))
        logit = 8.0 + digest[4] / 16.0
        if sampling.logprobs is None:
            return Choice(position, token, greedy, logit)
        wanted = min(sampling.logprobs, MAX_ALTERNATIVES)
        top = tuple((_ranked(greedy, rank), logprob(rank)) for rank in range(wanted))
        return Choice(position, token, greedy, logit, logprob((token - greedy) % RANKS), top)


def _ranked(greedy: int, rank: int) -> int:
    """The id that many ranks behind the greedy one."""
    return FIRST_ID + (greedy - FIRST_ID + rank) % RANKS


class HashSessions:
    """The sessions of one stage under one budget. ``now`` is monotonic seconds, used for eviction order only."""

    def __init__(
        self,
        stage: HashStage,
        held: LayerRange,
        *,
        kv_bytes: int,
        bytes_per_token_layer: int,
        prefixes: PrefixCache[HashState] | None = None,
    ) -> None:
        self.prefixes: PrefixCache[HashState] = PrefixCache(kv_bytes // 2, 3600.0) if prefixes is None else prefixes
        self._prompts: dict[tuple[SessionId, LayerRange], Chain] = {}
        self.stage = stage
        self.held = held
        self.kv_total_bytes = kv_bytes
        self._per_token_layer = bytes_per_token_layer
        self._states: dict[tuple[SessionId, LayerRange], HashState] = {}
        self._used_bytes = 0

    def __len__(self) -> int:
        return len({session for session, _ in self._states})

    @property
    def kv_used_bytes(self) -> int:
        return self._used_bytes

    def length(self, session: SessionId, layers: LayerRange) -> int:
        """How many positions a session has in ``layers``."""
        state = self._states.get((session, layers))
        return len(state) if state else 0

    def open(self, opening: Opening, now: float) -> int:
        """Start a session with a copy of what is kept of its prompt; how many positions that is."""
        key = (opening.session, opening.layers)
        if key in self._states:
            return 0
        chain = chain_of((self.stage.name, str(opening.layers), opening.tenant), opening.ids)
        self._prompts[key] = chain
        self.prefixes.expire(now)
        found = self.prefixes.find(chain, now)
        if found is None:
            return 0
        kept, have = found[0], min(found[1], usable_tokens(opening.ids))
        try:
            reserved = self._grant(key, None, max(opening.reserve_tokens, have), now).reserved_tokens
        except Busy:
            return 0
        state = self._states[key] = kept.copy(have)
        state.reserved_tokens, state.used_at = reserved, now
        return have

    def run(self, run: Run, now: float) -> Ran:
        """One step, at once. Raises NeedRows, Busy, RangeNotHeld, BadTensor; a refused run changes nothing."""
        stage, layers = self.stage, run.layers
        if not self.held.covers(layers):
            raise RangeNotHeld(f"layers {layers} are not held here, {self.held} are", held=self.held)
        key = (run.session, layers)
        state = self._states.get(key)
        if run.start > (len(state) if state else 0):
            raise NeedRows(len(state) if state else 0)
        rows = stage.rows_in(layers, run.rows, run.n)
        state = self._grant(key, state, max(run.reserve_tokens, run.start + run.n), now)
        state.used_at = now
        state.truncate(run.start)
        stage.extend(state, layers, rows)
        emit = min(run.emit, run.n)
        first = run.start + run.n - emit
        if layers.end < stage.num_layers or run.sampling is None:
            return Ran(rows=b"".join(state.log[first:]) if emit else b"")
        return Ran(
            choices=tuple(
                stage.choice(state.log[p], p + 1, run.sampling, run.history) for p in range(first, run.start + run.n)
            )
        )

    def boundary(self, session: SessionId, layers: LayerRange, start: int, end: int) -> bytes:
        """The rows ``[start, end)`` sent downstream. Raises NeedRows(have)."""
        state = self._states.get((session, layers))
        have = len(state) if state else 0
        if end > have or state is None:
            raise NeedRows(have)
        return b"".join(state.log[start:end])

    def drop(self, session: SessionId) -> None:
        """Forget a session that has ended, in every range, and keep its prompt."""
        for key in [key for key in self._states if key[0] == session]:
            state, chain = self._states[key], self._prompts.get(key, Chain())
            self._forget(key)
            size = chain.tokens * self._per_token_layer * len(key[1])
            if len(state) >= chain.tokens and self.prefixes.wants(chain, size, state.used_at):
                self.prefixes.keep(chain, state.copy(chain.tokens), size, state.used_at)
                self.prefixes.release(self._used_bytes + self.prefixes.used_bytes - self.kv_total_bytes)
        for key in [key for key in self._prompts if key[0] == session]:
            del self._prompts[key]

    def evict(self, session: SessionId, layers: LayerRange) -> None:
        """Forget one state, as memory pressure would."""
        if (session, layers) in self._states:
            self._forget((session, layers))

    def keys(self) -> list[tuple[SessionId, LayerRange]]:
        """Every state, oldest first."""
        return list(self._states)

    def _grant(self, key: tuple[SessionId, LayerRange], state: HashState | None, tokens: int, now: float) -> HashState:
        """The state with room for ``tokens``; evicts idle sessions for it or raises Busy."""
        layers = key[1]
        more = max(0, tokens - (state.reserved_tokens if state else 0)) * self._per_token_layer * len(layers)
        over = self._used_bytes + self.prefixes.used_bytes + more - self.kv_total_bytes
        if more and over > 0 and self.prefixes.release(over) < over:
            self._make_room(more, key, now)
        if state is None:
            state = self._states[key] = self.stage.fresh(layers)
        if more:
            state.reserved_tokens = tokens
            self._used_bytes += more
        return state

    def _make_room(self, more: int, key: tuple[SessionId, LayerRange], now: float) -> None:
        idle = sorted(
            (state.used_at, other)
            for other, state in self._states.items()
            if other != key and now >= state.used_at + IDLE_S
        )
        free = self.kv_total_bytes - self._used_bytes
        chosen = []
        for _, other in idle:
            if free >= more:
                break
            free += self._size(other)
            chosen.append(other)
        if free < more:
            raise Busy(f"no room for a session: {more} bytes wanted, {free} of {self.kv_total_bytes} can be had")
        for other in chosen:
            self._forget(other)

    def _size(self, key: tuple[SessionId, LayerRange]) -> int:
        return self._states[key].reserved_tokens * self._per_token_layer * len(key[1])

    def _forget(self, key: tuple[SessionId, LayerRange]) -> None:
        self._used_bytes -= self._size(key)
        del self._states[key]


def reference(
    prompt: tuple[int, ...], n: int, num_layers: int, seed: int = 0, *, sampling: Sampling | None = None
) -> list[int]:
    """The ``n`` tokens an undisturbed room answers ``prompt`` with: one stage, one step a token."""
    stage = HashStage(num_layers, seed)
    layers = LayerRange(0, num_layers)
    state = stage.fresh(layers)
    draw = sampling or Sampling()
    ids, tokens = list(prompt), list[int]()
    for _ in range(n):
        fresh = ids[len(state) :]
        stage.extend(state, layers, stage.rows_in(layers, struct.pack(f"<{len(fresh)}i", *fresh), len(fresh)))
        tokens.append(stage.choice(state.log[-1], len(ids), draw, tuple(tokens)).token)
        ids.append(tokens[-1])
    return tokens
