"""A replica's memory and step times, from the figures of its GPU and its model (Williams et al. 2009).

Prompts are bound by arithmetic: two operations a parameter and token, four a head dimension and token of context.
Decode steps are bound by memory: all weights are read once a step, and the KV of every sequence. Ranks of one replica
add their all-reduces, two a layer. Efficiencies say which share of a peak is reached; their defaults are chosen so that
they agree with the presets of `autoscaler.sizing.engine_model`, see docs/plan.md.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from autoscaler.sizing.engine_model import EngineModel
from autoscaler.sizing.gpu_catalog import GpuClass
from autoscaler.sizing.model_shape import WEIGHT_BITS, ModelShape
from splitserve.errors import FailedPreconditionError, InvalidArgumentError

GPU_COUNTS = (1, 2, 4, 8)
"""Of one replica."""
RUNNING_REQUESTS = 512


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is reached of the peaks, and what a replica keeps for itself."""

    compute: float = 0.33
    """Share of peak arithmetic in matrices of a prompt."""
    attention: float = 0.30
    """The same in its attention."""
    memory: float = 0.70
    """Share of peak memory bandwidth in a decode step."""
    link: float = 0.50
    """Share of the links' peak in all-reduces."""
    decode_compute: float = 0.33
    """Share of a token's computation that is not hidden behind reading weights in a decode step."""
    all_reduce_us: float = 25.0
    """Latency of one all-reduce, microseconds."""
    memory_share: float = 0.90
    """Of a GPU's memory, for weights, workspace and KV."""
    workspace_gb: float = 1.5
    """Of each GPU: activations, kernels, graphs. 10^9 bytes."""

    @classmethod
    def parse(cls, text: str) -> Efficiency:
        """The defaults, but for what `compute=0.4,memory=0.8` says. Raises InvalidArgumentError."""
        names = {field.name for field in dataclasses.fields(cls)}
        found: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, written = part.partition("=")
            if name not in names:
                message = f"efficiency: no such part: {name!r} ({', '.join(sorted(names))})"
                raise InvalidArgumentError(message, field="efficiency")
            try:
                value = float(written)
            except ValueError:
                value = math.nan
            absolute = name in ("all_reduce_us", "workspace_gb")
            if not (0 <= value <= 1000 if absolute else 0 < value <= 1):
                bound = "0..1000" if absolute else "above 0 and at most 1"
                message = f"efficiency.{name} must be {bound}, not {written!r}"
                raise InvalidArgumentError(message, field=f"efficiency.{name}")
            found[name] = value
        return cls(**found)


@dataclass(frozen=True, slots=True)
class ReplicaDesign:
    """One replica: its GPUs and how fast they are. Sizes in 10^9 bytes, of all its GPUs together."""

    gpus: int
    engine: EngineModel
    weights_gb: float | None = None
    workspace_gb: float | None = None
    kv_gb: float | None = None


def design(
    model: ModelShape, gpu: GpuClass, gpus: int, efficiency: Efficiency, lane_gb_per_s: float
) -> ReplicaDesign:
    """A replica of so many GPUs. `lane_gb_per_s` is each GPU's lane to other workers, 10^9 bytes a second.

    Raises FailedPreconditionError (MODEL_DOES_NOT_FIT), InvalidArgumentError for heads that cannot be divided.
    """
    if model.heads % gpus or (model.kv_heads % gpus and gpus % model.kv_heads):
        message = f"gpus_per_replica: {model.heads} heads ({model.kv_heads} of keys) do not divide among {gpus} GPUs"
        raise InvalidArgumentError(message, field="gpus_per_replica")
    usable_gb = gpus * gpu.memory_gb * efficiency.memory_share
    weights_gb, workspace_gb = model.weight_bytes / 1e9, gpus * efficiency.workspace_gb
    kv_gb = usable_gb - weights_gb - workspace_gb
    # More ranks than heads of keys hold copies of them.
    copies = max(1, gpus // model.kv_heads)
    kv_tokens = math.floor(kv_gb * 1e9 / (model.kv_bytes_per_token * copies))
    if kv_tokens < 1:
        message = (
            f"gpu: {model.name} does not fit {gpus} x {gpu.name}: weights {weights_gb:.1f} GB and workspace "
            f"{workspace_gb:.1f} GB of {usable_gb:.1f} GB leave nothing for KV"
        )
        raise FailedPreconditionError(message, reason="MODEL_DOES_NOT_FIT", field="gpu")
    engine = dataclasses.replace(
        _timing(model, gpu, gpus, efficiency),
        kv_capacity_tokens=kv_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token,
        link_gb_per_s=lane_gb_per_s * gpus,
        max_running_requests=RUNNING_REQUESTS,
        context_tokens=model.context_tokens,
    )
    return ReplicaDesign(gpus, engine, weights_gb, workspace_gb, kv_gb)


def _timing(model: ModelShape, gpu: GpuClass, gpus: int, efficiency: Efficiency) -> EngineModel:
    narrow = WEIGHT_BITS[model.weights] == 8 and gpu.fp8_tflops > 0
    matrices = (gpu.fp8_tflops if narrow else gpu.bf16_tflops) * 1e12 * gpus * efficiency.compute
    attention = gpu.bf16_tflops * 1e12 * gpus * efficiency.attention
    memory = gpu.memory_gb_per_s * 1e9 * gpus * efficiency.memory
    token_s = 2 * model.active_parameters / matrices
    exchange_s = latency_s = 0.0
    if gpus > 1:
        # A ring sends each rank 2 (n - 1) / n of the values, in one direction.
        sent = 2 * model.layers * model.hidden * 2 * 2 * (gpus - 1) / gpus
        exchange_s = sent / (gpu.link_gb_per_s / 2 * 1e9 * efficiency.link)
        latency_s = 2 * model.layers * efficiency.all_reduce_us * 1e-6
    copies = max(1, gpus // model.kv_heads)
    return EngineModel(
        prefill_token_s=token_s + exchange_s,
        # The sum over the positions before each one is half of end^2 - start^2.
        prefill_token2_s=2 * model.layers * model.heads * model.head_dim / attention,
        step_s=model.weight_bytes / memory + latency_s,
        sequence_s=token_s * efficiency.decode_compute + exchange_s,
        context_token_s=model.kv_bytes_per_token * copies / memory,
    )
