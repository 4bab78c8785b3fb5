"""Small tokenizers written as models' folders have them: byte-level pieces, chat markup, a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["the assistant answered the user", "system user assistant developer", "12 12 a  b\n\nx <think>", "naïve café"]


def byte_level(folder: Path, *, template: str | None = CHATML, begin: bool = False, **config: Any) -> Path:
    """``begin``: the post-processor writes ``<|im_start|>`` in front, as Llama's tokenizers do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    return _write(folder, tokenizer, {"template": template, "eos_token": "<|im_end|>", **config})


def spaced(folder: Path) -> Path:
    """Sentence pieces: a space in front of the first word only, bytes for what is not in the vocabulary."""
    pieces = ["<s>", "</s>", "<unk>", "▁", "a", "▁a", "b", "c", "▁b", "<", ">", "/", "s", "|"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(
        models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in pieces[:3]])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    return _write(folder, tokenizer, {"template": template, "bos_token": "<s>", "eos_token": "</s>"})


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = config.pop("template")
    if template is not None:
        config["chat_template"] = template
    document = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    return folder
