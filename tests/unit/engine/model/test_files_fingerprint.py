"""The fingerprint of files that vLLM loads is that of the loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from engine.model.loaded_model import files_fingerprint, model_fingerprint, tied_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2, 3)}, str(tmp_path / "model-1.safetensors"))
    save_file({"b": torch.zeros(4)}, str(tmp_path / "model-2.safetensors"))
    return tmp_path


def test_fingerprints_follow_weights_and_settings(folder: Path) -> None:
    config = PretrainedConfig(layers=1)
    before = files_fingerprint(folder, config)
    assert files_fingerprint(folder, PretrainedConfig(layers=2)) != before
    save_file({"b": torch.ones(4)}, str(folder / "model-2.safetensors"))
    assert files_fingerprint(folder, config) != before


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_module_and_its_files_have_one_fingerprint(tmp_path: Path, tied: bool) -> None:
    """Whether or not the files repeat the embeddings as output weights."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=tied, **shape))
    made.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(tmp_path)
    settings = config.to_dict()
    loaded = model_fingerprint(settings, module.state_dict(), module.all_tied_weights_keys)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)
    assert files_fingerprint(tmp_path, config) == loaded
    weights = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file({name: tensor.clone() for name, tensor in weights.items()}, str(tmp_path / "model.safetensors"))
    assert files_fingerprint(tmp_path, config) == loaded
    assert config.to_dict() == settings


def test_nothing_is_tied_in_a_model_that_transformers_does_not_know() -> None:
    assert tied_tensors(PretrainedConfig()) == {}
