"""The engine worker's process: ``python -m meshd.inference.worker FD``, FD being its end of a socketpair.

Spawned by exec from the daemon (`inference/worker_engine.py`), it ends when the socket does: no parent-death signal, which
with threads fires when the *thread* that forked ends. Threads and waiting policy are in its environment before torch is
imported. Its first message is LOAD; what it says on stderr goes to the daemon's log, the last line being the reason if it dies.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshd.errors import EngineFailed, MeshdError
from meshd.inference import codec
from meshd.inference.worker import pages
from meshd.inference.worker.link import Call, WorkerLink
from meshd.inference.worker.vitals import Vitals
from meshd.links.wire import Message

if TYPE_CHECKING:
    from meshd.inference.worker.loop import Loop
    from meshd.inference.worker.stage import Stage

_KEPT_PRODUCTS = 48  # of oneDNN's, 0.6 MB each: it would keep 1024
_NICE = 5  # the daemon's beats go before arithmetic
_OOM_SCORE = "800"  # a lost worker is a health field, a lost daemon a lost node


def main(arguments: list[str]) -> int:
    """Serve until the daemon closes the socket."""
    _step_back()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_PRODUCTS))  # read when torch is imported
    vitals = Vitals(time.monotonic)
    # Whatever is being computed or loaded is nobody's any more, and its memory is wanted by the next worker.
    link = WorkerLink(socket.socket(fileno=int(arguments[0])), vitals.snapshot, on_end=lambda: os._exit(0))
    link.start()
    with contextlib.suppress(EOFError):
        call = _first_call(link)
        try:
            config = codec.config_untrusted(call.message)
            stage, loaded = _load(config, _Progress(link, call.stream))
            loop = _loop(stage, loaded, link, config, vitals)
        except Exception as error:  # noqa: BLE001  # every reason goes to the daemon, in its words
            link.fail(call.stream, error if isinstance(error, MeshdError) else _failure(error))
            _wait_for_end(link)
        link.reply(call.stream, codec.loaded_message(loaded))
        loop.run_forever()
    return 0


def _step_back() -> None:
    """Yield to the daemon in processor time and memory, and leave Ctrl-C to it. Best effort: not every system has these."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _first_call(link: WorkerLink) -> Call:
    while True:
        for arrival in link.take(60.0):
            if isinstance(arrival, Call):
                return arrival


def _wait_for_end(link: WorkerLink) -> None:
    """After a refusal: stay until the daemon has read it. Ends by EOFError."""
    while True:
        link.take(60.0)


def _load(config: codec.WorkerConfig, progress: Callable[[float], None]) -> tuple[Stage, codec.Loaded]:
    from meshd.inference.worker.stage import Stage  # noqa: PLC0415  # seconds of import: PINGs are answered meanwhile

    stage = Stage(
        Path(config.folder),
        config.layers,
        dtype=config.dtype,
        threads=config.threads,
        deterministic=config.deterministic,
        prepack=config.prepack,
        budget_bytes=config.private_budget_bytes,
        progress=progress,
    )
    layer_ms_1, layer_ms_64 = stage.measure()
    # What was loaded lives as long as the process: the collector need never look at it again.
    gc.collect()
    gc.freeze()
    pages.give_back()
    pages.collapse()
    return stage, codec.Loaded(
        dtype=stage.dtype,
        arith=stage.arith,
        deterministic=stage.deterministic,
        hidden_size=stage.hidden_size,
        vocab_size=stage.vocab_size,
        layer_ms_1=layer_ms_1,
        layer_ms_64=layer_ms_64,
        private_bytes=stage.private_bytes,
        warnings=tuple(stage.warnings),
    )


def _loop(stage: Stage, loaded: codec.Loaded, link: WorkerLink, config: codec.WorkerConfig, vitals: Vitals) -> Loop:
    from meshd.inference.worker.loop import Loop  # noqa: PLC0415  # as the stage

    return Loop(stage, link, config, vitals, ms_64=loaded.layer_ms_64 * len(config.layers))


class _Progress:
    """Tells the daemon how far loading is, in steps of a hundredth: a model has thousands of tensors."""

    def __init__(self, link: WorkerLink, stream: int) -> None:
        self._link = link
        self._stream = stream
        self._told = -1.0

    def __call__(self, part: float) -> None:
        if part >= self._told + 0.01:
            self._told = part
            self._link.send(self._stream, Message(codec.PROGRESS, {"part": part}))


def _failure(error: Exception) -> EngineFailed:
    return EngineFailed(f"loading failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
