"""What a replica is: shapes of models, memory, step times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoscaler.simulation.engine_model import preset
from autoscaler.sizing.model_shape import ModelShape, shape_of
from autoscaler.sizing.roofline import CATALOG, gpu_class, replica_design
from autoscaler.sizing.sizing import designs_of
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.models.model_files import read_object
from tests.support.scaling.engine_models import CONFIG_8B, LLAMA_8B, LLAMA_70B

H100 = gpu_class("h100")


def of(weight_dtype: str | None = None, **changed: Any) -> ModelShape:
    return shape_of("m", CONFIG_8B | changed, weight_dtype)


@pytest.mark.parametrize(
    ("name", "model", "gpus"),
    [("h100-8b", LLAMA_8B, 1), ("h100x4-70b", LLAMA_70B, 4), ("h100x8-70b", LLAMA_70B, 8)],
)
def test_datasheets_agree_with_the_presets(name: str, model: ModelShape, gpus: int) -> None:
    ours, known = replica_design(model, H100, gpus, 25.0).engine, preset(name)
    near = {"rel": 0.15}
    for tokens in (500, 2000, 8000):
        assert ours.prompt_s(tokens) == pytest.approx(known.prompt_s(tokens), **near)
    for batch in (1, 16, 64, 256):
        assert ours.decode.decode_step_s(batch, 1000 * batch) == pytest.approx(
            known.decode.decode_step_s(batch, 1000 * batch), **near
        )
    assert ours.kv_capacity_tokens == pytest.approx(known.kv_capacity_tokens, **near)
    assert ours.kv_bytes_per_token == known.kv_bytes_per_token
    assert ours.link_gb_per_s == known.link_gb_per_s


def test_the_memory_of_a_replica_adds_up() -> None:
    for gpus in (2, 4, 8):
        found = replica_design(LLAMA_70B, H100, gpus, 25.0)
        parts = (found.weights_gb, found.workspace_gb, found.kv_gb)
        assert sum(part or 0 for part in parts) == pytest.approx(gpus * 80 * 0.9)
    with pytest.raises(FailedPreconditionError, match=r"does not fit 1 x H100: weights 140\.0 GB") as caught:
        replica_design(LLAMA_70B, H100, 1, 25.0)
    assert caught.value.reason == "MODEL_DOES_NOT_FIT"


def test_what_a_faster_part_changes() -> None:
    base = replica_design(LLAMA_8B, H100, 1, 25.0).engine
    h200 = replica_design(LLAMA_8B, gpu_class("H200"), 1, 25.0).engine
    assert h200.prefill.token_s == base.prefill.token_s
    assert h200.decode.base_s == pytest.approx(base.decode.base_s * 3350 / 4800)
    fp8 = of("fp8")
    narrow = replica_design(fp8, H100, 1, 25.0).engine
    assert narrow.decode.base_s == pytest.approx(base.decode.base_s / 2)
    assert narrow.prefill.token_s == pytest.approx(base.prefill.token_s * 989 / 1979)
    # Without units for fp8 the weights are narrower, and the arithmetic is not.
    a100 = [replica_design(one, gpu_class("A100-80GB"), 1, 25.0).engine for one in (LLAMA_8B, fp8)]
    assert a100[0].prefill.token_s == a100[1].prefill.token_s
    # PCIe: eight small GPUs exchange more than they compute.
    small = [replica_design(LLAMA_8B, gpu_class("L4"), gpus, 25.0).engine for gpus in (1, 8)]
    assert small[1].prefill.token_s > small[0].prefill.token_s / 8 * 2


def test_replicas_to_choose_from() -> None:
    def counts(model: ModelShape, gpu: str, longest: int) -> list[int]:
        return [one.gpus for one in designs_of(model, gpu_class(gpu), 25.0, longest)]

    assert counts(LLAMA_8B, "H100", 8000) == [1, 2, 4, 8]
    assert counts(LLAMA_70B, "H100", 2000) == [2, 4, 8]
    assert counts(LLAMA_70B, "H100", 8000) == [4, 8]
    assert counts(of(num_attention_heads=9, num_key_value_heads=3), "H100", 10) == [1]
    with pytest.raises(FailedPreconditionError, match="8 x L4"):
        counts(
            of(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128),
            "L4",
            10,
        )
    with pytest.raises(InvalidArgumentError, match="do not divide among 2"):
        replica_design(of(num_attention_heads=9, num_key_value_heads=3), H100, 2, 25.0)


def test_the_shape_of_a_config(tmp_path: Path) -> None:
    model = of()
    assert model.parameters == pytest.approx(8.03e9, rel=0.005)
    assert (model.head_dim, model.kv_bytes_per_token, model.weights) == (128, 131072, "bf16")
    assert of(tie_word_embeddings=True).parameters < model.parameters
    assert of(torch_dtype="float32").weight_bytes == 2 * model.weight_bytes
    assert of(quantization_config={"quant_method": "fp8"}).weights == "fp8"
    assert of(quantization_config={"quant_method": "awq", "bits": 4}).weights == "int4"
    assert shape_of("m", {"text_config": CONFIG_8B}) == model
    # Mixtral 8x7B: 46.7 billion parameters, 12.9 of them for one token (arXiv:2401.04088).
    experts = of(vocab_size=32000, num_local_experts=8, num_experts_per_tok=2)
    assert experts.parameters == pytest.approx(46.7e9, rel=0.01)
    assert experts.active_parameters == pytest.approx(12.9e9, rel=0.01)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG_8B))
    assert shape_of("m", read_object(path)) == model
    path.write_text("[]")
    with pytest.raises(InvalidArgumentError, match="must be a JSON object"):
        read_object(path)
    with pytest.raises(InvalidArgumentError):
        read_object(tmp_path / "none")


@pytest.mark.parametrize(
    ("weight_dtype", "changed", "words"),
    [
        ("fp3", {}, "weight_dtype must be"),
        (None, {"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        (None, {"vocab_size": None}, "vocab_size is not known"),
        (None, {"hidden_size": "wide"}, "must be a whole number"),
        (None, {"max_position_embeddings": "long"}, "max_position_embeddings must be a whole number"),
        (None, {"max_position_embeddings": -5}, "max_position_embeddings must be a whole number"),
        (None, {"num_experts": "8"}, "experts must be a whole number"),
        (None, {"num_experts": 8, "moe_intermediate_size": 1.5}, "moe_intermediate_size must be"),
        (None, {"quantization_config": {"bits": [4]}}, "give --weight-dtype"),
        (None, {"kv_lora_rank": 512}, "latent attention"),
        (None, {"quantization_config": {"quant_method": "own"}}, "give --weight-dtype"),
    ],
)
def test_wrong_shapes(weight_dtype: str | None, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        of(weight_dtype, **changed)


def test_gpus_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="H100, "):
        gpu_class("H1000")
    page = (Path(__file__).resolve().parents[4] / "docs" / "guides" / "capacity-planning.md").read_text(
        encoding="utf-8"
    )
    for gpu in CATALOG.values():
        assert f"| {gpu.name} |" in page
        assert gpu.source in page
