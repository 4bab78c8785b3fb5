"""The Python client: ask a room for an answer, streamed, going on at another entry when one dies.

Nothing of a running answer is stored anywhere but here: the seed and the ids received so far are enough for any other entry to
go on with the same tokens (`resume`), so a stream outlives the node it was asked at.

    from meshd.client import Client
    with Client(["http://n1:8090", "http://n2:8090"]) as room:
        for event in room.stream(prompt="The capital of France is", max_tokens=16):
            print(event.text, end="")
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from meshd.errors import MeshdError, PeerError

DEFAULT_URL: Final = "http://127.0.0.1:8090"
SILENCE_S: Final = 1.5  # an entry that is asked to gives a sign of life every half second
_CONNECT_S: Final = 3.0
_AWAKE_S: Final = 1.0  # how long other entries have to say that they are there
_BEAT: Final = {"X-Mesh-Beat": "1"}
_ELSEWHERE: Final = frozenset(
    {429, 502, 503, 504}
)  # another entry may do better; other statuses are the caller's fault


class RequestFailed(MeshdError):
    """The room's own error, as it said it: ``code``, ``status`` and the whole error object. ``waited_s``: how long the entry
    had been silent before it said so."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("message") or f"HTTP {status}"), param=error.get("param"))
        self.http_status = status
        self.error = dict(error)
        self.waited_s = 0.0


class NoEntry(PeerError):
    """None of the entries could be reached."""

    code = "no_entry"


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a running answer. The last piece carries the whole answer object in ``final``. ``route`` names the nodes
    that compute it, as far as they were known when this entry accepted the request; ``entry`` is the URL that it came from and
    ``session`` what that entry calls it."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    route: tuple[str, ...] = ()
    final: Mapping[str, Any] | None = None
    entry: str = ""
    session: str = ""


@dataclass(slots=True)
class _Progress:
    """What is needed to go on elsewhere."""

    seed: int | None = None
    digest: str | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    route: tuple[str, ...] = ()
    session: str = ""


