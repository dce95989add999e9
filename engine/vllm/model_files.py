"""The files of a model as engine vllm needs them: what names the model towards peers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
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
    """The tensors of a folder's safetensors files, read one at a time. Raises UnsupportedModelError without any."""

    def __init__(self, folder: Path) -> None:
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

    def __iter__(self) -> Any:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def fingerprint_of(folder: Path, settings: Mapping[str, Any], tied: Mapping[str, str] | None = None) -> str:
    """The fingerprint of the model in `folder`, whose configuration is `settings`; `tied` as in `tied_tensors`."""
    return model_fingerprint(settings, FileTensors(folder), tied)


def tied_tensors(config: Any) -> Mapping[str, str]:
    """The tensors that `transformers` ties to others in a model of this configuration, and those others.

    None for a model that `transformers` does not know as a causal one.
    """
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except (ValueError, ImportError, TypeError, RuntimeError, AttributeError, KeyError):
        return {}
    names: dict[str, str] = module.all_tied_weights_keys
    return names
