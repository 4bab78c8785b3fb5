"""``POST /embed``, ``/forward``, ``/lm-head``: this node's layers for tools, stateless, one tensor in and one out.

Owns the checks of what came in against what this node holds; the format is `tensor_wire`, the arithmetic the engine's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import trio

from meshd.api.message import Request, Response
from meshd.api.tensor_wire import (
    CHUNK_BYTES,
    ITEM_BYTES,
    Tensor,
    check_finite,
    decode_untrusted,
    encode,
    from_f32,
    residual_dtype,
)
from meshd.errors import BadTensor, CallerError, RangeNotHeld
from meshd.inference.engine import Embedding, Engine
from meshd.inference.logits import most_rows
from meshd.vocabulary import LayerRange

BODY_BYTES = 64 << 20

_BINARY = (("Content-Type", "application/octet-stream"),)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Checked input: ``lead`` is its shape without the last axis of a row, given back in the answer."""

    data: bytes
    n: int
    lead: tuple[int, ...]


async def embed(engine: Engine | None, request: Request) -> Response:
    """Ids in, the residual that enters layer 0 out."""
    held = _held(engine)
    _need(held, LayerRange(0, 1))
    rows = _ids(_only(request.body, "tokens"), held)
    hidden = await _embedding(held).embed(rows.data, rows.n)
    return _hidden(held, rows, hidden)


async def forward(engine: Engine | None, request: Request) -> Response:
    """Through ``X-Layer-Range`` (default: all that is held)."""
    held = _held(engine)
    layers = _layer_range(request.headers.get("x-layer-range"), held)
    tensors = decode_untrusted(request.body)
    if "hidden" in tensors:
        rows = await _residual(tensors["hidden"], held)
        call = _embedding(held).forward_embedded if layers.start == 0 else held.forward
    else:
        if layers.start:
            raise BadTensor(f"layers {layers} want a tensor named hidden", param="hidden")
        rows = _ids(_named(tensors, "tokens"), held)
        call = held.forward
    return _hidden(held, rows, await call(layers, rows.data, rows.n))


async def lm_head(engine: Engine | None, request: Request) -> Response:
    """Residual after the last layer in, float32 logits out."""
    held = _held(engine)
    spec = held.info.spec
    _need(held, LayerRange(spec.num_layers - 1, spec.num_layers))
    rows = await _residual(_only(request.body, "hidden"), held)
    most = most_rows(spec.vocab_size)
    if rows.n > most:
        raise BadTensor(f"logits of {rows.n} rows are too large for one answer; send at most {most}", param="hidden")
    logits = await held.lm_head(rows.data, rows.n)
    shape = (*rows.lead, spec.vocab_size)
    return Response(200, encode({"logits": Tensor("F32", shape, logits)}), _BINARY)


def _held(engine: Engine | None) -> Engine:
    if engine is None:
        raise RangeNotHeld("this node holds no layers; GET /mesh/peers says who does")
    return engine


def _embedding(engine: Engine) -> Embedding:
    if not isinstance(engine, Embedding):
        raise RangeNotHeld("this node's engine does not give out the embedding alone", held=engine.info.layers)
    return engine


def _need(engine: Engine, layers: LayerRange) -> None:
    held = engine.info.layers
    if not held.covers(layers):
        raise RangeNotHeld(f"layers {layers} are not held here, {held} are", held=held, param="X-Layer-Range")


def _layer_range(text: str | None, engine: Engine) -> LayerRange:
    if text is None:
        return engine.info.layers
    try:
        layers = LayerRange.parse(text)
    except ValueError as error:
        raise CallerError(f"X-Layer-Range: {error}", param="X-Layer-Range") from None
    _need(engine, layers)
    return layers


def _only(body: bytes, name: str) -> Tensor:
    return _named(decode_untrusted(body), name)


def _named(tensors: dict[str, Tensor], name: str) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        found = ", ".join(sorted(key[:40] for key in tensors)) or "none"
        raise BadTensor(f"a tensor named {name} is wanted; found {found}", param=name)
    return tensor


def _counted(lead: tuple[int, ...], engine: Engine, param: str) -> int:
    """How many positions a shape stands for: ``[n]`` or ``[1, n]``, within the context."""
    context = engine.info.spec.context
    if len(lead) not in (1, 2) or (len(lead) == 2 and lead[0] != 1) or not 0 < prod(lead) <= context:
        raise BadTensor(f"{param} must hold one sequence of 1 to {context} positions, not {list(lead)}", param=param)
    return prod(lead)


def _ids(tensor: Tensor, engine: Engine) -> _Rows:
    n = _counted(tensor.shape, engine, "tokens")
    if tensor.dtype not in ("I64", "I32"):
        raise BadTensor(f"tokens must be I64, not {tensor.dtype}", param="tokens")
    ids = struct.unpack(f"<{n}{'q' if tensor.dtype == 'I64' else 'i'}", tensor.data)
    vocab = engine.info.spec.vocab_size
    if not 0 <= min(ids) <= max(ids) < vocab:
        raise BadTensor(f"tokens has an id outside 0..{vocab - 1}", param="tokens")
    return _Rows(struct.pack(f"<{n}i", *ids), n, tensor.shape)


async def _residual(tensor: Tensor, engine: Engine) -> _Rows:
    """Residual rows in the engine's element type; float32 is taken too."""
    width = engine.info.spec.hidden_size
    if not tensor.shape or tensor.shape[-1] != width:
        raise BadTensor(f"hidden must have rows of {width} values, not shape {list(tensor.shape)}", param="hidden")
    lead = tensor.shape[:-1]
    n = _counted(lead, engine, "hidden")
    wanted = residual_dtype(engine.info.dtype)
    taken = list(dict.fromkeys((wanted, "F32"))) if wanted != "U8" else [wanted]  # digests are no numbers
    if tensor.dtype not in taken:
        raise BadTensor(f"hidden must be {' or '.join(taken)}, not {tensor.dtype}", param="hidden")
    await _in_chunks(tensor.data, lambda part: _finite(part, tensor.dtype))
    if tensor.dtype == wanted:
        return _Rows(tensor.data, n, lead)
    return _Rows(await _in_chunks(tensor.data, lambda part: from_f32(part, wanted)), n, lead)


def _finite(part: bytes, dtype: str) -> bytes:
    check_finite(part, dtype)
    return part


async def _in_chunks(data: bytes, convert: Callable[[bytes], bytes]) -> bytes:
    """Convert without holding up everybody else."""
    parts = []
    for at in range(0, len(data), CHUNK_BYTES):
        parts.append(convert(data[at : at + CHUNK_BYTES]))
        await trio.lowlevel.checkpoint()
    return b"".join(parts)


def _hidden(engine: Engine, rows: _Rows, hidden: bytes) -> Response:
    width = engine.info.spec.hidden_size
    dtype = residual_dtype(engine.info.dtype)
    if len(hidden) != rows.n * width * ITEM_BYTES[dtype]:
        dtype = next((name for name in ("F32", "BF16") if len(hidden) == rows.n * width * ITEM_BYTES[name]), dtype)
    return Response(200, encode({"hidden": Tensor(dtype, (*rows.lead, width), hidden)}), _BINARY)
