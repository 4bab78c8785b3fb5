"""Which sessions live in this worker, and how much memory they may take.

Owns the table of sessions, their reservations against one budget, and who is evicted. Knows no tensors: a session's state (KV
and boundary log, one object) is made by the function it is given. ``now`` is an argument.

Rules:

* A session reserves its prompt and ``reserve_tokens`` with its first run, and grows by `GROW_TOKENS`; what is granted stays
  granted, so a running answer is never stopped by a newcomer. Refused: Busy (a refused growth says "full").
* When space is needed, sessions idle for `IDLE_S` go, the one idle longest first. Losing one costs time, never an answer:
  its next step is told NeedRows, and the rows come again.
* A session ends by `drop`, or `SILENT_S` after its last run. Of one that is dropped the prompt is kept, if `begin` told it
  (`prefix_cache`), and a later session begins with a copy. What is kept fills only space that no session wants: it goes before
  any session does, and before anything is refused.
* With a whole prompt what came out of its last position is kept too: whoever asks the same again (another try, another seed)
  gets that for the same row, and nothing is computed at all.
* One session has one state: a run with other layers replaces it (its route has changed).

Invariants: the sum of charges stays within the budget unless a single state outgrew its own reservation (it is charged what
it really takes). Units: bytes, tokens, seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from meshd.errors import Busy, NeedRows
from meshd.inference.prefix_cache import Chain, PrefixCache
from meshd.vocabulary import LayerRange, SessionId

GROW_TOKENS: Final = 256
IDLE_S: Final = 10.0
SILENT_S: Final = 60.0
MAX_PROMPTS: Final = 1024  # sessions whose prompt is remembered


class State(Protocol):
    """What a session has computed: positions ``[0, have)``."""

    @property
    def have(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def truncate(self, n: int) -> None:
        """Forget positions from ``n`` on, or more where a state cannot be cut there."""
        ...

    def reserve(self, tokens: int) -> None:
        """Make the next buffers at least this long."""
        ...

    def bytes_for(self, tokens: int) -> int:
        """What it will take once it is that long."""
        ...

    def copy_from(self, source: Any, tokens: int) -> None:
        """Become the first ``tokens`` positions of another state of the same kind; this one is empty."""
        ...


StateT = TypeVar("StateT", bound=State)


@dataclass(frozen=True, slots=True)
class LastRow:
    """A prompt's last position: the row that came in and the one that went out (``drawn``: logits to draw from)."""

    row: Any
    output: Any
    drawn: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Prompt(Generic[StateT]):
    """What is kept of an ended session."""

    state: StateT
    last: LastRow | None


@dataclass(slots=True)
class Session(Generic[StateT]):
    """One session's state over ``layers``; ``tokens`` is what is granted."""

    layers: LayerRange
    state: StateT
    tokens: int
    charge_bytes: int
    last_used: float
    last: LastRow | None = None

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + (self.last.nbytes if self.last else 0)


