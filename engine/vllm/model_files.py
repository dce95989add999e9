"""The fingerprint of a model that vLLM loads, from the model's files."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from engine.kv_cache.memory import DTYPES
from engine.model.loaded_model import model_fingerprint
from splitserve.errors import UnsupportedModelError

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FileTensors(Mapping[str, torch.Tensor]):
    """The tensors of a folder's safetensors files, by name. Each access reads one tensor."""

    def __init__(self, folder: Path) -> None:
        """Raises UnsupportedModelError for a folder without safetensors files."""
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)
        if not self._files:
            raise UnsupportedModelError(f"model {folder}: with engine vllm it needs safetensors files")

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def fingerprint_of(folder: Path, settings: Mapping[str, Any], tied: Mapping[str, str] | None = None) -> str:
    """Returns the fingerprint of the model in `folder`.

    `settings`: the model's configuration, as `transformers` reads it. `tied`: the result of `tied_tensors`. Raises
    UnsupportedModelError for a folder without safetensors files.
    """
    return model_fingerprint(settings, FileTensors(folder), tied)


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
