"""An architecture's own modules, cut to a layer range, with the checkpoint's bytes in place.

The whole model is built without memory (meta device) from its config, so that every choice made per layer number is right; then
it is pruned to ``[start, end)``, layers are renumbered from 0, and only that range's tensors are put in, zero-copy where dtype
and layout allow. Remote code is never run. Raises `ModelRefused` for anything that would make the result wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from meshd.errors import ModelRefused
from meshd.inference.worker import lean
from meshd.inference.worker.placement import (
    AFTER_LAYERS,
    BEFORE_LAYERS,
    Anatomy,
    Placed,
    anatomy,
    named,
    place,
    unloaded,
    with_stored_head,
)
from meshd.inference.worker.weights import Checkpoint
from meshd.vocabulary import LayerRange

# Lists in a config with one value per layer, which ``forward`` looks up by the local layer number.
PER_LAYER_SETTINGS: Final = ("layer_types", "no_rope_layers", "mlp_layer_types")
_NUMBERS: Final = ("layer_idx", "layer_id")
OTHER_SENSES: Final = (
    "vision_tower",
    "visual",
    "vision_model",
    "multi_modal_projector",
    "audio_tower",
    "vision_embed_tokens",
)

DTYPES: Final[dict[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.bfloat16,  # weights int8, everything else bf16
}


class PassThrough(nn.Module):
    """Stands where a module of another stage would be."""

    def forward(self, x: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        return x


class NoPositions(nn.Module):
    """Stands for learned position embeddings on a later stage, where their sum is discarded anyway."""

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.zeros(1)


@dataclass(slots=True)
class Skeleton:
    """A pruned model with weights. ``config`` is its text config, already cut to the range."""

    model: Any
    decoder: Any
    layers_name: str
    layers: list[nn.Module]
    config: Any
    held: LayerRange
    num_layers: int
    dtype: str
    torch_dtype: torch.dtype
    per_layer: dict[str, list[Any]]  # the range's share of PER_LAYER_SETTINGS
    where: dict[str, str]  # parameter name -> what people call it
    checkpoint: Checkpoint

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def first(self) -> bool:
        return self.held.start == 0

    def at_most(self, rows: int) -> int:
        """``rows``, or as many as the model has positions for: learned ones end, and some rotary ones change there."""
        context = getattr(self.config, "max_position_embeddings", None)
        return min(rows, context) if isinstance(context, int) and context > 0 else rows

    @property
    def last(self) -> bool:
        return self.held.end == self.num_layers


def build(folder: Path, held: LayerRange, dtype: str) -> Skeleton:
    """The modules of ``held`` with their weights; ``dtype`` "auto" is the checkpoint's."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    checkpoint = Checkpoint(folder)
    config = read_config(folder)
    dtype = checkpoint_dtype(config) if dtype == "auto" else dtype
    if dtype not in DTYPES:
        raise ModelRefused(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    torch_dtype = DTYPES[dtype]
    model = _blank(config, torch_dtype)
    tensors = named(model, checkpoint)
    parts = with_stored_head(anatomy(model), tensors)
    if held.end > parts.num_layers:
        raise ModelRefused(f"{folder} has {parts.num_layers} layers, {held} is not among them")
    placed = place(model, parts, checkpoint, tensors, held)
    skeleton = _prune(model, parts, checkpoint, held, dtype)
    _load(skeleton, parts, checkpoint, placed)
    return skeleton


def read_config(folder: Path) -> Any:
    """The model's config; refuses what cannot be cut, and what is not stored as plain numbers."""
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except StrictDataclassError as error:  # in several lines, of which the last says what is wrong
        raise ModelRefused(f"{folder / 'config.json'}: {str(error).splitlines()[-1].strip()}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the last for a dtype that torch lacks
        raise ModelRefused(f"{folder / 'config.json'}: {str(error).splitlines()[0]}") from None
    text = config.get_text_config()
    kind = config.model_type
    if getattr(config, "quantization_config", None):
        raise ModelRefused(f"{kind}: the checkpoint is quantised; pull one with plain bf16, fp16 or fp32 weights")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{kind} is an encoder-decoder, not a causal language model")
    if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "hidden_size_per_layer_input", 0):
        raise ModelRefused(f"{kind} cannot be cut into stages: its layers use other layers' keys or inputs")
    if getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ModelRefused(f"{kind} attends in both directions: it does not generate text")
    return config


def checkpoint_dtype(config: Any) -> str:
    """How this project spells the dtype that a config declares; fp32 if it declares none."""
    declared = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(declared, "fp32")


def _blank(config: Any, dtype: torch.dtype) -> Any:
    for factory in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in factory._model_mapping:
            break
    else:
        raise ModelRefused(f"{config.model_type} is not a causal language model that this engine knows")
    try:
        # nothing is to be initialised: even without memory that takes a second
        with lean.without_algebra(), no_init_weights(), torch.device("meta"):
            model = factory.from_config(config, dtype=dtype, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise ModelRefused(f"{config.model_type}: {str(error).splitlines()[0]}") from None
    model.eval()
    return model


def _prune(model: Any, parts: Anatomy, checkpoint: Checkpoint, held: LayerRange, dtype: str) -> Skeleton:
    decoder, config = parts.decoder, model.config.get_text_config()
    first, last = held.start == 0, held.end == parts.num_layers
    kept = list(getattr(decoder, parts.layers_name))[held.start : held.end]
    setattr(decoder, parts.layers_name, nn.ModuleList(kept))
    for layer in kept:
        for module, attribute in numbered(layer):
            setattr(module, attribute, getattr(module, attribute) - held.start)
    per_layer: dict[str, list[Any]] = {}
    for setting in PER_LAYER_SETTINGS:
        values = getattr(config, setting, None)
        if isinstance(values, list) and len(values) == parts.num_layers:
            per_layer[setting] = values[held.start : held.end]
    _replace_ends(model, parts, first=first, last=last)
    skeleton = Skeleton(
        model=model,
        decoder=decoder,
        layers_name=parts.layers_name,
        layers=kept,
        config=config,
        held=held,
        num_layers=parts.num_layers,
        dtype=dtype,
        torch_dtype=DTYPES[dtype],
        per_layer=per_layer,
        where={},
        checkpoint=checkpoint,
    )
    cut_config(skeleton, LayerRange(0, len(held)))
    return skeleton


def numbered(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules of a layer that know its number, each with what it calls it."""
    return [
        (module, name)
        for module in layer.modules()
        for name in _NUMBERS
        if isinstance(getattr(module, name, None), int)
    ]


def _replace_ends(model: Any, parts: Anatomy, *, first: bool, last: bool) -> None:
    """Put stand-ins where embedding, norm, head and other senses would be but are not this stage's."""
    decoder, embedding = parts.decoder, model.get_input_embeddings()
    for name, module in list(decoder.named_children()):
        # a norm without weights stays: some architectures use the same one before the layers
        if name in AFTER_LAYERS and not last and any(True for _ in module.parameters()):
            setattr(decoder, name, PassThrough())
        if name in BEFORE_LAYERS and not first and not (module is embedding and last and parts.tied):
            setattr(decoder, name, NoPositions() if name in ("wpe", "embed_positions") else PassThrough())
    if parts.head_path and not last:
        owner, _, leaf = parts.head_path.rstrip(".").rpartition(".")
        setattr(model.get_submodule(owner) if owner else model, leaf, PassThrough())
    for owner in (model, model.base_model):
        for name in OTHER_SENSES:
            if hasattr(owner, name):
                delattr(owner, name)


def cut_config(skeleton: Skeleton, local: LayerRange) -> None:
    """Make the configs describe the held layers ``local`` only (numbers count from the held range's start)."""
    seen = {id(config): config for config in (skeleton.config, skeleton.decoder.config)}
    for config in seen.values():
        for setting, values in skeleton.per_layer.items():
            with suppress(AttributeError):  # computed from the number of layers
                setattr(config, setting, values[local.start : local.end])
        config.num_hidden_layers = len(local)


def _load(skeleton: Skeleton, parts: Anatomy, checkpoint: Checkpoint, placed: list[Placed]) -> None:
    model = skeleton.model
    ties = parts.tied and skeleton.last
    tensors = {item.target: checkpoint.view(item.source) for item in placed}
    if ties:
        model.tie_weights()
    settings = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model), dtype=skeleton.torch_dtype)
    try:
        info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelRefused(f"{checkpoint.folder}: {str(error).splitlines()[0]}") from None
    if info.mismatched_keys or info.conversion_errors or info.error_msgs:
        what = [*info.mismatched_keys, *info.conversion_errors.items(), *info.error_msgs][0]
        raise ModelRefused(f"{checkpoint.folder}: layers {skeleton.held} do not load: {what}")
    if ties:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    _fill_buffers(model)
    for missing in unloaded(model):
        raise ModelRefused(f"{checkpoint.folder}: {_original_name(skeleton, parts, missing)} is in none of its files")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    skeleton.where = {name: _original_name(skeleton, parts, name) for name, _ in model.named_parameters()}


def _original_name(skeleton: Skeleton, parts: Anatomy, name: str) -> str:
    """The tensor's name and layer as the whole model counts them."""
    if not name.startswith(parts.layers_path):
        return name
    local, _, rest = name[len(parts.layers_path) :].partition(".")
    number = int(local) + skeleton.held.start
    return f"layer {number}: {parts.layers_path}{number}.{rest}"


def _fill_buffers(model: Any) -> None:
    """Compute what is not stored (rotary frequencies, embedding scales) with the architecture's own initialisation."""
    for module in model.modules():
        blank = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not blank:
            continue
        for name in blank:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        with torch.no_grad(), _parameters_locked(module):
            model._init_weights(module)


@contextmanager
def _parameters_locked(module: nn.Module) -> Iterator[None]:
    """Initialisation must not touch loaded weights: they are marked, as transformers marks them itself."""
    for parameter in module.parameters():
        parameter._is_hf_initialized = True
    yield