class Client:
    """A room behind one or more entries. ``urls`` are tried in turn; the one that answered last is tried first.

    A stream with another entry to go to does not wait for one that is silent: it asks for signs of life, and goes on at
    whichever of the others answers first when there are none for `SILENCE_S`. ``timeout_s`` is for everything else."""

    def __init__(
        self, urls: Sequence[str] | str = DEFAULT_URL, *, key: str | None = None, timeout_s: float = 60.0
    ) -> None:
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        self._http = httpx.Client(headers=headers, timeout=timeout, trust_env=False)
        several = len(self._urls) > 1
        self._stream_timeout = httpx.Timeout(min(timeout_s, SILENCE_S), connect=_AWAKE_S) if several else timeout
        self._stream_headers = _BEAT if several else {}
        self._first = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def prefer(self, url: str) -> None:
        """Begin at this one of the entries next time."""
        self._first = self._urls.index(url)

    # --- documents ----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """The JSON document at ``path`` from the first entry that answers. Raises RequestFailed, NoEntry."""
        return self._call("GET", path, None)

    def text(self, path: str) -> str:
        """The body at ``path`` as it stands (``/metrics``)."""
        for url in self._ring():
            try:
                return self._http.get(url + path).raise_for_status().text
            except httpx.HTTPError:
                continue
        raise NoEntry(f"none of {', '.join(self._urls)} answers {path}")

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST and return the JSON answer."""
        return self._call("POST", path, body or {})

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        problem: Exception | None = None
        for url in self._ring():
            try:
                response = self._http.request(method, url + path, json=body)
                return _document(response)
            except httpx.TransportError as error:
                problem = _unreachable(url, error)
            except RequestFailed as error:
                if error.http_status not in _ELSEWHERE:
                    raise
                problem = error
        raise problem or NoEntry("no entry given")

    def _ring(self) -> Iterator[str]:
        first = self._first
        for i in range(len(self._urls)):
            self._first = (first + i) % len(self._urls)  # stays there if this entry does
            yield self._urls[self._first].rstrip("/")

    # --- answers ------------------------------------------------------------------------------------------------------

    def ask(self, prompt: str | None = None, **body: Any) -> Mapping[str, Any]:
        """The whole answer object of ``POST /chain`` (prompt, messages, max_tokens, seed …)."""
        final: Mapping[str, Any] = {}
        for piece in self.stream(prompt, **body):
            final = piece.final or final
        return final

    def stream(self, prompt: str | None = None, *, patience_s: float = 10.0, **body: Any) -> Iterator[Piece]:
        """Pieces of an answer as they come. A dead entry costs a pause, not a token: the stream goes on at the next one
        for as long as ``patience_s`` passes without any progress. Raises RequestFailed, NoEntry."""
        request = {**body, "stream": True, **({} if prompt is None else {"prompt": prompt})}
        progress = _Progress()
        tried: dict[int, MeshdError] = {}
        before, give_up = 0, time.monotonic() + patience_s
        while True:
            try:
                yield from self._stream_at(self._urls[self._first].rstrip("/"), request, progress)
                return
            except httpx.TransportError as error:
                problem: MeshdError = _unreachable(self._urls[self._first], error)
            except RequestFailed as error:
                if error.http_status not in _ELSEWHERE:
                    raise
                problem = error
            if len(progress.tokens) > before:
                before, give_up = len(progress.tokens), time.monotonic() + patience_s
                tried.clear()
            elif len(self._urls) == 1:
                raise problem
            tried[self._first] = problem
            self._go_elsewhere(tried, give_up)

    def _go_elsewhere(self, tried: dict[int, MeshdError], give_up: float) -> None:
        """Choose the next entry. Once all have been tried and the time is over, raises what they said: what an entry answered
        says more than that another was not there."""
        problem = tried[self._first]
        left = [i % len(self._urls) for i in range(self._first + 1, self._first + len(self._urls))]
        left = [i for i in left if i not in tried]
        if not left:
            if time.monotonic() >= give_up:
                raise next((said for said in reversed(tried.values()) if isinstance(said, RequestFailed)), problem)
            time.sleep(0.05)
            tried.clear()
            left = [(self._first + 1) % len(self._urls)]
        self._first = self._awake(left) if isinstance(problem, NoEntry) and len(left) > 1 else left[0]

    def _awake(self, among: Sequence[int]) -> int:
        """Whoever says first that it is there: where one entry has gone, others may have gone with it."""
        asking = ThreadPoolExecutor(min(8, len(among)))
        try:
            asked = {asking.submit(self._is_awake, self._urls[i].rstrip("/")): i for i in among}
            for answer in as_completed(asked, timeout=_AWAKE_S):
                if answer.result():
                    return asked[answer]
        except TimeoutError:
            pass  # none of them: then the next in turn is as good as any
        finally:
            asking.shutdown(wait=False, cancel_futures=True)
        return among[0]

    def _is_awake(self, url: str) -> bool:
        try:
            return self._http.get(f"{url}/healthz", timeout=_AWAKE_S).is_success
        except httpx.HTTPError:
            return False

    def _stream_at(self, url: str, request: Mapping[str, Any], progress: _Progress) -> Iterator[Piece]:
        body = dict(request)
        if progress.tokens or progress.seed is not None:
            body.update(seed=progress.seed, digest=progress.digest, resume={"tokens": progress.tokens})
        asking = self._http.stream(
            "POST", url + "/chain", json=body, headers=self._stream_headers, timeout=self._stream_timeout
        )
        heard = time.monotonic()
        try:
            for piece in self._pieces(asking, url, progress):
                yield piece
                heard = time.monotonic()
        except RequestFailed as error:
            error.waited_s = time.monotonic() - heard
            raise

    def _pieces(self, asking: AbstractContextManager[httpx.Response], url: str, progress: _Progress) -> Iterator[Piece]:
        with asking as response:
            if response.status_code != 200:
                response.read()
                _document(response)
            for event in _events(response.iter_lines()):
                if "error" in event:
                    raise RequestFailed(int(event["error"].get("status") or 503), event["error"])
                if "finish_reason" in event:
                    yield Piece(final=_whole(event, progress), entry=url, session=progress.session)
                    return
                if "tokens" in event:
                    progress.tokens += event["tokens"]
                    progress.text += event.get("text", "")
                    ids = tuple(event["tokens"])
                    yield Piece(event.get("text", ""), ids, progress.route, entry=url, session=progress.session)
                else:
                    progress.seed, progress.digest = event.get("seed"), event.get("digest")
                    progress.session = str(event.get("id", ""))
                    progress.route = tuple(hop["name"] for hop in event.get("route", ()))
        raise httpx.RemoteProtocolError("the stream ended without an end")


def _whole(final: Mapping[str, Any], progress: _Progress) -> Mapping[str, Any]:
    """The last entry's answer object, with what earlier entries sent in front."""
    if len(final.get("tokens", ())) >= len(progress.tokens):
        return final
    return {**final, "tokens": list(progress.tokens), "text": progress.text}


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data:"):
            data = line[5:].strip()
            if data != "[DONE]":
                yield json.loads(data)


def _document(response: httpx.Response) -> Any:
    try:
        document = response.json()
    except ValueError:
        document = {"error": {"message": f"{response.url}: HTTP {response.status_code}, not JSON: is this meshd?"}}
    if response.status_code >= 400 or (isinstance(document, dict) and "error" in document):
        error = document.get("error") if isinstance(document, dict) else None
        raise RequestFailed(response.status_code, error if isinstance(error, Mapping) else {})
    return document


def _unreachable(url: str, error: httpx.TransportError) -> NoEntry:
    what = "timed out" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
    return NoEntry(f"{url}: {what}; is a node running there? (`meshd start`, or --url)")
