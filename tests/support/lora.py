"""LoRA adapters with random weights, and their base models with those weights merged in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

ALPHA = 8
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Weights = dict[str, npt.NDArray[np.float32]]


def make_adapter(base: Path, folder: Path, seed: int, rank: int = 4, **config: Any) -> Path:
    """Writes an adapter for all linear layers of the model in `base`; returns its folder."""
    pick = np.random.default_rng(seed)
    weights: Weights = {}
    for module, (out, into) in _linears(base).items():
        name = f"base_model.model.{module}"
        weights[f"{name}.lora_A.weight"] = (pick.standard_normal((rank, into)) * 0.3).astype(np.float32)
        weights[f"{name}.lora_B.weight"] = (pick.standard_normal((out, rank)) * 0.3).astype(np.float32)
    return write_adapter(folder, weights, r=rank, **config)


def write_adapter(folder: Path, weights: Weights, **config: Any) -> Path:
    """Writes the two files of an adapter."""
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": ALPHA, "target_modules": list(MODULES)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none"} | config))
    return folder


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """Writes the base model with an adapter's matrices added to its weights: W + B A alpha / r."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    matrices = load_file(adapter / "adapter_model.safetensors")
    shutil.copytree(base, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for module in _linears(base):
        name = f"base_model.model.{module}"
        change = matrices[f"{name}.lora_B.weight"] @ matrices[f"{name}.lora_A.weight"]
        weights[f"{module}.weight"] += change * np.float32(config["lora_alpha"] / config["r"])
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def _linears(base: Path) -> dict[str, tuple[int, int]]:
    """The shapes `[out, in]` of a model's linear layers, by module."""
    names = {name: weight.shape for name, weight in load_file(base / "model.safetensors").items()}
    found = {name.removesuffix(".weight"): (shape[0], shape[-1]) for name, shape in names.items()}
    return {module: shape for module, shape in found.items() if module.endswith(MODULES)}
