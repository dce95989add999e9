"""What is read of an adapter's files at a worker's start, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.model.adapter import check_fits_base, file_shapes, read_adapter, read_adapters
from splitserve.errors import ConfigError
from tests.support.lora import write_adapter

WEIGHTS = {
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.ones((4, 8), np.float32),
    "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": np.ones((16, 4), np.float32),
}
UP = "model.layers.0.mlp.up_proj.weight"


def test_the_fingerprint_is_that_of_both_files(tmp_path: Path) -> None:
    first = read_adapter("a", write_adapter(tmp_path / "first", WEIGHTS))
    assert first.rank == 4
    assert first.adapter.name == "a"
    assert len(first.adapter.fingerprint) == 64
    same = read_adapter("a", write_adapter(tmp_path / "same", WEIGHTS))
    assert same.adapter == first.adapter
    other_config = read_adapter("a", write_adapter(tmp_path / "config", WEIGHTS, lora_alpha=9))
    changed = {name: weight * 2 for name, weight in WEIGHTS.items()}
    other_weights = read_adapter("a", write_adapter(tmp_path / "weights", changed))
    assert len({one.adapter for one in (first, other_config, other_weights)}) == 3


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "peft_type must be LORA"),
        ({"r": 0}, "r must be a whole number"),
        ({"r": "4"}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
    ],
)
def test_other_configurations_are_refused(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    folder = write_adapter(tmp_path, WEIGHTS, **config)
    with pytest.raises(ConfigError, match=named) as caught:
        read_adapters({"a": folder})
    assert caught.value.field == "engine.adapters.a"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", None),
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[]"),
        ("adapter_config.json", b"\xff\xfe\xfd"),
        ("adapter_config.json", b" " * (2**20 + 1)),
        ("adapter_config.json", b"[" * 2**20),
        ("adapter_model.safetensors", None),
        ("adapter_model.safetensors", b"no tensors"),
    ],
)
def test_files_that_are_missing_or_damaged_are_refused(
    tmp_path: Path, file: str, content: bytes | None
) -> None:
    folder = write_adapter(tmp_path, WEIGHTS)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=file) as caught:
        read_adapter("a", folder)
    assert caught.value.field == "engine.adapters.a"


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, file: str) -> None:
    """A pipe without a writer never ends, nor does a device that a link leads to."""
    folder = write_adapter(tmp_path / "a", WEIGHTS)
    (folder / file).unlink()
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        (folder / file).symlink_to(target)
        with pytest.raises(
            ConfigError, match=rf"{file}: .*(no regular file|neither a file|Is a directory)"
        ) as caught:
            read_adapter("a", folder)
        assert caught.value.field == "engine.adapters.a"
        (folder / file).unlink()


def test_links_to_files_elsewhere_are_followed_and_count_by_what_is_there(tmp_path: Path) -> None:
    """As in a cache of models."""
    kept, folder, weights = (
        write_adapter(tmp_path / "kept", WEIGHTS),
        tmp_path / "linked",
        "adapter_model.safetensors",
    )
    folder.mkdir()
    for file in kept.iterdir():
        (folder / file.name).symlink_to(file)
    (tmp_path / "current").symlink_to(folder)
    files = read_adapter("a", tmp_path / "current")
    assert files.adapter == read_adapter("a", kept).adapter
    other = write_adapter(tmp_path / "other", {name: weight * 2 for name, weight in WEIGHTS.items()})
    (folder / weights).unlink()
    (folder / weights).symlink_to(other / weights)
    assert read_adapter("a", tmp_path / "current").adapter == read_adapter("a", other).adapter
    (folder / weights).unlink()
    (folder / weights).symlink_to(folder / weights)
    with pytest.raises(ConfigError, match=weights):
        read_adapter("a", folder)


@pytest.mark.parametrize(("shape", "fits"), [((16, 8), True), ((16, 9), False), ((17, 8), False)])
def test_matrices_must_fit_the_weights_that_they_change(
    tmp_path: Path, shape: tuple[int, int], fits: bool
) -> None:
    files = read_adapter("a", write_adapter(tmp_path, WEIGHTS))
    assert file_shapes(tmp_path / "adapter_model.safetensors") == files.shapes
    if fits:
        check_fits_base(files, {UP: shape})
    else:
        with pytest.raises(ConfigError, match="no adapter of this model"):
            check_fits_base(files, {UP: shape})


def test_weights_in_another_form_are_left_to_the_engine(tmp_path: Path) -> None:
    files = read_adapter("a", write_adapter(tmp_path, WEIGHTS))
    check_fits_base(files, {"model.layers.0.mlp.up_proj.qweight": (1, 1)})
