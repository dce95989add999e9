"""A model of given shapes with random weights, made on the device: as fast as a real one, and no files are needed."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import ATTENTION_NAME, AttentionContext, bind_layers
from engine.cuda.device import prepare_device
from engine.kv_pool import DTYPES
from engine.model_loading import LoadedModel
from engine.model_probe import probe_model
from engine.model_support import context_limit, declared_windows
from engine.runner import ModelFacts
from engine.torch_runner import TorchRunner, choose_device
from splitserve.config import EngineConfig


def random_runner(folder: str, config: EngineConfig) -> TorchRunner:
    """A runner of the model whose `config.json` lies in `folder`. Its linear layers stay as they are, also on cpu."""
    device = choose_device(config.device)
    if device.type == "cuda":
        prepare_device(device)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
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
    model = LoadedModel(module, settings, context, facts, attention, dtype, device, fingerprint="random")
    return TorchRunner(model, config)
