"""A replica's memory and step times, from the figures of its GPU and its model (Williams et al. 2009).

Prompts are bound by arithmetic: two operations a parameter and token, four a head dimension and token of context.
Decode steps are bound by memory: all weights are read once a step, and the KV of every sequence. Ranks of one replica
add their all-reduces, two a layer. Constants give the reached share of a peak. They are chosen so that replicas agree
with the presets of `autoscaler.simulation.engine_model`; see docs/guides/capacity-planning.md.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from autoscaler.simulation.engine_model import EngineModel
from autoscaler.sizing.model_shape import WEIGHT_BITS, ModelShape
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.latency_model import DecodeLatency, PrefillLatency

_NVIDIA = "https://www.nvidia.com/en-us/data-center"


@dataclass(frozen=True, slots=True)
class GpuClass:
    """One GPU. Rates are peaks without sparsity: 10^12 operations, 10^9 bytes a second; memory in 10^9 bytes.

    `link_gb_per_s` is the link to the other GPUs of the host, NVLink or else PCIe, both directions together, as in
    datasheets. `fp8_tflops` is 0 for a GPU without such units.
    """

    name: str
    memory_gb: float
    memory_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float
    link_gb_per_s: float
    source: str
    """Where the figures are published."""


_CLASSES = (
    GpuClass("H100", 80, 3350, 989, 1979, 900, f"{_NVIDIA}/h100/"),
    GpuClass("H100-NVL", 94, 3900, 835, 1671, 600, f"{_NVIDIA}/h100/"),
    GpuClass("H200", 141, 4800, 989, 1979, 900, f"{_NVIDIA}/h200/"),
    GpuClass("B200", 180, 8000, 2250, 4500, 1800, f"{_NVIDIA}/dgx-b200/"),
    GpuClass("A100-80GB", 80, 2039, 312, 0, 600, f"{_NVIDIA}/a100/"),
    GpuClass("A100-40GB", 40, 1555, 312, 0, 600, f"{_NVIDIA}/a100/"),
    GpuClass("L40S", 48, 864, 362, 733, 64, f"{_NVIDIA}/l40s/"),
    GpuClass("L4", 24, 300, 121, 242, 64, f"{_NVIDIA}/l4/"),
    GpuClass("A10", 24, 600, 125, 0, 64, f"{_NVIDIA}/products/a10-gpu/"),
)
CATALOG = {gpu.name: gpu for gpu in _CLASSES}
"""By name: SXM modules unless the name says otherwise."""


def gpu_class(name: str) -> GpuClass:
    """A GPU by name, in any case. Raises InvalidArgumentError with the known names."""
    for known, gpu in CATALOG.items():
        if known.lower() == name.lower():
            return gpu
    raise InvalidArgumentError(f"gpu: not known: {name!r} ({', '.join(CATALOG)})", field="gpu")


GPU_COUNTS = (1, 2, 4, 8)
"""GPUs that one replica may have."""
RUNNING_REQUESTS = 512


COMPUTE = 0.33
"""Reached share of peak arithmetic in the matrix products of a prompt."""
ATTENTION = 0.30
"""Reached share of peak arithmetic in the attention of a prompt."""
MEMORY = 0.70
"""Reached share of peak memory bandwidth in a decode step."""
LINK = 0.50
"""Reached share of the links' peak in all-reduces."""
DECODE_COMPUTE = 0.33
"""Share of a token's computation that is not hidden behind reading weights in a decode step."""
ALL_REDUCE_S = 25e-6
"""Latency of one all-reduce."""
MEMORY_SHARE = 0.90
"""Share of a GPU's memory for weights, workspace and KV."""
WORKSPACE_GB = 1.5
"""Memory of each GPU for activations, kernels and graphs, in 10^9 bytes."""


@dataclass(frozen=True, slots=True)
class ReplicaDesign:
    """One replica: its number of GPUs and their speed. Sizes in 10^9 bytes, of all its GPUs together."""

    gpus: int
    engine: EngineModel
    weights_gb: float | None = None
    workspace_gb: float | None = None
    kv_gb: float | None = None


def replica_design(model: ModelShape, gpu: GpuClass, gpus: int, lane_gb_per_s: float) -> ReplicaDesign:
    """A replica with this number of GPUs. `lane_gb_per_s`: each GPU's lane to other workers, 10^9 bytes a second.

    Raises FailedPreconditionError (MODEL_DOES_NOT_FIT), InvalidArgumentError for heads that cannot be divided.
    """
    if model.heads % gpus or (model.kv_heads % gpus and gpus % model.kv_heads):
        message = f"gpus_per_replica: {model.heads} heads ({model.kv_heads} of keys) do not divide among {gpus} GPUs"
        raise InvalidArgumentError(message, field="gpus_per_replica")
    usable_gb = gpus * gpu.memory_gb * MEMORY_SHARE
    weights_gb, workspace_gb = model.weight_bytes / 1e9, gpus * WORKSPACE_GB
    kv_gb = usable_gb - weights_gb - workspace_gb
    # With more ranks than key-value heads, several ranks hold the same heads.
    copies = max(1, gpus // model.kv_heads)
    kv_tokens = math.floor(kv_gb * 1e9 / (model.kv_bytes_per_token * copies))
    if kv_tokens < 1:
        message = (
            f"gpu: {model.name} does not fit {gpus} x {gpu.name}: weights {weights_gb:.1f} GB and workspace "
            f"{workspace_gb:.1f} GB of {usable_gb:.1f} GB leave nothing for KV"
        )
        raise FailedPreconditionError(message, reason="MODEL_DOES_NOT_FIT", field="gpu")
    engine = dataclasses.replace(
        _timing(model, gpu, gpus),
        kv_capacity_tokens=kv_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token,
        link_gb_per_s=lane_gb_per_s * gpus,
        max_running_requests=RUNNING_REQUESTS,
        context_tokens=model.context_tokens,
    )
    return ReplicaDesign(gpus, engine, weights_gb, workspace_gb, kv_gb)


def _timing(model: ModelShape, gpu: GpuClass, gpus: int) -> EngineModel:
    has_fp8 = WEIGHT_BITS[model.weights] == 8 and gpu.fp8_tflops > 0
    matrix_flops = (gpu.fp8_tflops if has_fp8 else gpu.bf16_tflops) * 1e12 * gpus * COMPUTE
    attention_flops = gpu.bf16_tflops * 1e12 * gpus * ATTENTION
    memory_bytes_per_s = gpu.memory_gb_per_s * 1e9 * gpus * MEMORY
    token_s = 2 * model.active_parameters / matrix_flops
    exchange_s = latency_s = 0.0
    if gpus > 1:
        # A ring sends each rank 2 (n - 1) / n of the values, in one direction.
        sent = 2 * model.layers * model.hidden * 2 * 2 * (gpus - 1) / gpus
        exchange_s = sent / (gpu.link_gb_per_s / 2 * 1e9 * LINK)
        latency_s = 2 * model.layers * ALL_REDUCE_S
    copies = max(1, gpus // model.kv_heads)
    step_s = model.weight_bytes / memory_bytes_per_s + latency_s
    # A prompt of n tokens attends to n^2 / 2 pairs of tokens.
    pair_s = 4 * model.layers * model.heads * model.head_dim / attention_flops
    context_token_s = model.kv_bytes_per_token * copies / memory_bytes_per_s
    return EngineModel(
        PrefillLatency(step_s, token_s + exchange_s, pair_s),
        DecodeLatency(step_s, token_s * DECODE_COMPUTE + exchange_s, context_token_s),
    )
