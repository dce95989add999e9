"""What a step of a loaded model asks of its device, by the shapes of its linear layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.step_stats import StepWork
from engine.runner.model_loader import load_model
from splitserve.models.sources import resolve_model
from tests.support.engine.tiny_models import make_tiny_model


def work_of(family: str, folder: Path, dtype: str, quantization: str = "none") -> StepWork | None:
    source = resolve_model(str(make_tiny_model(family, folder)))
    return load_model(source, dtype, torch.device("cpu"), lambda _: None, quantization).work


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_weights_are_counted_before_they_are_packed(tmp_path: Path, dtype: str, size: int) -> None:
    source = resolve_model(str(make_tiny_model("llama", tmp_path)))
    config = load_model(source, "float32", torch.device("cpu"), lambda _: None).config
    head = config.head_dim or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    output = config.hidden_size * config.vocab_size
    assert work_of("llama", tmp_path, dtype) == StepWork(
        weight_bytes=(config.num_hidden_layers * layer + output) * size,
        layer_weights=config.num_hidden_layers * layer,
        output_weights=output,
        kv_token_bytes=2 * config.num_hidden_layers * keys * size,
    )


def test_of_models_with_experts_it_is_unknown(tmp_path: Path) -> None:
    assert work_of("mixtral", tmp_path, "float32") is None
