"""Pairs of models where one guesses for the other, made of one model: with layers left out, or with more of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_LAYERS = "model.layers."


def without_layers(source: Path, folder: Path, left_out: Collection[int]) -> Path:
    """A copy of the model in `source` without some of its layers: mostly it says the same, in less time."""
    tensors = load_file(source / "model.safetensors")
    count = int(json.loads((source / "config.json").read_text())["num_hidden_layers"])
    kept = [layer for layer in range(count) if layer not in left_out]
    return _saved(source, folder, tensors, kept, {})


def deeper(source: Path, folder: Path, more: int, scale: float, seed: int = 0) -> Path:
    """A copy of the model in `source` with so many copies of its last layer behind it, which write next to nothing:
    its outputs are changed by noise of about `scale` of theirs. It mostly says what the model in `source` does, and
    takes longer."""
    tensors = load_file(source / "model.safetensors")
    count = int(json.loads((source / "config.json").read_text())["num_hidden_layers"])
    noise = torch.Generator().manual_seed(seed)
    changed: dict[str, torch.Tensor] = {}
    for layer in range(count, count + more):
        for part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            weight = tensors[f"{_LAYERS}{count - 1}.{part}"]
            random = torch.randn(weight.shape, generator=noise) * weight.float().std() * scale
            changed[f"{_LAYERS}{layer}.{part}"] = random.to(weight.dtype)
    return _saved(source, folder, tensors, [*range(count), *[count - 1] * more], changed)


def _saved(
    source: Path,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    layers: list[int],
    changed: Mapping[str, torch.Tensor],
) -> Path:
    """Writes a model whose layers are copies of these."""
    folder.mkdir(parents=True)
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(_LAYERS)}
    for place, layer in enumerate(layers):
        own = f"{_LAYERS}{layer}."
        for name, tensor in tensors.items():
            if name.startswith(own):
                found[f"{_LAYERS}{place}.{name.removeprefix(own)}"] = tensor.clone()
    save_file(found | dict(changed), folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": len(layers)}
    if "layer_types" in settings:
        settings["layer_types"] = [settings["layer_types"][layer] for layer in layers]
    (folder / "config.json").write_text(json.dumps(settings))
    for path in source.iterdir():
        if not (folder / path.name).exists() and path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    return folder
