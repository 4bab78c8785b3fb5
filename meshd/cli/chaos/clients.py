"""Clients that ask without pause, each at an entry drawn anew for every request.

Owns their threads. Each knows every entry of the room, as a client that was given several addresses would: what it cannot get
at one it gets at another. It waits for nothing: if all entries in turn refuse or fail, the request has failed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from meshd.cli.chaos.box import Struck
from meshd.cli.chaos.verdict import Asked
from meshd.client import Client, Piece, RequestFailed
from meshd.errors import MeshdError
from meshd.vocabulary import LayerRange

REFUSED_S: Final = 0.5  # whoever was refused does not ask again at once


class Clients:
    """``heard`` is called from their threads, once for each request. ``clock``: seconds since the experiment began."""

    def __init__(
        self,
        struck: Struck,
        prompts: Sequence[str],
        *,
        count: int,
        seed: int,
        body: dict[str, Any],
        clock: Callable[[], float],
        heard: Callable[[Asked], None],
    ) -> None:
        self._struck, self._prompts, self._body = struck, prompts, body
        self._clock, self._heard = clock, heard
        self._names = {node.url: name for name, node in struck.room.nodes.items()}
        self._over = threading.Event()
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(f"{seed}/{i}",)) for i in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, patience_s: float) -> None:
        """Let what runs end; raises what ended a client."""
        self._over.set()
        give_up = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        if self._failed:
            raise self._failed[0]

    @property
    def hanging(self) -> int:
        """Clients whose request did not end."""
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self, seed: str) -> None:
        rng = random.Random(seed)  # noqa: S311  # chaos needs no cryptography
        try:
            with self._struck.inside(), self._struck.room.client() as client:
                while not self._over.is_set():
                    client.prefer(rng.choice(list(self._names)))
                    asked = self.ask(client, rng.randrange(len(self._prompts)))
                    self._heard(asked)
                    self._over.wait(REFUSED_S if asked.code else 0.0)
        except BaseException as error:  # noqa: BLE001  # raised again where the clients are stopped
            self._failed.append(error)

    def ask(self, client: Client, prompt: int) -> Asked:
        """One request to its end."""
        began_s = self._clock()
        seen = _Seen(self._names)
        code = message = ""
        missing: tuple[LayerRange, ...] = ()
        waited_s = 0.0
        try:
            for piece in client.stream(self._prompts[prompt], patience_s=0.0, **self._body):
                seen.add(piece, self._clock())
        except MeshdError as error:
            code, message = error.code, error.message
            if isinstance(error, RequestFailed):
                code = str(error.error.get("code") or error.http_status)
                waited_s = error.waited_s
                missing = tuple(LayerRange(*gap) for gap in error.error.get("missing") or ())
        return Asked(
            began_s,
            self._clock(),
            prompt,
            tuple(seen.tokens),
            tuple(seen.times),
            frozenset(seen.nodes),
            tuple(seen.sessions),
            code,
            message,
            missing,
            waited_s,
        )


class _Seen:
    """What came of one request so far."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self.tokens: list[int] = []
        self.times: list[tuple[float, int]] = []
        self.nodes: set[str] = set()
        self.sessions: dict[str, None] = {}

    def add(self, piece: Piece, at_s: float) -> None:
        self.nodes |= {self._names[piece.entry], *map(_plain, piece.route)}
        self.sessions[piece.session] = None
        if piece.tokens:
            self.tokens += piece.tokens
            self.times.append((at_s, len(piece.tokens)))
        if piece.final is not None:
            lost = piece.final.get("recoveries", ())
            self.nodes |= {_plain(one[end]) for one in lost for end in ("from", "to")}


def _plain(label: str) -> str:
    """The name without what tells a wiped node from its former self."""
    return label.partition("~")[0]
