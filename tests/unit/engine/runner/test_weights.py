"""Weights that a process keeps for those forked from it: taken once, and only where they are what would be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.runner import weights
from engine.runner.weights import keep_weights, load_weights
from splitserve.config.engine import EngineConfig
from splitserve.models.sources import resolve_model
from tests.support.engine.tiny_models import make_tiny_model
from tests.support.waiting import PATIENCE_S


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
    assert load_weights(config(threads=2), source, progress.append) is kept
    assert progress == [1.0]
    assert load_weights(config(), source, lambda _fraction: None).model is not kept.model


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"cpu_kernels": "off"}])
def test_other_settings_load_for_themselves(folder: Path, settings: dict[str, str]) -> None:
    keep_weights(config(), str(folder))
    assert not taken(config(**settings), folder)
    assert taken(config(), folder)


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


def test_what_was_logged_is_logged_where_they_are_taken(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "splitserve"):
        keep_weights(config(), str(folder))
        events = [event.getMessage() for event in weights._kept[0].events]
        assert not caplog.records
        assert taken(config(), folder)
    assert [record.getMessage() for record in caplog.records] == events


FORKED = """
import os, sys
from engine.core.model_runner import warm_up
from engine.runner.torch_runner import build_torch_runner
from engine.runner.weights import keep_weights
from splitserve.config.engine import EngineConfig
from splitserve.models.sources import resolve_model
from engine.core.types import SamplingParams, ScheduledSequence

config = EngineConfig(kv_memory_bytes=20_000_000, device="cpu", dtype="float32", threads=2)
def answer():
    runner = build_torch_runner(config, resolve_model(sys.argv[1]), lambda fraction: None)
    warm_up(runner, None)
    tokens, computed = list(range(40, 90)), 0
    for _ in range(12):
        row = ScheduledSequence(
            "one", tokens, 50, computed, len(tokens) - computed, list(range(8)), True, SamplingParams(temperature=0.0)
        )
        computed = len(tokens)
        tokens.append(runner.execute([row])[0].token_id)
    return tokens

keep_weights(config, sys.argv[1])
assert len(os.listdir("/proc/self/task")) == 1
sys.stdout.flush()
for _ in range(2):
    if not os.fork():
        print(answer(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
from engine.runner import weights
weights._kept.clear()
print(answer())
"""


@pytest.mark.timeout(120)
def test_a_forked_worker_gives_the_same_tokens(folder: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    first, second, alone = done.stdout.splitlines()
    assert first == second == alone
