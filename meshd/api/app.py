"""The HTTP interface of a node: one table of routes, and what every request passes before its handler.

In this order: Host and Origin, the path, the method, the key's right; then the body is read (`http`), then the handler runs.
A request that this node cannot own is passed on to one of the room that can.

Owns no state but two counts: requests owned and event streams open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from email.utils import formatdate

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from meshd.api import beat, chain_api, tensors, views
from meshd.api.asking import Owner, not_ready, owner
from meshd.api.assets import assets
from meshd.api.connection import Plan
from meshd.api.events import stream_events
from meshd.api.fields import Fields, read_json
from meshd.api.guards import Guards, Right
from meshd.api.limits import Budget
from meshd.api.message import Handler, Headers, Request, Response, Writer, error_response, json_response
from meshd.api.node import Node
from meshd.api.openai import CHAT, COMPLETION, answer_openai, model_json, models_json
from meshd.api.openai_read import read_chat, read_completion
from meshd.api.room_view import RoomView, targets
from meshd.errors import MethodNotAllowed, ModelNotFound, NoOtherEntry, NotFound, NotReady, StageUnavailable
from meshd.vocabulary import is_model_name

_Owned = Callable[[Fields, Owner, Request, Writer], Awaitable[Response | None]]

MAX_REQUESTS = 256
MAX_EVENT_STREAMS = 32
_MODEL_PATH = "/v1/models/"


@dataclass(frozen=True, slots=True)
class Route:
    """Who answers a path. ``live``: an endless stream, so there is no HEAD. ``health``: answered on a reserve connection.
    ``body_bytes`` None: the server's own limit."""

    method: str
    path: str
    needs: Right
    handler: Handler
    health: bool = False
    live: bool = False
    body_bytes: int | None = None


class WrongMethod(MethodNotAllowed):
    """Tells which methods the path has."""

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.headers: Headers = (("Allow", allow),)


