"""Loads a model: configuration, checks, weights, quantization and packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from engine.backends.cpu.int8_linears import Int8Weight, put_quantized, quantizable, quantize_linears
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.linears import pack_linears, replace_norms
from engine.core.types import ModelFacts
from engine.kv_cache.free_memory import free_memory
from engine.kv_cache.memory import DTYPES
from engine.model.attention_interface import ATTENTION_NAME, AttentionContext, bind_layers
from engine.model.lean_torch import lean_or_whole, with_whole_meta_device
from engine.model.lean_transformers import AutoConfig, AutoModelForCausalLM, no_init_weights
from engine.model.loaded_model import (
    LoadedModel,
    configuration_fingerprint,
    eos_token_ids,
    model_fingerprint,
    quantized_fingerprint,
    step_work,
)
from engine.model.named_weights import SCALES, as_bytes, empty_tensor, tensor_specs
from engine.model.probe import probe_logits, probe_model
from engine.model.sibling_linears import pack_siblings
from engine.model.stand_ins import without_compiler
from engine.model.support import context_limit, declared_windows, refuse_by_class, refuse_by_config
from kv_transfer.layout import NO_QUANTIZATION
from kv_transfer.weights.manifest import Manifest, TensorSpec, WeightsForm
from kv_transfer.weights.taker import WeightsSource
from splitserve.errors import (
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
    UnsupportedModelError,
)
from splitserve.models.progress import report_progress
from splitserve.models.sources import ModelSource, localize_model


def load_model(
    source: ModelSource,
    dtype: str,
    device: torch.device,
    progress: Callable[[float], None],
    quantization: str = "none",
    kernels: CpuKernels | None = None,
    peer: WeightsSource | None = None,
) -> LoadedModel:
    """Loads a model in evaluation mode.

    `dtype` is "float32" or "bfloat16"; `quantization` is "none", or "int8" if `check_quantization`
    passed; `kernels` are for bfloat16 on cpu. `progress` is called with 0..1 as weights are loaded. With `peer` they
    come from there, and only configuration and tokenizer from files: raises its errors, and FailedPreconditionError
    (WEIGHTS_MISMATCH, WEIGHTS_UNUSABLE) for weights that are not this model's. Raises UnsupportedModelError for a model
    family or option that the engine refuses, before weights are read where possible; ConfigError and UnavailableError
    as `localize_model`.
    """
    files = localize_model(source, weights=False)
    config = _load_config(files)
    settings = config.to_dict()
    refuse_by_config(settings)
    context_tokens = context_limit(settings)
    refuse_by_class(skeleton := _skeleton(config, DTYPES[dtype]))
    form = WeightsForm(quantization, configuration_fingerprint(settings))
    received: _Received | None = None
    if peer is None:
        module = _load_weights(localize_model(source), DTYPES[dtype], device, progress)
    else:
        received = _receive_weights(files, skeleton, form, DTYPES[dtype], device, peer, progress)
        module = received.module
    context = AttentionContext()
    layers = bind_layers(module, context, declared_windows(settings))
    tensors = tensor_specs(module, _int8_layers(module, form))
    digest, content = b"" if received is None else received.put(kernels), ""
    attention = probe_model(module, context, layers, settings)
    facts = ModelFacts(context_tokens, int(config.vocab_size), eos_token_ids(module))
    tied = module.all_tied_weights_keys
    if received is not None and digest:  # the weights that it is made from are not here
        fingerprint = received.manifest.fingerprint
    else:
        fingerprint = model_fingerprint(settings, module.state_dict(), tied)
    work = step_work(skeleton, settings, attention, DTYPES[dtype], quantization)
    del skeleton
    if quantization == "int8":
        output = module.get_output_embeddings()
        digest = digest or quantize_linears(module, output, lambda: probe_logits(module, context), kernels)
        content = quantized_fingerprint(settings, module.state_dict(), tied, fingerprint.encode() + digest)
    if received is not None:
        received.require(fingerprint, content)
    _pack(module, context, dtype, device, kernels)
    parts = module, config, context, facts, attention
    return LoadedModel(*parts, dtype, device, fingerprint, work, tensors, form, content)


def _pack(
    module: Any, context: AttentionContext, dtype: str, device: torch.device, kernels: CpuKernels | None
) -> None:
    if device.type == "cuda":
        pack_siblings(module, lambda: probe_logits(module, context))
        torch.cuda.empty_cache()  # what packing needed for itself
    if device.type == "cpu" and DTYPES[dtype] is torch.bfloat16:
        if kernels is not None:
            replace_norms(module, kernels)
        pack_linears(module, lambda: probe_logits(module, context), kernels)
        _detach_from_file(module)


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


def _skeleton(config: Any, dtype: torch.dtype) -> Any:
    """The model without weights: its class and its modules, on the meta device."""

    def make() -> Any:
        with torch.device("meta"), no_init_weights():
            return with_whole_meta_device(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))

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


class _Received(NamedTuple):
    """A model with the weights that a peer has sent."""

    module: Any
    manifest: Manifest
    quantized: dict[str, Int8Weight]
    """Those that are not in the module yet, by layer."""

    def put(self, kernels: CpuKernels | None) -> bytes:
        """Puts these in their places; see `put_quantized`. Empty if there are none. Raises FailedPreconditionError
        (WEIGHTS_UNUSABLE)."""
        if not self.quantized:
            return b""
        try:
            return put_quantized(self.module, self.module.get_output_embeddings(), self.quantized, kernels)
        except (RuntimeError, ValueError, LookupError, MemoryError) as error:
            message = f"weights of a peer: {type(error).__name__}: {_first_line(error)}"
            raise FailedPreconditionError(message, reason="WEIGHTS_UNUSABLE") from None

    def require(self, fingerprint: str, content: str) -> None:
        """Raises FailedPreconditionError (WEIGHTS_MISMATCH) unless the model is what the peer has promised."""
        if (self.manifest.fingerprint, self.manifest.content) != (fingerprint, content):
            message = "weights of a peer: with this configuration they are another model than the peer's"
            raise FailedPreconditionError(message, reason="WEIGHTS_MISMATCH")


def _int8_layers(module: Any, form: WeightsForm) -> list[str]:
    return [] if form.quantization == NO_QUANTIZATION else quantizable(module, module.get_output_embeddings())


def _receive_weights(
    files: ModelSource,
    skeleton: Any,
    form: WeightsForm,
    dtype: torch.dtype,
    device: torch.device,
    peer: WeightsSource,
    progress: Callable[[float], None],
) -> _Received:
    """The model with the weights that `peer` sends. The tensors are those of this model's own modules: the peer's list
    has to be the same."""
    int8 = _int8_layers(skeleton, form)
    tensors, manifest = _fetched(tensor_specs(skeleton, int8), form, peer, progress)
    quantized: dict[str, Int8Weight] = {}
    for name in int8:
        values, scales = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.{SCALES}")
        quantized[name] = Int8Weight(values, scales)
        tensors[f"{name}.weight"] = torch.empty(values.shape, dtype=dtype)  # in whose place they are put
    options: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        with report_progress(lambda _fraction: None), without_compiler():
            load = partial(type(skeleton).from_pretrained, None, config=skeleton.config, state_dict=tensors)
            named = {"dtype": dtype, "attn_implementation": ATTENTION_NAME, **options}
            module, info = with_whole_meta_device(lambda: load(output_loading_info=True, **named))
        with suppress(OSError):  # few models lack the file; the rest is in the configuration
            module.generation_config = type(module.generation_config).from_pretrained(
                files.path, local_files_only=True
            )
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        message = f"weights of a peer: {_first_line(error)}"
        raise FailedPreconditionError(message, reason="WEIGHTS_UNUSABLE") from None
    if left := sorted(info["missing_keys"]) or sorted(info["unexpected_keys"]):
        message = f"weights of a peer: {len(left)} do not fit, for example {left[0]}"
        raise FailedPreconditionError(message, reason="WEIGHTS_UNUSABLE")
    progress(1.0)
    return _Received(module.eval(), manifest, quantized)


def _fetched(
    specs: Sequence[TensorSpec], form: WeightsForm, peer: WeightsSource, progress: Callable[[float], None]
) -> tuple[dict[str, torch.Tensor], Manifest]:
    """The tensors that `peer` sends, by name, and what it says of them."""
    if not specs:
        message = "weights of a peer: this model has tensors of an element type that is not sent"
        raise FailedPreconditionError(message, reason="WEIGHTS_UNUSABLE")
    tensors: dict[str, torch.Tensor] = {}
    total, received = sum(spec.num_bytes for spec in specs), 0

    def allocate(spec: TensorSpec) -> Any:
        nonlocal received
        if not tensors:
            _require_memory(total)
        progress(min(1.0, received / total))  # of the tensors before; more where a second peer begins anew
        received += spec.num_bytes
        tensors[spec.name] = empty_tensor(spec)
        return as_bytes(tensors[spec.name]).numpy()

    try:
        manifest = peer.fetch(specs, allocate, form)
    except (
        OSError,
        RuntimeError,
        ValueError,
        LookupError,
        MemoryError,
    ) as error:  # of mappings, torch, libraries
        message = f"weights of a peer: {type(error).__name__}: {_first_line(error)}"
        raise FailedPreconditionError(message, reason="WEIGHTS_UNUSABLE") from None
    return tensors, manifest


def _require_memory(num_bytes: int) -> None:
    free = free_memory()
    if free is not None and num_bytes > free:
        message = f"weights of a peer: they take {num_bytes} bytes, and {free} bytes of memory are free"
        raise UnavailableError(message, reason="NO_MEMORY")


def _detach_from_file(module: Any) -> None:
    """Copies the remaining weights out of the mapped file, which would otherwise stay in memory as a whole."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
