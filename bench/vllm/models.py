"""The measured models: SmolLM2, and a tiny one with a large vocabulary, where all but the model's layers costs most."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.models.sources import resolve_model

SMALL = "smollm2-135m-instruct"
WIDE = "tiny-128k"
NAMES = (SMALL, WIDE)
WIDE_VOCABULARY = 128_256
WIDE_SHAPES: Mapping[str, int] = {
    "vocab_size": WIDE_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class MeasuredModel:
    """A model in a folder."""

    name: str
    path: str
    vocabulary: int


def measured_model(name: str, folder: Path) -> MeasuredModel:
    """The model of this name, one of `NAMES`; a made one is put into `folder`. Raises NotFoundError."""
    small = Path(resolve_model(SMALL).path)
    if name == SMALL:
        vocabulary = json.loads((small / "config.json").read_text())["vocab_size"]
        return MeasuredModel(name, str(small), vocabulary)
    target = folder / WIDE
    target.mkdir()
    _save_random_weights(target)
    for file in TOKENIZER_FILES:
        shutil.copy(small / file, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps(widened(tokenizer, WIDE_VOCABULARY)))
    return MeasuredModel(name, str(target), WIDE_VOCABULARY)


def widened(tokenizer: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """The content of a `tokenizer.json` in which every id below `vocabulary` has a text.

    No text is encoded to the new tokens.
    """
    model = tokenizer["model"]
    known = set(model["vocab"].values())
    new = {f"Ġ<{number}>": number for number in range(vocabulary) if number not in known}
    return {**tokenizer, "model": {**model, "vocab": {**model["vocab"], **new}}}


def _save_random_weights(folder: Path) -> None:
    # Imported here: it takes seconds.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**WIDE_SHAPES)).to(torch.bfloat16).save_pretrained(folder)
