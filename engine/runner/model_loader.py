"""Loads a model onto the device and in the type that the settings say: configuration, checks, weights, packing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.linears import replace_linears, replace_norms
from engine.backends.cuda.forward import prepare_device
from engine.backends.select import choose_backend
from engine.core.model_runner import ModelFacts
from engine.kv_cache.memory import DTYPES
from engine.model.adapter import folder_shapes
from engine.model.attention_interface import ATTENTION_NAME, AttentionContext, bind_layers
from engine.model.loaded_model import LoadedModel, eos_token_ids, model_fingerprint
from engine.model.probe import probe_logits, probe_model
from engine.model.support import context_limit, declared_windows, refuse_by_class, refuse_by_config
from engine.runner.device import choose_device, choose_dtype, log_dtype
from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError, UnavailableError, UnsupportedModelError
from splitserve.logs import log_event
from splitserve.models.model_files import CONFIG_FILE, INDEX_FILE, check_settings, damaged, read_object
from splitserve.models.sources import ModelSource, local_files

_MAX_CHARACTERS = 400


def load_weights(config: EngineConfig, source: ModelSource) -> tuple[LoadedModel, CpuKernels | None]:
    """Loads a model, and the kernels that compute it on cpu; sets the number of compute threads of the process.

    Raises UnavailableError and UnsupportedModelError as `load_model`, and ConfigError as `choose_backend`, before
    anything is loaded.
    """
    device = choose_device(config.device)
    dtype = choose_dtype(config, device)
    log_dtype(config, device, dtype)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    choose_backend(config.attention_backend, device)
    if device.type == "cuda":
        prepare_device(device)
    kernels = cpu_kernels(config, dtype, device)
    return load_model(source, dtype, device, kernels), kernels


def cpu_kernels(config: EngineConfig, dtype: str, device: torch.device) -> CpuKernels | None:
    """Our cpu kernels if this engine uses them; None, and a log event, if they cannot be compiled here."""
    if config.cpu_kernels == "off" or device.type != "cpu" or dtype != "bfloat16":
        return None
    try:
        return CpuKernels(torch.get_num_threads())
    except UnavailableError as error:
        log_event("engine.cpu_kernels_off", why=error.message)
        return None


def load_model(
    source: ModelSource,
    dtype: str,
    device: torch.device,
    kernels: CpuKernels | None = None,
) -> LoadedModel:
    """Loads a model in evaluation mode.

    `source` comes from `checked_model`; `dtype` is "float32" or "bfloat16"; `kernels` are for bfloat16 on cpu.
    Raises UnsupportedModelError for a model family or option that the engine refuses, before weights are downloaded or
    read where possible; what `local_files` raises.
    """
    files = local_files(source, weights=False)
    path = Path(files.path) / (files.gguf_file or CONFIG_FILE)
    with _naming(path):
        config = AutoConfig.from_pretrained(files.path, local_files_only=True, **_gguf_options(files))
        settings = config.to_dict()
        check_settings(path, settings)
        refuse_by_config(settings)
        context_tokens = context_limit(settings)
        with torch.device("meta"), no_init_weights():  # its class and its modules
            skeleton = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
        refuse_by_class(skeleton)
        module = _load_weights(local_files(source), skeleton, DTYPES[dtype], device)
        context = AttentionContext()
        layers = bind_layers(module, context, declared_windows(settings))
        attention = probe_model(module, context, layers, settings)
    facts = ModelFacts(
        context_tokens,
        int(config.vocab_size),
        eos_token_ids(module),
        # `compute_logits` scores prompts with a model whose layers run apart from its output layer.
        scores_prompts=module.base_model is not module,
    )
    fingerprint = model_fingerprint(settings, module.state_dict(), module.all_tied_weights_keys)
    if kernels is not None:
        replace_norms(module, kernels)
        replace_linears(module, lambda: probe_logits(module, context), kernels)
        # Copies the remaining weights out of the mapped file, which would otherwise stay in memory as a whole.
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    return LoadedModel(module, config, context, facts, attention, dtype, device, fingerprint)


def _gguf_options(source: ModelSource) -> dict[str, Any]:
    return {"gguf_file": source.gguf_file} if source.gguf_file else {}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Replaces errors of `transformers` by an UnsupportedModelError of one line that names the path."""
    try:
        yield
    except SplitserveError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:_MAX_CHARACTERS] or type(error).__name__
        unknown = " is not known" if isinstance(error, KeyError) and " " not in why else ""
        raise damaged(path, why + unknown, UnsupportedModelError.default_reason) from error


def _load_weights(source: ModelSource, skeleton: Any, dtype: torch.dtype, device: torch.device) -> Any:
    options = _gguf_options(source)
    if source.gguf_file:
        # Imported here, because few installations serve GGUF files directly.
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    if device.type != "cpu":
        # Loads tensors to the device one by one, without a whole copy on the host.
        options["device_map"] = {"": device}
    with _with_metadata(Path(source.path)) as folder:
        try:
            module, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
        except RuntimeError:
            if why := _misfit(skeleton, folder):
                raise damaged(Path(source.path), why) from None
            raise
    if missing := sorted(info["missing_keys"]):
        message = f"model {source.path}: its files lack {len(missing)} weights, for example {missing[0]}"
        raise UnsupportedModelError(message, reason="MODEL_INCOMPLETE")
    for name, buffer in module.named_buffers():
        if not bool(buffer.isfinite().all()):
            raise damaged(Path(source.path) / CONFIG_FILE, f"with its settings {name} is not finite")
    return module.eval()


@contextmanager
def _with_metadata(folder: Path) -> Iterator[Path]:
    """The folder, or one of links to its files if its index lacks the metadata that `transformers` asks for."""
    path = folder / INDEX_FILE
    index = read_object(path) if path.is_file() else {"metadata": {}}
    if isinstance(index.get("metadata"), dict):
        yield folder
        return
    with TemporaryDirectory(prefix="splitserve-") as links:
        for file in folder.iterdir():
            if file.name != INDEX_FILE:
                Path(links, file.name).symlink_to(file.resolve())
        Path(links, INDEX_FILE).write_text(json.dumps(index | {"metadata": {}}), encoding="utf-8")
        yield Path(links)


def _misfit(skeleton: Any, folder: Path) -> str:
    """Names the first weight whose shape differs from the configuration's; empty if there is none."""
    expected = skeleton.state_dict()
    for name, shape in folder_shapes(folder).items():
        if name in expected and tuple(expected[name].shape) != shape:
            configured = list(expected[name].shape)
            return f"{CONFIG_FILE} asks for {name} {configured}, the weights have {list(shape)}"
    return ""
