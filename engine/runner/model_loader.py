"""Loads a model: configuration, checks, weights, quantization and packing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from engine.backends.cpu.int8_linears import quantize_linears
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.linears import pack_linears, replace_norms
from engine.core.types import ModelFacts
from engine.kv_cache.memory import DTYPES
from engine.model.attention_interface import ATTENTION_NAME, AttentionContext, bind_layers
from engine.model.lean_torch import lean_or_whole, with_whole_meta_device
from engine.model.lean_transformers import AutoConfig, AutoModelForCausalLM, no_init_weights
from engine.model.loaded_model import (
    LoadedModel,
    eos_token_ids,
    model_fingerprint,
    step_work,
)
from engine.model.probe import probe_logits, probe_model
from engine.model.sibling_linears import pack_siblings
from engine.model.stand_ins import without_compiler
from engine.model.support import context_limit, declared_windows, refuse_by_class, refuse_by_config
from splitserve.errors import NotFoundError, UnsupportedModelError
from splitserve.models.progress import report_progress
from splitserve.models.sources import ModelSource, localize_model


def load_model(
    source: ModelSource,
    dtype: str,
    device: torch.device,
    progress: Callable[[float], None],
    quantization: str = "none",
    kernels: CpuKernels | None = None,
) -> LoadedModel:
    """Loads a model in evaluation mode.

    `dtype` is "float32" or "bfloat16"; `quantization` is "none", or "int8" if `check_quantization`
    passed; `kernels` are for bfloat16 on cpu. `progress` is called with 0..1 as weights are loaded. Raises
    UnsupportedModelError for a model family or option that the engine refuses, before weights are read where possible;
    NotFoundError and UnavailableError as `localize_model`.
    """
    config = _load_config(localize_model(source, weights=False))
    settings = config.to_dict()
    refuse_by_config(settings)
    context_tokens = context_limit(settings)
    refuse_by_class(_skeleton(config))
    module = _load_weights(localize_model(source), DTYPES[dtype], device, progress)
    context = AttentionContext()
    layers = bind_layers(module, context, declared_windows(settings))
    attention = probe_model(module, context, layers, settings)
    facts = ModelFacts(context_tokens, int(config.vocab_size), eos_token_ids(module))
    fingerprint = model_fingerprint(settings, module.state_dict(), module.all_tied_weights_keys)
    work = step_work(module, settings, attention, DTYPES[dtype], quantization)
    if quantization == "int8":
        quantize_linears(
            module, module.get_output_embeddings(), lambda: probe_logits(module, context), kernels
        )
    if device.type == "cuda":
        pack_siblings(module, lambda: probe_logits(module, context))
        torch.cuda.empty_cache()  # what packing needed for itself
    if device.type == "cpu" and DTYPES[dtype] is torch.bfloat16:
        if kernels is not None:
            replace_norms(module, kernels)
        pack_linears(module, lambda: probe_logits(module, context), kernels)
        _detach_from_file(module)
    return LoadedModel(module, config, context, facts, attention, dtype, device, fingerprint, work)


def _gguf_options(source: ModelSource) -> dict[str, Any]:
    return {"gguf_file": source.gguf_file} if source.gguf_file else {}


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _load_config(source: ModelSource) -> Any:
    try:
        return AutoConfig.from_pretrained(source.path, local_files_only=True, **_gguf_options(source))
    except OSError as error:
        raise NotFoundError(f"model {source.path}: {_first_line(error)}") from None
    except (ValueError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModelError(f"model {source.path}: {_first_line(error)}") from None


def _skeleton(config: Any) -> Any:
    """The model without weights: its class and its modules, on the meta device."""

    def make() -> Any:
        with torch.device("meta"), no_init_weights():
            return with_whole_meta_device(
                lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            )

    try:
        return lean_or_whole(make)
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        reason = _first_line(error)
        raise UnsupportedModelError(f"model type {config.model_type} is not supported: {reason}") from None


def _load_weights(
    source: ModelSource, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None]
) -> Any:
    options = _gguf_options(source)
    if source.gguf_file:
        # Imported here, because few installations serve GGUF files directly.
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    if device.type != "cpu":
        options["device_map"] = {
            "": device
        }  # loads tensors to the device one by one, without a whole copy on the host
    try:
        with report_progress(progress, gguf=bool(source.gguf_file)), without_compiler():
            load = partial(AutoModelForCausalLM.from_pretrained, source.path, dtype=dtype)
            named = {"attn_implementation": ATTENTION_NAME, "local_files_only": True, **options}
            module, info = with_whole_meta_device(lambda: load(output_loading_info=True, **named))
    except OSError as error:
        raise NotFoundError(f"model {source.path}: {_first_line(error)}") from None
    except (ValueError, ImportError) as error:
        raise UnsupportedModelError(f"model {source.path}: {_first_line(error)}") from None
    except (RuntimeError, SafetensorError) as error:
        message = f"model {source.path}: its weights cannot be read: {_first_line(error)}"
        raise UnsupportedModelError(message, reason="MODEL_UNREADABLE") from None
    if missing := sorted(info["missing_keys"]):
        message = f"model {source.path}: its files lack {len(missing)} weights, for example {missing[0]}"
        raise UnsupportedModelError(message, reason="MODEL_INCOMPLETE")
    progress(1.0)
    return module.eval()


def _detach_from_file(module: Any) -> None:
    """Copies the remaining weights out of the mapped file, which would otherwise stay in memory as a whole."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
