"""The text worker's process: ``python -m meshd.inference.text_worker FD FOLDER``.

Reads requests from its socket, answers each, and ends when the socket does. It runs a stranger's template, so it gives up what
it does not need: memory beyond a bound. The time limit is the daemon's, which kills it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from meshd.errors import MeshdError
from meshd.inference.text_worker import wire
from meshd.inference.text_worker.ids_only import IdsOnly, open_text
from meshd.inference.text_worker.tokenizer import TextModel

_MEMORY_BYTES = 4 << 30

Model = TextModel | IdsOnly


def main(arguments: list[str]) -> int:
    """Serve until the daemon closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    sock = socket.socket(fileno=int(arguments[0]))
    threading.Thread(target=_end_with, args=(sock,), daemon=True).start()
    stream = sock.makefile("rb")
    try:
        model = open_text(Path(arguments[1]))
    except MeshdError as error:
        sock.sendall(wire.pack(_refusal(error)))
        return 1
    sock.sendall(wire.pack({"eos_ids": sorted(model.eos_ids)}))  # without running the template, which may never end
    with contextlib.suppress(OSError):
        while len(prefix := stream.read(wire.LENGTH.size)) == wire.LENGTH.size:
            sock.sendall(wire.pack(_answer(model, wire.unpack(stream.read(wire.length(prefix))))))
    return 0


_CALLS: Final[Mapping[str, Callable[[Model, dict[str, Any]], dict[str, Any]]]] = {
    "encode": lambda model, request: {"ids": model.encode(request["text"], special=request["special"])},
    "chat": lambda model, request: {"ids": model.chat(request["messages"])},
    "decode": lambda model, request: {"texts": [_decoded(model, ids) for ids in request["lists"]]},
    "turn_end": lambda model, _request: {"eos_ids": sorted(model.find_turn_end())},
}


def _decoded(model: Model, ids: list[int]) -> str | dict[str, Any]:
    """The text, or what is wrong with these ids: the others in the same call have theirs."""
    try:
        return model.decode(ids)
    except Exception as error:  # noqa: BLE001  # as in _answer
        return {"message": f"decode: {type(error).__name__}: {error}"}


def _answer(model: Model, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _CALLS[request["op"]](model, request)
    except MeshdError as error:
        return _refusal(error)
    except Exception as error:  # noqa: BLE001  # one call that fails must not end the others
        return {"code": "engine_failed", "message": f"{request.get('op')}: {type(error).__name__}: {error}"}


def _refusal(error: MeshdError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "param": error.param}


def _end_with(sock: socket.socket) -> None:
    """End when the daemon is gone, also from within a template that never ends."""
    poll = select.poll()
    poll.register(sock, 0)  # nothing asked for: only the other end's hanging up is told
    poll.poll()
    os._exit(0)


def _limit_memory() -> None:
    """A template can build a string of any size in one step; better this process than the device."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415  # not on every platform

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
