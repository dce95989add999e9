"""Converts a GGUF file to a folder of bfloat16 safetensors with configuration, tokenizer and chat template.

`python -m splitserve.models.model_conversion GGUF TARGET NAME [--split-digits]`, run by `splitserve.models.fetch`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast


def convert(gguf: Path, target: Path, name: str, *, split_digits: bool) -> None:
    """Dequantizes and saves the model.

    `name` becomes the configuration's model name. Raises the errors of `transformers` for an unreadable file.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if split_digits:
        _split_digits(tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    loaded.config.name_or_path = name
    loaded.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for path in target.iterdir():  # safetensors writes files that only the owner can read
        path.chmod(0o644)


def _split_digits(tokenizer: object) -> None:
    """Inserts a digit splitter before the byte-level pre-tokenizer, as in the model's original tokenizer."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError("the GGUF's tokenizer is not a fast tokenizer")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


if __name__ == "__main__":
    gguf_file, folder, model, *options = sys.argv[1:]
    convert(Path(gguf_file), Path(folder), model, split_digits=bool(options))
