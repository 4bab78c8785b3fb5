"""The client for code that waits: what `entries` and `answer` say, done with httpx.Client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import httpx

from meshd.client.answer import SILENCE_S, Answer, Patience, Piece, Post, Race
from meshd.client.entries import DEFAULT_URL, Call, Read, document, text
from meshd.client.over_httpx import entries_of, sent, settings, why
from meshd.client.talk import Message, Turn


class Client:
    """A room behind one or more entries. ``urls`` are tried in turn; the one that answered last is tried first.

    A stream with another entry to go to does not wait for one that is silent: it asks for signs of life, and goes on at
    whichever of the others answers first when there are none for ``silence_s``. ``timeout_s`` is for everything else."""

    def __init__(
        self,
        urls: Sequence[str] | str = DEFAULT_URL,
        *,
        key: str | None = None,
        timeout_s: float = 60.0,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._entries = entries_of(urls)
        self._patience = Patience(timeout_s, silence_s)
        self._http = httpx.Client(**settings(key, timeout_s))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def prefer(self, url: str) -> None:
        """Begin at this one of the entries next time."""
        self._entries.prefer(url)

    # --- documents ----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """The JSON document at ``path`` from the first entry that answers. Raises RequestFailed, NoEntry."""
        return self._call("GET", path, None, document)

    def text(self, path: str) -> str:
        """The body at ``path`` as it stands (``/metrics``)."""
        return self._call("GET", path, None, text)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST and return the JSON answer."""
        return self._call("POST", path, body or {}, document)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, read: Callable[[str, int, bytes], Read]
    ) -> Read:
        call = Call(self._entries, path, read)
        for url in call.urls():
            try:
                response = self._http.request(method, url, json=body)
                call.answered(response.status_code, response.content)
            except httpx.RequestError as error:
                call.lost(why(error))
        return call.result()

    # --- answers ------------------------------------------------------------------------------------------------------

    def ask(self, prompt: str | None = None, **body: Any) -> Mapping[str, Any]:
        """The whole answer object of ``POST /chain`` (prompt, messages, max_tokens, seed …)."""
        final: Mapping[str, Any] = {}
        for piece in self.stream(prompt, **body):
            final = piece.final or final
        return final

    def chat(self, messages: MutableSequence[Message], said: str, **body: Any) -> Generator[Piece, None, None]:
        """Say something and stream the answer. Both are appended to ``messages``, the answer as far as it came."""
        turn = Turn(messages, said)
        try:
            for piece in self.stream(messages=list(messages), **body):
                turn.heard(piece)
                yield piece
        finally:
            turn.over()

    def stream(
        self, prompt: str | None = None, *, patience_s: float = 10.0, **body: Any
    ) -> Generator[Piece, None, None]:
        """Pieces of an answer as they come. A dead entry costs a pause, not a token: the stream goes on at the next one
        for as long as ``patience_s`` passes without any progress. Raises RequestFailed, NoEntry."""
        request = body if prompt is None else {**body, "prompt": prompt}
        patience = replace(self._patience, patience_s=patience_s)
        answer = Answer(self._entries, request, patience, time.monotonic())
        while (todo := answer.next(time.monotonic())) is not None:
            if isinstance(todo, Post):
                yield from self._pieces(todo, answer)
            elif isinstance(todo, Race):
                answer.awake(self._first_awake(todo))
            else:
                time.sleep(todo.seconds)

    def _pieces(self, post: Post, answer: Answer) -> Generator[Piece, None, None]:
        try:
            with self._http.stream(**sent(post)) as response:
                if response.status_code != 200:
                    answer.refused(response.status_code, response.read(), time.monotonic())
                    return
                for line in response.iter_lines():
                    if (piece := answer.line(line, time.monotonic())) is not None:
                        yield piece
                    if not answer.listening:
                        return
                answer.lost("the stream ended without an end", time.monotonic())
        except httpx.RequestError as error:
            answer.lost(why(error), time.monotonic())

    def _first_awake(self, race: Race) -> str | None:
        asking = ThreadPoolExecutor(min(8, len(race.urls)))
        try:
            asked = {asking.submit(self._is_awake, url, race.within_s): url for url in race.urls}
            found = as_completed(asked, timeout=race.within_s)
            return next((asked[answer] for answer in found if answer.result()), None)
        except TimeoutError:
            return None
        finally:
            asking.shutdown(wait=False, cancel_futures=True)

    def _is_awake(self, url: str, within_s: float) -> bool:
        try:
            return self._http.get(url + "/healthz", timeout=within_s).is_success
        except httpx.HTTPError:
            return False
