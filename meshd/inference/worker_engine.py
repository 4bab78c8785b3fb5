"""The daemon's side of an engine worker: `Engine` by a child process that owns torch.

Owns the child, the link to it and the translation of calls. Decides nothing: who loads what and when to start again is the
daemon's; it learns from `closed` that a worker has died and starts another with the next generation.

Invariants: every pending and later call of a dead worker raises EngineFailed with the worker's last words; a call that is
cancelled is withdrawn from the worker; weights that cannot fit are refused before a process is started.
Units: bytes, seconds. Errors of `spawn`: DoesNotFit, ModelRefused, EngineFailed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trio

from meshd.errors import BadFrame, DoesNotFit, EngineFailed, LinkLost, MeshdError
from meshd.inference import codec
from meshd.inference.child import Child
from meshd.inference.engine import EngineHealth, EngineInfo, Opening, Ran, Run, Settle
from meshd.links.fields import amount_untrusted, integer_untrusted
from meshd.links.multiplex import Multiplexer
from meshd.links.peer_link import LinkTiming, PeerLink
from meshd.links.peer_stream import PeerStream
from meshd.links.wire import Message, Stream
from meshd.vocabulary import MB, LayerRange, ModelSpec, NodeId, SessionId

RUNTIME_BYTES: Final = 330 * MB
"""What torch and transformers take before any weight (measured)."""

_MODULE: Final = "meshd.inference.worker"
_STALLED_S: Final = 300.0  # loading makes progress or has failed: one tensor never takes that long to page in
_ELEMENT_BYTES: Final = {"int8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
_MAX_DROPS: Final = 1024
_PIECE_BYTES: Final = 16 * MB  # of a boundary log in one message
_WIDEST_BYTES: Final = 4  # of a value in such a row
_DYING_S: Final = 1.0
_SILENT_MS: Final = 1000.0
_TIMING: Final = LinkTiming(idle_ping_s=0.25, idle_silence_s=30.0)
"""A ping costs 0.1 ms, and a hop's answer to its own pings carries what the last one told. Silence of a process on the same
device is a matter of load: half a minute of it means that the process is stopped."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker computes and what it may take. ``memory_bytes`` is all of it: runtime, weights, KV (None: not limited).
    ``kv_bytes`` shrinks to what the weights leave."""

    dtype: str = "auto"
    threads: int = 0  # 0: physical cores minus one
    deterministic: bool = True
    prepack: str = "auto"
    memory_bytes: int | None = None
    kv_bytes: int = 256 * MB
    max_batch: int = 32
    prefill_rows: int = 128
    max_queue: int = 256
    prefix_bytes: int | None = None  # of ``kv_bytes``, for the beginnings of prompts (None: half)
    prefix_ttl_s: float = 3600.0


def config_for(folder: Path, spec: ModelSpec, layers: LayerRange, options: WorkerOptions) -> codec.WorkerConfig:
    """What to tell the worker. Raises DoesNotFit, saying by how much."""
    weights = _weight_bytes(spec, layers, options.dtype)
    kv_bytes, private_bytes = options.kv_bytes, None
    if options.memory_bytes is not None:
        left = options.memory_bytes - RUNTIME_BYTES - weights
        if left <= 0:
            raise DoesNotFit(
                f"layers {layers} of {spec.name} take {_mb(weights)} MB and the runtime {_mb(RUNTIME_BYTES)} MB:"
                f" {_mb(-left)} MB more than the {options.memory_bytes // MB} MB this node gives"
            )
        kv_bytes = min(kv_bytes, left)
        private_bytes = left - kv_bytes
    return codec.WorkerConfig(
        folder=str(folder.resolve()),
        layers=layers,
        dtype=options.dtype,
        threads=options.threads or _default_threads(),
        deterministic=options.deterministic,
        prepack=options.prepack,
        private_budget_bytes=private_bytes,
        kv_budget_bytes=kv_bytes,
        context=spec.context,
        max_batch=options.max_batch,
        prefill_rows=options.prefill_rows,
        max_queue=options.max_queue,
        digest=spec.digest,
        prefix_bytes=kv_bytes // 2 if options.prefix_bytes is None else min(kv_bytes, options.prefix_bytes),
        prefix_ttl_s=options.prefix_ttl_s,
    )


def _weight_bytes(spec: ModelSpec, layers: LayerRange, dtype: str) -> int:
    stored = spec.weight_bytes(layers)
    if dtype == "auto" or not (dtype in _ELEMENT_BYTES and spec.dtype in _ELEMENT_BYTES):
        return stored
    return stored * _ELEMENT_BYTES[dtype] // _ELEMENT_BYTES[spec.dtype]


def _mb(size_bytes: int) -> int:
    return -(-size_bytes // MB)


def _default_threads() -> int:
    import psutil  # noqa: PLC0415  # only when nobody says how many

    return max(1, (psutil.cpu_count(logical=False) or os.cpu_count() or 1) - 1)


class WorkerEngine:
    """`Engine` by a worker process. Make it with `WorkerEngine.spawn`."""

    def __init__(self, child: Child, link: PeerLink, info: EngineInfo) -> None:
        self._child = child
        self._link = link
        self._info = info
        self._closing = False
        self._drops, self._dropped = trio.open_memory_channel[SessionId](_MAX_DROPS)

    @classmethod
    async def spawn(
        cls,
        nursery: trio.Nursery,
        folder: Path,
        spec: ModelSpec,
        layers: LayerRange,
        *,
        generation: int,
        log: Callable[[str], None],
        options: WorkerOptions | None = None,
        progress: Callable[[float], None] = lambda _part: None,
    ) -> WorkerEngine:
        """Start a worker and load ``layers``; returns when they can be run. ``nursery`` holds its tasks, ``log`` gets its
        stderr line by line, ``progress`` 0..1. Raises DoesNotFit, ModelRefused, EngineFailed."""
        options = options or WorkerOptions()
        config = config_for(folder, spec, layers, options)
        try:
            child = await Child.start(nursery, _MODULE, environment=_environment(config), log=log)
        except OSError as error:
            raise EngineFailed(f"the engine worker did not start: {error}") from error
        try:
            link = PeerLink(
                child.stream,
                Multiplexer(dialler=True),
                NodeId("engine"),
                accept=PeerStream.cancel,  # a worker answers, it never asks
                timing=_TIMING,
            )
            nursery.start_soon(_serve, link, child)
            loaded = await _load(child, link, config, progress)
        except BaseException:
            child.kill()
            raise
        info = EngineInfo(
            spec=spec,
            layers=layers,
            dtype=loaded.dtype,
            arith=loaded.arith,
            deterministic=loaded.deterministic,
            generation=generation,
            layer_ms_1=loaded.layer_ms_1,
            layer_ms_64=loaded.layer_ms_64,
            warnings=loaded.warnings,
        )
        engine = cls(child, link, info)
        nursery.start_soon(engine._send_drops)
        nursery.start_soon(engine._stop_drops)
        return engine

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def pid(self) -> int:
        """The worker's process."""
        return self._child.pid

    def health(self) -> EngineHealth:
        try:
            health = codec.health_untrusted(self._link.pong)
        except BadFrame:
            health = EngineHealth()
        if self._alive:
            # Pings come four times a second: a process that does not answer for longer is as good as busy.
            silent_ms = (trio.current_time() - self._link.last_heard) * 1e3
            return health if silent_ms < _SILENT_MS else replace(health, busy_ms=max(health.busy_ms, silent_ms))
        return replace(health, alive=False, busy_ms=0.0, reason=self._why())

    async def closed(self) -> str:
        """Wait until the worker is gone; why."""
        await self._child.gone.wait()
        return self._why()

    async def run(self, run: Run) -> Ran:
        return codec.ran_untrusted(await self._call(codec.run_message(run)))

    def submit(self, run: Run, settle: Settle) -> Callable[[], None] | None:
        def answer(reply: Message | MeshdError | None) -> None:
            settle(self._outcome(reply))

        if not self._alive:
            return None  # `run` has the reason
        try:
            stream = self._link.start(codec.run_message(run), last=True)
        except MeshdError:
            return None
        stream.tell(answer)
        return stream.cancel

    def _outcome(self, reply: Message | MeshdError | None) -> Ran | MeshdError:
        try:
            if isinstance(reply, Message):
                return codec.ran_untrusted(reply)
        except BadFrame as error:
            return error
        if reply is None or isinstance(reply, LinkLost):
            return EngineFailed(f"the engine worker is gone: {self._why()}")
        return reply

    async def boundary(self, session: SessionId, layers: LayerRange, start: int, end: int) -> bytes:
        """Read in pieces: the rows of a long prompt are more than one message may hold."""
        step = max(1, _PIECE_BYTES // (self._info.spec.hidden_size * _WIDEST_BYTES))
        rows = bytearray()
        for at in range(start, max(end, start + 1), step):
            head = {"session": session, "layers": layers.json(), "start": at, "end": min(end, at + step)}
            rows += (await self._call(Message(codec.BOUNDARY, head))).body
        return bytes(rows)

    async def forward(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        return (await self._call(Message(codec.FORWARD, {"layers": layers.json(), "n": n}, rows))).body

    async def embed(self, rows: bytes, n: int) -> bytes:
        return (await self._call(Message(codec.EMBED, {"n": n}, rows))).body

    async def forward_embedded(self, layers: LayerRange, rows: bytes, n: int) -> bytes:
        head = {"layers": layers.json(), "n": n, "embedded": True}
        return (await self._call(Message(codec.FORWARD, head, rows))).body

    async def lm_head(self, rows: bytes, n: int) -> bytes:
        return (await self._call(Message(codec.LM_HEAD, {"n": n}, rows))).body

    async def open(self, opening: Opening) -> int:
        reply = await self._call(codec.open_message(opening))
        return integer_untrusted(reply.head, "have", 0, len(opening.ids) // 4)

    def drop(self, session: SessionId) -> None:
        try:
            self._drops.send_nowait(session)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return  # silence ends the session too, only later

    async def aclose(self) -> None:
        self._closing = True
        self._drops.close()
        await self._child.aclose()

    @property
    def _alive(self) -> bool:
        return not self._closing and not self._child.gone.is_set()

    def _why(self) -> str:
        return "stopped" if self._closing else self._child.reason or "the link to the engine worker broke"

    async def _call(self, message: Message) -> Message:
        if not self._alive:
            raise EngineFailed(f"the engine worker is gone: {self._why()}")
        try:
            reply = await _ask(self._link, message)
        except LinkLost:
            await _last_words(self._child)
            raise EngineFailed(f"the engine worker is gone: {self._why()}") from None
        if reply is None:
            raise EngineFailed(f"the engine worker did not answer a {message.kind}")
        return reply

    async def _send_drops(self) -> None:
        async for session in self._dropped:
            try:
                await _ask(self._link, Message(codec.DROP, {"session": session}))
            except MeshdError:
                continue  # the session is gone, one way or the other

    async def _stop_drops(self) -> None:
        await self._child.gone.wait()
        self._drops.close()


async def _serve(link: PeerLink, child: Child) -> None:
    """Run the link; a worker without one is of no use."""
    await link.run()
    await _last_words(child)


async def _last_words(child: Child) -> None:
    """Let a worker whose link broke die by itself, so that its own reason is kept; then make sure."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(_DYING_S):
            await child.gone.wait()
        child.kill()
        await child.gone.wait()


async def _ask(link: PeerLink, message: Message) -> Message | None:
    """One call: a stream with one message and at most one answer. Raises LinkLost or the worker's error."""
    with await link.open(message, last=True) as stream:
        return await stream.receive()


async def _load(
    child: Child, link: PeerLink, config: codec.WorkerConfig, progress: Callable[[float], None]
) -> codec.Loaded:
    try:
        with await link.open(codec.load_message(config), last=True) as stream:
            return await _loaded(stream, progress)
    except trio.TooSlowError:
        raise EngineFailed(f"loading layers {config.layers} made no progress for {_STALLED_S:.0f} s") from None
    except LinkLost:
        await _last_words(child)
        raise EngineFailed(f"the engine worker died while loading layers {config.layers}: {child.reason}") from None


async def _loaded(stream: Stream, progress: Callable[[float], None]) -> codec.Loaded:
    while True:
        with trio.fail_after(_STALLED_S):
            message = await stream.receive()
        if message is None:
            raise LinkLost("the engine worker said nothing")
        if message.kind != codec.PROGRESS:
            return codec.loaded_untrusted(message)
        progress(min(1.0, amount_untrusted(message.head, "part")))


def _environment(config: codec.WorkerConfig) -> dict[str, str]:
    """Read by the arithmetic libraries when they are imported, so it cannot be set any later."""
    threads = str(config.threads)
    return {
        # Threads that spin while they wait take the processor from the daemon and from other workers (measured: 137 ms
        # at the 90th percentile instead of 20).
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Weights are streamed through once a token, and with pages of 4 KB that is a page walk every 64 cache lines: copies of
        # weights in pages of 2 MB decode 1.2 to 1.8 times as fast (measured, in a virtual machine; 1 % more memory).
        "GLIBC_TUNABLES": ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"))),
    }
