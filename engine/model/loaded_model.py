"""A model that is ready to run, and its fingerprint."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.core.model_runner import ModelFacts
from engine.model.attention_interface import AttentionContext
from engine.model.probe import AttentionShape

_CHUNK_ELEMENTS = 2**22
"""Elements that a fingerprint reads at a time: 8 MiB in bfloat16."""
_ELEMENTS_A_WORD = 4
# 2^64 / golden ratio, as a signed word: spreads the positions over all bits
_MULTIPLIER = -7046029254386353131
# Settings that do not affect the KV of a token.
_NOT_FINGERPRINTED = ("_", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its layers bound to `context`.

    `dtype` is "float32" or "bfloat16"; `fingerprint` has 64 hex digits, the same for both dtypes.
    """

    module: Any
    config: Any
    context: AttentionContext
    facts: ModelFacts
    attention: AttentionShape
    dtype: str
    device: torch.device
    fingerprint: str


def eos_token_ids(module: Any) -> frozenset[int]:
    """The tokens that end a sequence: those of the generation settings, else of the model, as in `generate`."""
    tokens = module.generation_config.eos_token_id
    if tokens is None:
        tokens = module.config.eos_token_id
    if tokens is None:
        return frozenset()
    return frozenset([int(tokens)] if isinstance(tokens, int) else map(int, tokens))


def model_fingerprint(
    settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str] | None = None
) -> str:
    """SHA-256 (hex) of the settings and of every tensor's name, shape and the checksums of all of its elements.

    `tied` maps tensors that repeat another one, such as the output embeddings, to that one. A tied tensor counts only
    if it differs. So a loaded module, which has tied tensors, and its files, which may lack them, agree.

    Floating-point elements are converted to bfloat16, so that a float32 and a bfloat16 copy of the same weights agree,
    and the layouts of their workers differ in dtype only. Changes below bfloat16's precision are not detected. Any
    other change of one element is detected; one of several elements is with a probability of 1 - 2^-64. The checksums
    do not protect against forgery: they are sums, computed on the weights' device.
    """
    digest = hashlib.sha256(_relevant(settings))
    checksums, tied = _Checksums(), tied or {}
    contents = {name: checksums.content(tensors[name].detach()) for name in sorted(tensors)}
    for name, other in tied.items():
        if name in contents and contents[name] == contents.get(other):
            del contents[name]
    for name, content in contents.items():
        digest.update(f"{name} ".encode() + content)
    return digest.hexdigest()


def files_fingerprint(folder: Path, config: Any) -> str:
    """Returns the fingerprint of the model in `folder`, whose safetensors files `checked_model` has checked.

    `config`: the model's configuration, as `transformers` reads it.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)  # maps the file: its pages are read when they are needed
    return model_fingerprint(config.to_dict(), tensors, tied_tensors(config))


def tied_tensors(config: Any) -> Mapping[str, str]:
    """Returns the tied tensors of a `transformers` configuration: the names of tensors that equal another tensor, each
    with that tensor's name. Empty for a model that `transformers` does not know as a causal language model."""
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except (ValueError, ImportError, TypeError, RuntimeError, AttributeError, KeyError):
        return {}
    names: dict[str, str] = module.all_tied_weights_keys
    return names


def _relevant(settings: Mapping[str, Any]) -> bytes:
    relevant = {
        name: value
        for name, value in settings.items()
        if not name.startswith(_NOT_FINGERPRINTED) and not name.endswith("_token_id")
    }
    return json.dumps(relevant, sort_keys=True, default=str).encode()


class _Checksums:
    """Checksums of tensors: for each chunk the sum, modulo 2^64, of its words times odd numbers that depend on their
    positions. A difference in one word always changes the sum, as odd numbers are invertible modulo 2^64."""

    def __init__(self) -> None:
        self._odds: dict[torch.device, torch.Tensor] = {}

    def content(self, tensor: torch.Tensor) -> bytes:
        """Shape and checksums of a tensor, 8 bytes a chunk."""
        flat = tensor.reshape(-1)
        starts = range(0, len(flat), _CHUNK_ELEMENTS)
        sums = [self._sum(_words(flat[start : start + _CHUNK_ELEMENTS])) for start in starts]
        checksums = torch.stack(sums).cpu().numpy().tobytes() if sums else b""
        return str(list(tensor.shape)).encode() + checksums

    def _sum(self, words: torch.Tensor) -> torch.Tensor:
        odds = self._odds.get(words.device)
        if odds is None or len(odds) < len(words):
            odds = torch.arange(len(words), dtype=torch.int64, device=words.device)
            odds = self._odds[words.device] = odds.mul_(_MULTIPLIER).bitwise_or_(1)
        odds = odds[: len(words)]
        # On cpu `dot` needs one pass and no intermediate result. CUDA has no `dot` of integers.
        return torch.dot(words, odds) if words.device.type == "cpu" else (words * odds).sum()


def _words(elements: torch.Tensor) -> torch.Tensor:
    """A flat tensor as words of 8 bytes: four floating-point elements in bfloat16, or one element of another type."""
    if not elements.is_floating_point():
        return elements.to(torch.int64)
    halves = elements.to(torch.bfloat16)
    missing = -len(halves) % _ELEMENTS_A_WORD
    if missing or halves.storage_offset() % _ELEMENTS_A_WORD:
        halves = torch.nn.functional.pad(halves, (0, missing))
    return halves.contiguous().view(torch.int64)