class Sessions(Generic[StateT]):
    """The table. ``new`` makes an empty state, which takes no memory yet."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        new: Callable[[LayerRange], StateT],
        prefixes: PrefixCache[Prompt[StateT]] | None = None,
    ) -> None:
        self.prefixes: PrefixCache[Prompt[StateT]] = PrefixCache(0, 0.0) if prefixes is None else prefixes
        self._prompts: OrderedDict[SessionId, Chain] = OrderedDict()
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.evicted = 0
        self._new = new
        self._table: OrderedDict[SessionId, Session[StateT]] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._table)

    def get(self, session: SessionId, layers: LayerRange) -> Session[StateT] | None:
        """The session's state over exactly these layers, if it is here."""
        found = self._table.get(session)
        return found if found is not None and found.layers == layers else None

    def begin(self, session: SessionId, layers: LayerRange, chain: Chain, *, most: int, tokens: int, now: float) -> int:
        """A session with the prompt ``chain``, of which ``most`` positions may come from what is kept; how many did.
        Without room for it there are none: whether the session is refused is for its first run to find out. Of the very same
        prompt the rest is there too, for `recall`."""
        if session in self._table:
            return 0
        self._prompts[session] = chain
        while len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)
        found = self.prefixes.find(chain, now)
        if found is None:
            return 0
        kept, have = found
        try:
            made = self._admit(session, layers, max(tokens, have), now)
        except Busy:
            return 0
        made.state.copy_from(kept.state, have)
        made.last = kept.last if have == chain.tokens else None
        self.touch(session, now)
        return min(have, most)

    def recall(self, session: SessionId, layers: LayerRange, position: int) -> LastRow | None:
        """What is known to come out of ``position``, which is the last of the session's prompt and computed."""
        found, chain = self.get(session, layers), self._prompts.get(session)
        if found is None or chain is None or not position + 1 == chain.tokens <= found.state.have:
            return None
        return found.last

    def remember(self, session: SessionId, position: int, last: Callable[[], LastRow]) -> None:
        """``position`` is computed; what came out of it is asked for if the prompt ends there and will be kept."""
        found, chain = self._table.get(session), self._prompts.get(session)
        if found is not None and chain is not None and position + 1 == chain.tokens and self.prefixes.keeps:
            found.last = last()

    def open(
        self,
        session: SessionId,
        layers: LayerRange,
        *,
        start: int,
        n: int,
        prompt_len: int,
        reserve_tokens: int,
        now: float,
    ) -> Session[StateT]:
        """The session, cut at ``start``, with room up to ``start + n``. Raises NeedRows, Busy."""
        found = self._table.get(session)
        if found is not None and found.layers != layers:
            self._forget(session)
            found = None
        if start > (have := found.state.have if found else 0):
            raise NeedRows(have)
        if found is None:
            found = self._admit(session, layers, max(start + n, prompt_len + reserve_tokens), now)
        elif start + n > found.tokens:
            self._grow(session, found, start + n, now)
        found.last_used = now
        self._table.move_to_end(session)
        found.state.truncate(start)
        if found.state.have < start:
            raise NeedRows(found.state.have)
        return found

    def touch(self, session: SessionId, now: float) -> None:
        """The session computed something: it is in use, and charged what it really takes."""
        found = self._table.get(session)
        if found is None:
            return
        found.last_used = now
        self._table.move_to_end(session)
        self._charge(found, max(found.charge_bytes, found.nbytes))

    def drop(self, session: SessionId) -> bool:
        """Forget a session that has ended, and keep its prompt. False when it is not here."""
        chain = self._prompts.pop(session, Chain())
        found = self._forget(session)
        if found is not None and found.state.have >= chain.tokens:
            self._keep(found, chain)
        return found is not None

    def _forget(self, session: SessionId) -> Session[StateT] | None:
        found = self._table.pop(session, None)
        if found is not None:
            self.used_bytes -= found.charge_bytes
        return found

    def _keep(self, ended: Session[StateT], chain: Chain) -> None:
        """Copied and not taken over: an ended session's buffers are as long as its answer might have become."""
        state, last = self._new(ended.layers), ended.last
        more_bytes = last.nbytes if last else 0
        if self.prefixes.wants(chain, state.bytes_for(chain.tokens) + more_bytes, ended.last_used):
            state.copy_from(ended.state, chain.tokens)
            self.prefixes.keep(chain, Prompt(state, last), state.nbytes + more_bytes, ended.last_used)
            self.prefixes.release(self.used_bytes + self.prefixes.used_bytes - self.budget_bytes)

    def expire(self, now: float) -> list[SessionId]:
        """Forget the sessions nobody has used for `SILENT_S` (which ones), and prompts nobody has asked for again."""
        self.prefixes.expire(now)
        gone = [session for session, found in self._table.items() if now >= found.last_used + SILENT_S]
        for session in gone:
            self._forget(session)
            self._prompts.pop(session, None)
        return gone

    def _admit(self, session: SessionId, layers: LayerRange, tokens: int, now: float) -> Session[StateT]:
        state = self._new(layers)
        charge = state.bytes_for(tokens)
        if not self._make_room(charge, now, keep=session):
            raise Busy(
                f"no room: {tokens} tokens of {layers} take {charge >> 20} MB,"
                f" {max(0, self.budget_bytes - self.used_bytes) >> 20} of {self.budget_bytes >> 20} MB are free"
            )
        state.reserve(tokens)
        made = Session(layers, state, tokens, 0, now)
        self._table[session] = made
        self._charge(made, charge)
        return made

    def _grow(self, session: SessionId, found: Session[StateT], tokens: int, now: float) -> None:
        steps = -(-(tokens - found.tokens) // GROW_TOKENS)
        granted = found.tokens + steps * GROW_TOKENS
        charge = max(found.state.bytes_for(granted), found.charge_bytes)
        if not self._make_room(charge - found.charge_bytes, now, keep=session):
            raise Busy(f"full: no memory for more than {found.tokens} tokens of this session")
        found.tokens = granted
        found.state.reserve(granted)
        self._charge(found, charge)

    def _charge(self, found: Session[StateT], charge_bytes: int) -> None:
        self.used_bytes += charge_bytes - found.charge_bytes
        found.charge_bytes = charge_bytes

    def _make_room(self, needed: int, now: float, *, keep: SessionId) -> bool:
        """Evict as few idle sessions as are needed; none when even all of them would not do."""
        missing = self.used_bytes + self.prefixes.used_bytes + needed - self.budget_bytes
        if missing > 0:
            missing -= self.prefixes.release(missing)
        going: list[SessionId] = []
        for session, found in self._table.items():
            if missing <= 0 or now < found.last_used + IDLE_S:
                break
            if session != keep:
                going.append(session)
                missing -= found.charge_bytes
        if missing > 0:
            return False
        for session in going:
            self._forget(session)
            self.evicted += 1
        return True
