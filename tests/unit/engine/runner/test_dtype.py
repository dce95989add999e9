"""Which dtype an engine computes in, by its settings, its device and what the processor multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.runner.dtype import choose_dtype, log_dtype, multiplies_bfloat16
from splitserve.config.engine import EngineConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("settings", "device", "native", "expected"),
    [
        ({}, CPU, True, "bfloat16"),
        ({}, CPU, False, "float32"),
        ({"dtype": "bfloat16"}, CPU, False, "bfloat16"),
        ({"dtype": "float32"}, CPU, True, "float32"),
        ({"quantization": "int8"}, CPU, False, "bfloat16"),
        ({"kv_cache_dtype": "int8"}, CPU, False, "bfloat16"),
        ({}, CUDA, False, "bfloat16"),
        ({"dtype": "float32"}, CUDA, True, "float32"),
    ],
)
def test_auto_is_what_the_processor_multiplies(
    settings: dict[str, Any], device: torch.device, native: bool, expected: str
) -> None:
    assert choose_dtype(EngineConfig(**settings), device, native=native) == expected


def test_a_narrower_wire_is_for_bfloat16() -> None:
    assert choose_dtype(EngineConfig(), CPU, "fp8_e4m3", native=False) == "bfloat16"


def test_without_instructions_the_log_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for dtype, native in (("bfloat16", False), ("auto", False), ("auto", True)):
        config = EngineConfig(dtype=dtype)  # type: ignore[arg-type]
        log_dtype(config, CPU, choose_dtype(config, CPU, native=native), native=native)
    assert [record.message for record in caplog.records] == ["engine.slow_dtype", "engine.dtype"]


def test_the_default_is_what_this_processor_says() -> None:
    expected = "bfloat16" if multiplies_bfloat16() else "float32"
    assert choose_dtype(EngineConfig(), CPU) == expected
