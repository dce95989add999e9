"""The files of LoRA adapters, as a worker reads them at its start. Needs neither torch nor vLLM."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from splitserve.errors import ConfigError
from splitserve.generation.kv_blocks import Adapter
from splitserve.models.model_files import read_object

FIELD = "engine.adapters"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
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
    config = read_object(folder / CONFIG_FILE, f"{FIELD}.{name}", may_be_pipe=False)
    if config.get("peft_type") != "LORA":
        raise bad_adapter(name, f"{CONFIG_FILE}: peft_type must be LORA, not {config.get('peft_type')!r}")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise bad_adapter(name, f"{CONFIG_FILE}: r must be a whole number from 1 on, not {rank!r}")
    try:
        if not (folder / WEIGHTS_FILE).is_file():  # reading a pipe or a device may never end
            raise OSError("it is no regular file")
        shapes = file_shapes(folder / WEIGHTS_FILE)
        digest = _digest(folder)
    except (OSError, SafetensorError) as error:
        raise bad_adapter(name, f"cannot read {folder / WEIGHTS_FILE}: {error}") from None
    return AdapterFiles(Adapter(name, digest), folder, rank, shapes)


def check_fits_base(files: AdapterFiles, base: Shapes) -> None:
    """Checks an adapter's matrices against the weights of the base model that they change.

    Only the engine can check weights that the checkpoint keeps fused or quantized. Raises ConfigError.
    """
    for name, shape in files.shapes.items():
        match = _LORA.fullmatch(name)
        weight = base.get(f"{match['module']}.weight") if match else None
        if match is None or weight is None or len(weight) != 2 or len(shape) != 2:
            continue
        # A is [rank, in], B is [out, rank]; the weight is [out, in].
        mine, theirs = (shape[1], weight[1]) if match["part"] == "A" else (shape[0], weight[0])
        if mine != theirs:
            message = f"is no adapter of this model: {name} is for a width of {mine}, the model has {theirs}"
            raise bad_adapter(files.adapter.name, message)


def file_shapes(path: Path) -> Shapes:
    """The shapes of a safetensors file's tensors. Reads its header only. Raises OSError or SafetensorError."""
    with safe_open(path, framework="np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def folder_shapes(folder: Path) -> Shapes:
    """The shapes of the tensors in all safetensors files of a model's folder, which `check_folder` has checked."""
    paths = sorted(folder.glob("*.safetensors"))
    return {name: shape for path in paths for name, shape in file_shapes(path).items()}


def bad_adapter(name: str, why: str) -> ConfigError:
    """The error for an adapter that a worker does not start with."""
    return ConfigError(f"{FIELD}.{name}: {why}", field=f"{FIELD}.{name}")


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
