"""A model of given shapes with random weights, made on the device: as fast as a real one, without files."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.backends.cuda.forward import prepare_device
from engine.core.model_runner import ModelFacts
from engine.kv_cache.memory import DTYPES
from engine.model.attention_interface import ATTENTION_NAME, AttentionContext, bind_layers
from engine.model.loaded_model import LoadedModel
from engine.model.probe import probe_model
from engine.model.support import context_limit, declared_windows
from engine.runner.device import choose_device, choose_dtype
from engine.runner.torch_runner import TorchRunner, build_torch_runner, make_torch_runner
from splitserve.config.engine import SIMULATED, EngineConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import checked_model
from splitserve.models.tokenizer import Tokenizer


def random_runner(folder: str, config: EngineConfig) -> TorchRunner:
    """A runner of the model whose `config.json` lies in `folder`, with random weights."""
    return make_torch_runner(random_model(folder, config), config)


def loaded_runner(model: str, config: EngineConfig, *, random_weights: bool) -> tuple[TorchRunner, Tokenizer]:
    """The runner of a model and its tokenizer. `random_weights`: `model` is a folder with a `config.json`, and no text
    is made of tokens; otherwise as `checked_model` takes it."""
    if random_weights:
        return random_runner(model, config), load_tokenizer(SIMULATED)
    source = checked_model(model)
    runner = build_torch_runner(config, source)
    return runner, load_tokenizer(source.tokenizer_source)


def random_model(folder: str, config: EngineConfig) -> LoadedModel:
    """The model whose `config.json` lies in `folder`. Its linear layers are torch's, also on cpu."""
    device = choose_device(config.device)
    if device.type == "cuda":
        prepare_device(device)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    dtype = choose_dtype(config, device)
    settings = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(
            settings, dtype=DTYPES[dtype], attn_implementation=ATTENTION_NAME
        ).eval()
    context = AttentionContext()
    named = settings.to_dict()
    layers = bind_layers(module, context, declared_windows(named))
    attention = probe_model(module, context, layers, named)
    facts = ModelFacts(context_limit(named), int(settings.vocab_size), frozenset())
    return LoadedModel(module, settings, context, facts, attention, dtype, device, fingerprint="random")
