"""vLLM's command line for a worker's settings, and what vLLM raised, as one sentence; needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from engine.vllm.options import (
    MAX_REASON,
    block_size_of,
    checked_options,
    own_arguments,
    rank_count,
    reason_of,
    require_own,
)
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError


def pairs(config: EngineConfig, *, on_cpu: bool = True) -> dict[str, str]:
    words = own_arguments(config, "/models/m", on_cpu=on_cpu)
    return {
        word: "" if following.startswith("--") else following
        for word, following in zip(words, [*words[1:], "--"], strict=True)
        if word.startswith("--")
    }


def test_settings_become_options() -> None:
    config = EngineConfig(
        kind="vllm", context_tokens=512, num_blocks=40, max_step_tokens=32, prefix_cache=False
    )
    options = pairs(config)
    assert options["--model"] == "/models/m"
    assert options["--dtype"] == "bfloat16"
    assert options["--block-size"] == "32"
    assert options["--max-model-len"] == "512"
    assert options["--num-gpu-blocks-override"] == "41"
    assert options["--max-num-batched-tokens"] == options["--max-num-seqs"] == "32"
    assert "--no-enable-prefix-caching" in options
    assert "--enforce-eager" in options
    assert "--enforce-eager" not in pairs(EngineConfig(kind="vllm", engine_args="--pipeline_parallel_size=2"))


def test_on_a_gpu_vllm_chooses_memory_and_mode() -> None:
    options = pairs(EngineConfig(kind="vllm", device_memory_share=0.45), on_cpu=False)
    assert options["--gpu-memory-utilization"] == "0.45"
    assert options["--block-size"] == "16"
    assert options["--max-num-batched-tokens"] == "2048"
    assert "--enforce-eager" not in options
    assert "--kv-cache-memory-bytes" not in options


@pytest.mark.parametrize(("asked", "taken"), [(16, 32), (32, 32), (33, 64), (128, 128)])
def test_block_sizes_on_cpu(asked: int, taken: int) -> None:
    assert block_size_of(EngineConfig(block_size_tokens=asked), on_cpu=True) == taken


def test_adapters_switch_lora_on() -> None:
    assert "--enable-lora" not in pairs(EngineConfig(kind="vllm"))
    for count, loaded in ((1, "1"), (8, "8"), (9, "8")):
        options = pairs(EngineConfig(kind="vllm", adapters={f"a{n}": Path("x") for n in range(count)}))
        assert "--enable-lora" in options
        assert options["--max-loras"] == loaded


def test_options_are_words_of_a_shell() -> None:
    assert checked_options("--seed 3 --rope-scaling '{\"a\": 1}'") == [
        "--seed",
        "3",
        "--rope-scaling",
        '{"a": 1}',
    ]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--block-size 64", "--block-size is set by engine.block_size_tokens"),
        ("--max_num_seqs=3", "--max-num-seqs is set by engine.max_running_requests"),
        ("-dp=2", "--data-parallel-size is refused: start more workers;"),
        ("--prefill-context-parallel-size 2", "--prefill-context-parallel-size is refused"),
        ("--scheduler_cls x", "--scheduler-cls is refused"),
        ("-dcp 2", "--decode-context-parallel-size is refused"),
        ("--kv-offloading-size 1", "--kv-offloading-size is refused: the handoff is splitserve's"),
        ("--seed 1 --diffusion-config x", "--diffusion-config is refused"),
        ("--kv-transfer-config.kv_role x", "--kv-transfer-config is refused"),
        ("--enable-lora", "--enable-lora is set by engine.adapters"),
        ("--lora-modules a=b", "--lora-modules is set by engine.adapters"),
        ("--seed 'x", "No closing quotation"),
    ],
)
def test_refused_options_are_named(given: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        checked_options(given)
    assert raised.value.field == "engine.engine_args"


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
