"""A worker without torch, run as a process: it loads nothing, echoes rows, and dies or hangs when a session's name says so."""

from __future__ import annotations

import os
import socket
import sys
import time

from meshd.errors import ModelRefused
from meshd.inference import codec
from meshd.inference.engine import Ran
from meshd.inference.worker.link import Call, Withdrawn, WorkerLink
from meshd.links.wire import Message


def main() -> None:
    withdrawn = 0
    link = WorkerLink(socket.socket(fileno=int(sys.argv[1])), lambda: {"tick": 7, "runs": withdrawn})
    link.start()
    print("a fake worker starts", file=sys.stderr)
    while True:
        for arrival in link.take(60.0):
            if isinstance(arrival, Withdrawn):
                withdrawn += 1
            else:
                answer(link, arrival)


def answer(link: WorkerLink, call: Call) -> None:
    match call.message.kind:
        case codec.LOAD:
            load(link, call)
        case codec.RUN:
            run = codec.run_untrusted(call.message)
            if run.session == "die":
                print("the tensor was too heavy", file=sys.stderr, flush=True)
                os._exit(3)
            if run.session != "hang":
                link.reply(call.stream, codec.ran_message(Ran(run.rows)))
        case _:
            link.reply(call.stream, Message(codec.ROWS, body=call.message.body))


def load(link: WorkerLink, call: Call) -> None:
    match os.environ.get("FAKE_WORKER"):
        case "die":
            print("no such instruction", file=sys.stderr, flush=True)
            os._exit(1)
        case "refuse":
            link.fail(call.stream, ModelRefused("layer 3 is not finite"))
        case "stall":
            time.sleep(600)
        case _:
            for part in (0.0, 0.5, 1.0):
                link.send(call.stream, Message(codec.PROGRESS, {"part": part}))
            loaded = codec.Loaded("bf16", "fake", True, 2, 9, 0.5, 1.5, 0, ("slow",))
            link.reply(call.stream, codec.loaded_message(loaded))


if __name__ == "__main__":
    try:
        main()
    except EOFError:
        if os.environ.get("FAKE_WORKER") == "stay":
            time.sleep(600)
