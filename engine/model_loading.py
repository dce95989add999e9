"""Loads weights and everything that must be known about a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import ATTENTION_NAME, AttentionContext, bind_layers
from engine.cpu.kernels import CpuKernels
from engine.cpu.layers import replace_norms
from engine.int8_linears import quantize_linears
from engine.kv_pool import DTYPES
from engine.model_linears import pack_linears
from engine.model_probe import AttentionShape, probe_logits, probe_model
from engine.model_support import context_limit, declared_windows, refuse_by_class, refuse_by_config
from engine.runner import ModelFacts
from splitserve.errors import NotFoundError, UnsupportedModelError
from splitserve.models import ModelSource, localize_model
from splitserve.transformers_progress import report_progress

_SAMPLES = 256
# Settings that say nothing about what the KV of a token is.
_NOT_FINGERPRINTED = ("_", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its layers bound to `context`.

    `dtype` is "float32" or "bfloat16"; `fingerprint` is 64 hex digits, the same for both dtypes.
    """

    module: Any
    config: Any
    context: AttentionContext
    facts: ModelFacts
    attention: AttentionShape
    dtype: str
    device: torch.device
    fingerprint: str
    kernels: CpuKernels | None = None
    """What the layers were replaced with, where that was possible."""


def resolve_dtype(dtype: str) -> str:
    """`EngineConfig.dtype` as "float32" or "bfloat16"."""
    return "bfloat16" if dtype == "auto" else dtype


def load_model(
    source: ModelSource,
    dtype: str,
    device: torch.device,
    progress: Callable[[float], None],
    quantization: str = "none",
    kernels: CpuKernels | None = None,
) -> LoadedModel:
    """Loads a model in evaluation mode. `dtype` is "auto" (bfloat16), "float32" or "bfloat16"; `quantization` "none",
    or "int8" where `check_quantization` has let it pass; `kernels` are for bfloat16 on cpu.

    `progress` is called with 0..1 as weights arrive. Raises UnsupportedModelError for a family or option
    that the engine refuses (before weights are read where that can be told), NotFoundError and
    UnavailableError as `localize_model`.
    """
    dtype = resolve_dtype(dtype)
    config = _load_config(localize_model(source, weights=False))
    settings = config.to_dict()
    refuse_by_config(settings)
    context_tokens = context_limit(settings)
    refuse_by_class(_skeleton(config))
    module = _load_weights(localize_model(source), DTYPES[dtype], device, progress)
    context = AttentionContext()
    layers = bind_layers(module, context, declared_windows(settings))
    attention = probe_model(module, context, layers, settings)
    facts = ModelFacts(context_tokens, int(config.vocab_size), _eos_token_ids(module))
    fingerprint = model_fingerprint(settings, module.state_dict())
    if quantization == "int8":
        quantize_linears(
            module, module.get_output_embeddings(), lambda: probe_logits(module, context), kernels
        )
    if device.type == "cpu" and DTYPES[dtype] is torch.bfloat16:
        if kernels is not None:
            replace_norms(module, kernels)
        pack_linears(module, lambda: probe_logits(module, context), kernels)
        _leave_file(module)
    return LoadedModel(module, config, context, facts, attention, dtype, device, fingerprint, kernels)


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
    """The model without weights: its class and its modules, no memory."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        reason = _first_line(error)
        raise UnsupportedModelError(f"model type {config.model_type} is not supported: {reason}") from None


def _load_weights(
    source: ModelSource, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None]
) -> Any:
    options = _gguf_options(source)
    if source.gguf_file:
        # Imported here: few installations serve GGUF files directly.
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    if device.type != "cpu":
        options["device_map"] = {"": device}  # tensors go to the device one by one, past a whole copy here
    try:
        with report_progress(progress, gguf=bool(source.gguf_file)):
            module, info = AutoModelForCausalLM.from_pretrained(
                source.path,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
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


def _leave_file(module: Any) -> None:
    """Copies what is left of the weights out of the mapped file, or it would stay in memory as a whole for them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _eos_token_ids(module: Any) -> frozenset[int]:
    """What ends a sequence: as `generate` does it, the generation settings before the model's own."""
    tokens = module.generation_config.eos_token_id
    if tokens is None:
        tokens = module.config.eos_token_id
    if tokens is None:
        return frozenset()
    return frozenset([int(tokens)] if isinstance(tokens, int) else map(int, tokens))


def model_fingerprint(settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over settings and every tensor's name, shape and an even sample of its elements.

    Elements are taken as bfloat16, so that a float32 and a bfloat16 copy of the same weights agree and
    the layouts of their workers differ in dtype only.
    """
    relevant = {
        name: value
        for name, value in settings.items()
        if not name.startswith(_NOT_FINGERPRINTED) and not name.endswith("_token_id")
    }
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {list(tensor.shape)}".encode())
        flat = tensor.reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        sample = torch.cat([flat[::step], flat[-1:]]).to(torch.bfloat16).cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
