"""The weights of an engine: loaded, or kept by the process that this one was forked from."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch

from engine.backends.cpu.int8_linears import check_quantization
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cuda.forward import prepare_device
from engine.backends.select import choose_backend
from engine.core.types import ModelFacts
from engine.kv_cache.kv_dtype import kv_dtype
from engine.model.loaded_model import LoadedModel
from engine.runner.device import choose_device
from engine.runner.dtype import choose_dtype, log_dtype
from engine.runner.model_loader import load_model
from kv_transfer.layout import SAME
from kv_transfer.weights.taker import WeightsSource
from kv_transfer.wire_format import check_wire_dtype
from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.logs import log_event, recorded_events, repeat_events
from splitserve.models.sources import FileStamp, ModelSource, file_stamps, resolve_model
from splitserve.runtime.process import environment_with

SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"
"""With this variable `transformers` reads weights on the thread that asks."""


MAX_KEPT_BYTES = 2 << 30
"""Larger models are read by each worker, which shows how far it is; nobody waits for them meanwhile."""


DISK, KEPT, PEER = "disk", "kept", "peer"


class Weights(NamedTuple):
    """A loaded model, and the kernels that it was loaded with, if any."""

    model: LoadedModel
    kernels: CpuKernels | None
    origin: str = DISK
    """Where its weights came from: the model's files, the process that this one was forked from, or a peer."""


class _WeightsKey(NamedTuple):
    """What weights depend on."""

    source: ModelSource
    dtype: str
    quantization: str
    device: str
    cpu_kernels: str
    files: tuple[FileStamp, ...]

    @classmethod
    def of(cls, config: EngineConfig, source: ModelSource, dtype: str, device: torch.device) -> _WeightsKey:
        return cls(source, dtype, config.quantization, str(device), config.cpu_kernels, file_stamps(source))

    @property
    def most_bytes(self) -> int:
        """Memory that they take; files hold two bytes a parameter at least, unless they are quantized."""
        return sum(file.num_bytes for file in self.files) * (2 if self.dtype == "float32" else 1)


class _KeptWeights(NamedTuple):
    """Loaded weights that nobody uses yet, and what was logged while they were loaded."""

    key: _WeightsKey
    weights: Weights
    events: list[logging.LogRecord]


_kept: list[_KeptWeights] = []


def keep_weights(config: EngineConfig, model: str, wire_dtype: str = SAME) -> ModelFacts | None:
    """Loads a model's weights for processes that are forked from this one later: a worker with such settings takes
    them. Computes on one thread, and leaves none behind. Returns what the model is; None: its weights are not kept.

    A model that is large, not on this machine or cannot be loaded is left to the workers, who say why.
    """
    try:
        with recorded_events() as events, environment_with({SYNCHRONOUS: "1"}):
            source = resolve_model(model)
            if not source.is_local or source.gguf_file:
                return None
            device = choose_device(config.device)
            dtype = choose_dtype(config, device, wire_dtype)
            key = _WeightsKey.of(config, source, dtype, device)
            if key.most_bytes > MAX_KEPT_BYTES:
                return None
            torch.set_num_threads(1)
            gc.freeze()  # a collection of what loading leaves behind looks at nothing else
            weights = _load(config, source, dtype, device, lambda _fraction: None)
    except Exception:  # of whatever kind: libraries raise many, and this process has to live
        return None
    _kept[:] = [_KeptWeights(key, weights, events)]
    gc.collect()  # what loading left behind would be copied by each process
    return weights.model.facts


def _take(config: EngineConfig, source: ModelSource, dtype: str, device: torch.device) -> Weights | None:
    """The kept weights, if they are these. To be used once: they are of one engine then."""
    if not _kept or not source.is_local:
        return None
    with suppress(OSError):  # files that come and go: loading says which
        if _kept[0].key == _WeightsKey.of(config, source, dtype, device):
            return _taken()
    return None


def _taken() -> Weights:
    weights, events = _kept[0].weights, _kept[0].events
    _kept.clear()
    repeat_events(events)
    if weights.kernels is not None:
        weights.kernels.threads = torch.get_num_threads()
    return weights._replace(origin=KEPT)


def load_weights(
    config: EngineConfig,
    source: ModelSource,
    progress: Callable[[float], None],
    wire_dtype: str = SAME,
    peer: WeightsSource | None = None,
) -> Weights:
    """Loads a model, or takes it where it is kept; sets the number of compute threads of the process. Raises as
    `build_torch_runner`.

    With `peer` its weights come from there; whatever goes wrong with that is logged, and they come from files."""
    device = choose_device(config.device)
    dtype = choose_dtype(config, device, wire_dtype)
    log_dtype(config, device, dtype)
    check_wire_dtype(wire_dtype, kv_dtype(config, dtype))
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    choose_backend(config.attention_backend, device)
    kept = _take(config, source, dtype, device)
    if kept is not None:
        progress(1.0)
        return kept
    if peer is not None and not source.gguf_file:
        try:
            return _load(config, source, dtype, device, progress, peer)._replace(origin=PEER)
        except SplitserveError as error:
            log_event("weights.not_from_peer", level=logging.WARNING, reason=error.reason, why=error.message)
    return _load(config, source, dtype, device, progress)


def _load(
    config: EngineConfig,
    source: ModelSource,
    dtype: str,
    device: torch.device,
    progress: Callable[[float], None],
    peer: WeightsSource | None = None,
) -> Weights:
    if device.type == "cuda":
        prepare_device(device)
    check_quantization(config, dtype, device)
    kernels = cpu_kernels(config, dtype, device)
    return Weights(load_model(source, dtype, device, progress, config.quantization, kernels, peer), kernels)


def cpu_kernels(config: EngineConfig, dtype: str, device: torch.device) -> CpuKernels | None:
    """Our cpu kernels if this engine uses them; None, and a log event, if they cannot be compiled here."""
    if config.cpu_kernels == "off" or device.type != "cpu" or dtype != "bfloat16":
        return None
    try:
        return CpuKernels(torch.get_num_threads())
    except UnavailableError as error:
        log_event("engine.cpu_kernels_off", why=error.message)
        return None
