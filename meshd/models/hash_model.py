"""The rehearsal model ``hash:L``: a model without weights whose identity is (L, seed).

Owns the reading of ``--model hash:L[,layer_mb=M][,step_ms=T][,seed=S]``. What it costs (``layer_mb``, ``step_ms``) is a node's
own business and no part of the identity: nodes of different sizes rehearse together. Pure. Errors: UsageError naming the
option.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from meshd.errors import UsageError
from meshd.models.manifest import DIGEST_CHARS
from meshd.vocabulary import MB, ModelSpec

CONTEXT: Final = 8192
VOCAB: Final = 256  # a token is a byte
ROW_BYTES: Final = 16  # the residual is a digest
DTYPE: Final = "hash"
LAYERS_CAP: Final = 10_000
KV_BYTES: Final = 16  # the digest a layer keeps of each position

_OPTION: Final = re.compile(r"(layer_mb|step_ms|seed)=([0-9]{1,9}(?:\.[0-9]{1,6})?)\Z")


@dataclass(frozen=True, slots=True)
class HashModel:
    """A rehearsal model as one node runs it. ``step_ms`` is for all layers together; a stage sleeps its share of it."""

    num_layers: int
    seed: int = 0
    layer_mb: float = 100.0
    step_ms: float = 0.0

    @property
    def name(self) -> str:
        return f"hash:{self.num_layers}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"meshd hash model 1 {self.num_layers} {self.seed}".encode()).hexdigest()[:DIGEST_CHARS]

    @property
    def spec(self) -> ModelSpec:
        """What election, routing and the API see: ``layer_mb`` stands for weights, ids are bytes, nothing ends an answer."""
        return ModelSpec(
            name=self.name,
            digest=self.digest,
            dtype=DTYPE,
            num_layers=self.num_layers,
            hidden_size=ROW_BYTES,
            vocab_size=VOCAB,
            layer_bytes=(int(self.layer_mb * MB),) * self.num_layers,
            embed_bytes=0,
            head_bytes=0,
            tied=False,
            kv_bytes_per_token_layer=KV_BYTES,
            context=CONTEXT,
        )


def is_hash_model(text: str) -> bool:
    """True when ``--model`` means a rehearsal model, well spelt or not."""
    return text.startswith("hash:")


def parse_hash_model(text: str) -> HashModel:
    """Read ``hash:L[,layer_mb=M][,step_ms=T][,seed=S]``."""
    head, *options = text.split(",")
    match = re.fullmatch(r"hash:([1-9][0-9]{0,4})", head.strip())
    if match is None or int(match[1]) > LAYERS_CAP:
        raise UsageError(f"--model {text!r}: hash:L with L from 1 to {LAYERS_CAP} is wanted")
    seed, sizes = 0, {"layer_mb": 100.0, "step_ms": 0.0}
    seen: set[str] = set()
    for option in options:
        found = _OPTION.match(option.strip())
        if found is None or found[1] in seen or (found[1] == "seed" and "." in found[2]):
            raise UsageError(f"--model {text!r}: {option!r} is not layer_mb=M, step_ms=T or seed=S, each once")
        seen.add(found[1])
        if found[1] == "seed":
            seed = int(found[2])
        else:
            sizes[found[1]] = float(found[2])
    return HashModel(int(match[1]), seed, **sizes)
