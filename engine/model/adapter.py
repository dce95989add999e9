"""The files of LoRA adapters: what a worker reads of them at its start. Needs neither torch nor vLLM."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from splitserve.errors import ConfigError, UnsupportedModelError
from splitserve.generation.kv_blocks import Adapter
from splitserve.runtime.bounded_file import read_named_file

FIELD = "engine.adapters"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
_LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors, by name."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """One adapter's folder, as it was read."""

    adapter: Adapter
    folder: Path
    rank: int
    shapes: Shapes


def read_adapters(folders: Mapping[str, Path]) -> dict[str, AdapterFiles]:
    """Reads all adapters, by name. Raises ConfigError (field `engine.adapters.NAME`)."""
    return {name: read_adapter(name, folder) for name, folder in folders.items()}


def read_adapter(name: str, folder: Path) -> AdapterFiles:
    """Reads one adapter: its configuration, the shapes of its tensors, and the fingerprint of both files.

    Raises ConfigError (field `engine.adapters.NAME`) for files that are missing or that are no LoRA adapter.
    """
    config = _config(name, folder)
    if config.get("peft_type") != "LORA":
        raise bad_adapter(name, f"{CONFIG_FILE}: peft_type must be LORA, not {config.get('peft_type')!r}")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise bad_adapter(name, f"{CONFIG_FILE}: r must be a whole number from 1 on, not {rank!r}")
    try:
        _check_regular(folder / WEIGHTS_FILE)
        shapes = file_shapes(folder / WEIGHTS_FILE)
        digest = _digest(folder)
    except (OSError, SafetensorError) as error:
        raise bad_adapter(name, f"cannot read {folder / WEIGHTS_FILE}: {error}") from None
    return AdapterFiles(Adapter(name, digest), folder, rank, shapes)


def check_fits_base(files: AdapterFiles, base: Shapes) -> None:
    """Checks an adapter's matrices against the weights of the base model that they change.

    Weights that the checkpoint keeps in another form, fused or quantized, are left to the engine. Raises ConfigError.
    """
    for name, shape in files.shapes.items():
        found = _LORA.fullmatch(name)
        weight = base.get(f"{found['module']}.weight") if found else None
        if found is None or weight is None or len(weight) != 2 or len(shape) != 2:
            continue
        # A is [rank, in], B is [out, rank]; the weight is [out, in].
        mine, theirs = (shape[1], weight[1]) if found["part"] == "A" else (shape[0], weight[0])
        if mine != theirs:
            message = f"is no adapter of this model: {name} is for a width of {mine}, the model has {theirs}"
            raise bad_adapter(files.adapter.name, message)


def file_shapes(path: Path) -> Shapes:
    """The shapes of a safetensors file's tensors. Reads its header only. Raises OSError or SafetensorError."""
    with safe_open(path, framework="np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def folder_shapes(folder: Path) -> Shapes:
    """The shapes of the tensors in all safetensors files of a model's folder. Raises UnsupportedModelError."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found |= file_shapes(path)
        except (OSError, SafetensorError) as error:
            raise UnsupportedModelError(f"model {folder}: cannot read {path.name}: {error}") from None
    return found


def bad_adapter(name: str, why: str) -> ConfigError:
    """The error for an adapter that a worker does not start with."""
    return ConfigError(f"{FIELD}.{name}: {why}", field=f"{FIELD}.{name}")


def _config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    content = read_named_file(path, f"{FIELD}.{name}", MAX_CONFIG_BYTES, pipes="none")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise bad_adapter(name, f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise bad_adapter(name, f"{path} must be a JSON object")
    return config


def _check_regular(path: Path) -> None:
    """Checks that this is a file, or a link to one, as caches of models have. To read a pipe may take for ever, and so
    may a device, without an end: of the engine's thread, where an adapter is loaded for a request. Raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
