"""vLLM's command line for a worker's settings, and what vLLM raised, as one sentence; needs no vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from engine.vllm import boot
from engine.vllm.options import MAX_REASON, own_options, rank_count, reason_of, require_own
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, UnavailableError


def options_of(config: EngineConfig, *, on_cpu: bool = True) -> dict[str, Any]:
    return own_options(config, "/models/m", on_cpu=on_cpu)


def test_settings_become_options() -> None:
    config = EngineConfig(
        kind="vllm", context_tokens=512, num_blocks=40, max_step_tokens=32, prefix_cache=False
    )
    options = options_of(config)
    assert (options["model"], options["dtype"], options["block_size"]) == ("/models/m", "bfloat16", 32)
    assert (options["max_model_len"], options["num_gpu_blocks_override"]) == (512, 41)
    assert options["max_num_batched_tokens"] == options["max_num_seqs"] == 32
    assert (options["enable_prefix_caching"], options["enforce_eager"]) == (False, True)
    stages = EngineConfig(kind="vllm", engine_args="--pipeline_parallel_size=2")
    assert not options_of(stages)["enforce_eager"]


def test_on_a_gpu_vllm_chooses_memory_and_mode() -> None:
    options = options_of(EngineConfig(kind="vllm", device_memory_share=0.45), on_cpu=False)
    assert (options["gpu_memory_utilization"], options["block_size"]) == (0.45, 16)
    assert options["max_num_batched_tokens"] == 2048
    assert (options["enforce_eager"], options["kv_cache_memory_bytes"]) == (False, None)


@pytest.mark.parametrize(("asked", "taken"), [(16, 32), (32, 32), (33, 64), (128, 128)])
def test_block_sizes_on_cpu(asked: int, taken: int) -> None:
    assert options_of(EngineConfig(block_size_tokens=asked))["block_size"] == taken


def test_adapters_switch_lora_on() -> None:
    assert not options_of(EngineConfig(kind="vllm"))["enable_lora"]
    for count, loaded in ((1, 1), (8, 8), (9, 8)):
        options = options_of(EngineConfig(kind="vllm", adapters={f"a{n}": Path("x") for n in range(count)}))
        assert (options["enable_lora"], options["max_loras"]) == (True, loaded)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"nnodes": 2}, "--nnodes is refused: a worker is on one machine"),
        ({"max_num_seqs": 3}, "--max-num-seqs is set by engine.max_running_requests"),
        ({"kv_events_config": {"x": 1}}, "--kv-events-config is refused"),
        ({"load_format": "dummy"}, "--load-format dummy is refused"),
    ],
)
def test_what_vllm_read_under_another_spelling_is_refused(changed: dict[str, Any], named: str) -> None:
    own = {"nnodes": 1, "max_num_seqs": 64, "kv_events_config": None, "load_format": "auto", "seed": 0}
    require_own(own, own | {"seed": 3})
    with pytest.raises(ConfigError, match=named) as raised:
        require_own(own, own | changed)
    assert raised.value.field == "engine.engine_args"


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("", 1),
        ("--seed 3", 1),
        ("--tensor-parallel-size 2", 2),
        ("--seed 3 --tensor_parallel_size=4", 4),
        ("-tp=2 -tp 8", 8),
        ("--tensor-parallel-size 64", 64),
        ("-pp 2 --tensor-parallel-size 3", 6),
    ],
)
def test_ranks_asked_for(given: str, size: int) -> None:
    assert rank_count(given) == size


@pytest.mark.parametrize("given", ["0", "65", "-1", "two", "", "1e1", "9" * 5000])
def test_a_number_of_ranks_out_of_bounds_is_named(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size must be|1\.\.64 ranks") as raised:
        rank_count(f"--tensor-parallel-size={given}")
    assert raised.value.field == "engine.engine_args"


class Checked(BaseModel):
    share: float = Field(le=1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("too long\nand more"), "too long"),
        (ValueError("<function loads at 0x7f3c588800e0> failed"), "<function loads> failed"),
        (AssertionError(), "AssertionError"),
        (KeyError("llama9"), "KeyError: 'llama9'"),
        (ValueError("x" * 1000), "x" * MAX_REASON),
        (
            ValueError("max_model_len is too long"),
            "max_model_len is too long (max_model_len: engine.context_tokens)",
        ),
    ],
)
def test_reasons(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_failed_check_names_its_field() -> None:
    with pytest.raises(ValidationError) as raised:
        Checked(share=7)
    assert reason_of(raised.value) == "share: Input should be less than or equal to 1"


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    monkeypatch.setattr(other, "__version__", "0.30.1", raising=False)
    monkeypatch.setattr(platforms, "current_platform", None, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", other)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(boot, "prepare_environment", lambda threads: None)
    with pytest.raises(UnavailableError, match=r"vLLM 0\.30\.1 is not supported"):
        boot.start_vllm(EngineConfig(kind="vllm"), tmp_path, "nixl")
