"""What a worker's imports leave out, and that it is all there for whoever asks."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

_LOADED = """
import sys
import meshd.inference.worker.stage, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from meshd.inference.worker import lean
from transformers.initialization import no_init_weights
with lean.without_algebra(), no_init_weights(), torch.device("meta"):
    AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1))
print([name for name in ("sympy", "torch._dynamo.config", "torch.distributed.tensor") if name in sys.modules])
import sympy.core
from torch.fx.experimental.symbolic_shapes import ShapeEnv
print(sympy.core.Basic is sympy.Basic, ShapeEnv.__name__)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist(), torch._dynamo.config.__name__)
"""


def test_compiler_and_algebra_are_absent_until_somebody_asks() -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "True ShapeEnv", "[2.0, 2.0] torch._dynamo.config"]