class App:
    """The application that `HttpServer` serves."""

    def __init__(self, node: Node, guards: Guards | None = None) -> None:
        self._node = node
        self.guards = guards or Guards()
        self._owned = Budget(MAX_REQUESTS, "requests")
        self._streams = Budget(MAX_EVENT_STREAMS, "event streams")
        self._room = RoomView(node, lambda: self.in_flight)
        self._assets = assets()
        self._routes: dict[str, dict[str, Route]] = {}
        for route in self._table():
            self._routes.setdefault(route.path, {})[route.method] = route

    @property
    def in_flight(self) -> int:
        """Requests that this node owns or passes on now."""
        return self._owned.used

    @property
    def routes(self) -> list[Route]:
        """The route table."""
        return [route for methods in self._routes.values() for route in methods.values()]

    def _table(self) -> list[Route]:
        read, infer, admin, none = Right.READ, Right.INFER, Right.ADMIN, Right.NONE
        wire = tensors.BODY_BYTES
        return [
            *(Route("GET", path, none, self._asset) for path in self._assets),
            Route("GET", "/healthz", none, self._healthz, health=True),
            Route("GET", "/readyz", none, self._readyz, health=True),
            Route("GET", "/status", read, self._status, health=True),
            Route("GET", "/mesh/peers", read, self._peers),
            Route("GET", "/mesh/hive", read, self._hive),
            Route("GET", "/mesh/model", read, self._model),
            Route("GET", "/mesh/room", read, self._whole_room),
            Route("GET", "/mesh/targets", read, self._targets),
            Route("GET", "/metrics", read, self._metrics),
            Route("GET", "/events", read, self._events, live=True),
            Route("GET", "/v1/routing", read, self._routing),
            Route("GET", "/v1/models", read, self._models),
            Route("GET", _MODEL_PATH, read, self._one_model),
            Route("POST", "/chain", infer, self._owner(self._chain, chain_api.deadline_s)),
            Route("POST", "/v1/chat/completions", infer, self._owner(self._chat)),
            Route("POST", "/v1/completions", infer, self._owner(self._completion)),
            Route("POST", "/embed", infer, self._embed, body_bytes=wire),
            Route("POST", "/forward", infer, self._forward, body_bytes=wire),
            Route("POST", "/lm-head", infer, self._lm_head, body_bytes=wire),
            Route("POST", "/admin/drain", admin, self._drain),
            Route("POST", "/admin/resume", admin, self._resume),
        ]

    # --- before the handler -------------------------------------------------------------------------------------------

    def plan(self, head: Request, authority: str | None) -> Plan:
        """Who answers a request and how large its body may be. Raises Forbidden, NotFound, WrongMethod, Unauthorized."""
        self.guards.page(head, authority)
        route = self._find(head)
        tenant = self.guards.access.tenant(head, route.needs)

        async def answer(request: Request, writer: Writer) -> Response | None:
            return await route.handler(replace(request, tenant=tenant), writer)

        return Plan(route.body_bytes, answer, health=route.health, live=route.live)

    def _find(self, head: Request) -> Route:
        path = _MODEL_PATH if head.path.startswith(_MODEL_PATH) else head.path
        methods = self._routes.get(path)
        if methods is None:
            raise NotFound(f"no such path: {head.path[:200]}; GET / lists what there is")
        route = methods.get("GET" if head.method == "HEAD" else head.method)
        if route is None or (route.live and head.method == "HEAD"):
            allow = ", ".join(sorted(methods) + (["HEAD"] if "GET" in methods and not methods["GET"].live else []))
            hint = f"{head.method} is not possible on {head.path[:200]}, only {allow}"
            if path == "/chain":
                hint = chain_api.GET_HINT.format(host=_plain(head.headers.get("host", "127.0.0.1:8090")))
            raise WrongMethod(hint, allow)
        return route

    async def take_over(self, request: Request, writer: Writer) -> Response | None:
        """Answer a request that another node of the room passed on; that node has checked its key. Raises MeshdError."""
        route = self._find(request)
        if route.needs is not Right.INFER:
            raise NotFound(f"{request.path[:200]} is not passed on")
        return await route.handler(replace(request, passed_on=True), writer)

    # --- requests that an entry owns ----------------------------------------------------------------------------------

    def _owner(self, run: _Owned, deadline_s: Callable[[Fields], float | None] = lambda _fields: None) -> Handler:
        """A handler that reads the body, finds who can own the request, and counts it while it runs."""

        async def handler(request: Request, writer: Writer) -> Response | None:
            fields = read_json(request.body)
            model = fields.text("model")
            with self._owned.share() as share:
                share.grow(1)
                own = owner(self._node)
                if own is not None and model in ("", own.spec.name, own.spec.digest):
                    return await run(fields, own, request, writer)
                return await self._pass_on(request, writer, model, deadline_s(fields))

        return handler

    async def _pass_on(self, request: Request, writer: Writer, model: str, deadline_s: float | None) -> Response | None:
        """Let another node answer: this one has no text side, or serves another model."""
        digest = self._digest_of(model) if model else ""
        if self._node.pass_on is None or request.passed_on:
            raise not_ready(self._node)
        passed = replace(request, passed_on=True)
        try:
            return await self._node.pass_on(passed, writer, digest=digest, deadline_s=deadline_s)
        except NoOtherEntry:
            if owner(self._node) is not None:  # of another model
                raise
            raise not_ready(self._node) from None  # why this one cannot is what there is to cure

    def _digest_of(self, model: str) -> str:
        """Which model is meant. Raises StageUnavailable if it is known here but lacks layers, ModelNotFound if it is not."""
        spec = self._node.spec()
        meant = [hive for hive in views.known_models(*self._view()) if model in (hive.model, hive.digest)]
        for hive in meant:
            if hive.whole:
                return hive.digest
        if owner(self._node) is None and spec is not None and model in (spec.name, spec.digest):
            return spec.digest  # whoever owns the request knows best for which layers it is worth waiting
        if meant:
            raise StageUnavailable(list(meant[0].missing))
        raise ModelNotFound(
            f"the model {model[:200]!r} is not served here; GET /v1/models lists what is", param="model"
        )

    async def _chain(self, fields: Fields, own: Owner, request: Request, writer: Writer) -> Response | None:
        async def run(way_out: Writer) -> Response | None:
            asked = await chain_api.read(fields, own, self._node, request)
            return await chain_api.answer_chain(asked, own, self._node, request, way_out)

        if beat.HEADER in request.headers and fields.flag("stream"):
            return await beat.beating(writer, run, deaf=self._node.deaf)
        return await run(writer)

    async def _chat(self, fields: Fields, own: Owner, request: Request, writer: Writer) -> Response | None:
        wanted = await read_chat(fields, own, self._node, request.tenant)
        return await answer_openai(CHAT, wanted, own, self._node, writer)

    async def _completion(self, fields: Fields, own: Owner, request: Request, writer: Writer) -> Response | None:
        wanted = await read_completion(fields, own, self._node, request.tenant)
        return await answer_openai(COMPLETION, wanted, own, self._node, writer)

    # --- the room -----------------------------------------------------------------------------------------------------

    async def _asset(self, request: Request, _writer: Writer) -> Response:
        return self._assets[request.path]

    async def _healthz(self, _request: Request, _writer: Writer) -> Response:
        # The date lets `meshd doctor` find clocks that are wrong.
        return json_response({"status": "ok"}, headers=(("Date", formatdate(usegmt=True)),))

    async def _readyz(self, _request: Request, _writer: Writer) -> Response:
        directory, facts, spec = self._view()
        hive = views.hive_of(directory, facts, views.room_digest(directory, spec), spec)
        if not hive.whole:
            gone = StageUnavailable(list(hive.missing)) if hive.missing else NotReady("this room has no model yet")
            gaps = [gap.json() for gap in hive.missing]
            return error_response(gone, beside={"status": hive.status, "missing": gaps})
        return json_response({"status": "ready", "model": hive.model, "min_replicas": hive.min_replicas, "missing": []})

    async def _status(self, _request: Request, _writer: Writer) -> Response:
        return json_response(views.status_json(*self._view(), self.in_flight))

    async def _peers(self, _request: Request, _writer: Writer) -> Response:
        return json_response(views.peers_json(self._node.directory()))

    async def _hive(self, _request: Request, _writer: Writer) -> Response:
        return json_response(views.hive_json(*self._view()))

    async def _model(self, _request: Request, _writer: Writer) -> Response:
        spec = self._node.spec()
        if spec is None:
            raise NotReady("this node has no model yet")
        return json_response(spec.json())

    async def _whole_room(self, request: Request, _writer: Writer) -> Response:
        body = self._room.body(events=request.query.get("events") == "1")
        return Response(200, body, (("Content-Type", "application/json"),))

    async def _targets(self, _request: Request, _writer: Writer) -> Response:
        directory = self._node.directory()
        members = [member for _, member in sorted(directory.members.items())]
        return json_response(targets(members, lambda member: directory.label(member.node_id)))

    async def _routing(self, request: Request, _writer: Writer) -> Response:
        return json_response(self._node.routing(request.query.get("model") or None))

    async def _models(self, _request: Request, _writer: Writer) -> Response:
        return json_response(models_json(views.served_models(*self._view())))

    async def _one_model(self, request: Request, _writer: Writer) -> Response:
        name = request.path.removeprefix(_MODEL_PATH)
        if not is_model_name(name):
            raise ModelNotFound(f"{name[:200]!r} is not a model's name", param="model")
        return json_response(model_json(views.served_models(*self._view()), name))

    def _view(self) -> views.View:
        return self._node.directory(), self._node.facts(), self._node.spec()

    async def _metrics(self, _request: Request, _writer: Writer) -> Response:
        return Response(200, generate_latest(self._node.registry), (("Content-Type", CONTENT_TYPE_LATEST),))

    async def _events(self, request: Request, writer: Writer) -> None:
        with self._streams.share() as share:
            share.grow(1)
            await stream_events(self._node.events, request, writer)

    # --- tools and administration -------------------------------------------------------------------------------------

    async def _embed(self, request: Request, _writer: Writer) -> Response:
        return await tensors.embed(self._node.engine(), request)

    async def _forward(self, request: Request, _writer: Writer) -> Response:
        return await tensors.forward(self._node.engine(), request)

    async def _lm_head(self, request: Request, _writer: Writer) -> Response:
        return await tensors.lm_head(self._node.engine(), request)

    async def _drain(self, request: Request, _writer: Writer) -> Response:
        _no_body(request)
        await self._node.drain()
        return json_response({"state": self._node.facts().state})

    async def _resume(self, request: Request, _writer: Writer) -> Response:
        _no_body(request)
        await self._node.resume()
        return json_response({"state": self._node.facts().state})


def _no_body(request: Request) -> None:
    """An empty body or any JSON object; garbage is an error even where nothing is read from it."""
    if request.body.strip():
        read_json(request.body)


def _plain(host: str) -> str:
    """A Host that can be pasted into a shell."""
    return host if all(char.isalnum() or char in ".:-[]" for char in host) else "127.0.0.1:8090"
