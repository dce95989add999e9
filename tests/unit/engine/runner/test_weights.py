"""Weights that a process keeps for those forked from it: taken once, and only where they are what would be loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.runner import weights
from engine.runner.weights import keep_weights, load_weights
from kv_transfer.layout import FP8_E4M3
from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError
from splitserve.models.sources import resolve_model
from tests.support.engine.tiny_models import make_tiny_model


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    weights._kept.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_tiny_model("llama", tmp_path))


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.model_validate({"device": "cpu", "threads": 1, **settings})


def taken(settings: EngineConfig, folder: Path) -> bool:
    """Whether the kept weights are what loading these settings gives."""
    kept = weights._kept[0].weights.model
    return load_weights(settings, resolve_model(str(folder)), lambda _fraction: None).model is kept


def test_they_are_taken_once(folder: Path) -> None:
    keep_weights(config(), str(folder))
    kept, progress = weights._kept[0].weights, list[float]()
    source = resolve_model(str(folder))
    taken = load_weights(config(threads=2), source, progress.append)
    assert taken.model is kept.model
    assert taken.origin == "kept"
    assert progress == [1.0]
    assert load_weights(config(), source, lambda _fraction: None).model is not kept.model


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"cpu_kernels": "off"}])
def test_other_settings_load_for_themselves(folder: Path, settings: dict[str, str]) -> None:
    kept = {"dtype": "bfloat16"}
    keep_weights(config(**kept), str(folder))
    assert not taken(config(**kept | settings), folder)
    assert taken(config(**kept), folder)


def test_files_that_have_changed_since_are_loaded(folder: Path) -> None:
    keep_weights(config(), str(folder))
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    assert not taken(config(), folder)


def test_another_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    keep_weights(config(), str(folder))
    assert not taken(config(), Path(make_tiny_model("qwen2", tmp_path / "other")))


def test_a_model_that_cannot_be_loaded_is_left_to_the_worker(folder: Path, tmp_path: Path) -> None:
    keep_weights(config(), str(tmp_path / "nowhere"))
    keep_weights(config(), "some-org/never-fetched")
    (folder / "model.safetensors").write_bytes(b"torn")
    keep_weights(config(), str(folder))
    assert not weights._kept


def test_a_large_model_is_left_to_the_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_KEPT_BYTES", 1000)
    keep_weights(config(), str(folder))
    assert not weights._kept
    in_files = sum(file.stat().st_size for file in folder.iterdir())
    monkeypatch.setattr(weights, "MAX_KEPT_BYTES", in_files)
    keep_weights(config(dtype="float32"), str(folder))
    assert not weights._kept, "twice as large in memory"
    keep_weights(config(dtype="bfloat16"), str(folder))
    assert weights._kept


def test_a_narrower_wire_decides_the_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runner.dtype.multiplies_bfloat16", lambda: False)
    keep_weights(config(), str(folder), FP8_E4M3)
    kept = weights._kept[0].weights
    source = resolve_model(str(folder))
    assert load_weights(config(), source, lambda _fraction: None, FP8_E4M3).model is kept.model


def test_files_that_are_gone_are_missed_where_they_are_loaded(folder: Path) -> None:
    keep_weights(config(), str(folder))
    source = resolve_model(str(folder))
    shutil.rmtree(folder)
    with pytest.raises(SplitserveError):
        load_weights(config(), source, lambda _fraction: None)


def test_what_was_logged_is_logged_where_they_are_taken(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(dtype="float32")
    with caplog.at_level("INFO", "splitserve"):
        keep_weights(settings, str(folder))
        events = [event.getMessage() for event in weights._kept[0].events]
        assert not caplog.records
        assert taken(settings, folder)
    assert [record.getMessage() for record in caplog.records] == events
