"""One simulated replica: splitserve's latency model and limits, from a preset or measured by a running cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from splitserve.config.engine import EngineConfig
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency, mean_latency
from splitserve.v1 import scaling_pb2

DEFAULT_KV_TOKENS = 65536 * 16
"""Blocks and block size that a simulated engine has by default."""
DEFAULT_CONTEXT_TOKENS = 131072
DEFAULT_STEP_TOKENS = 2048
_PREFILL, _DECODE = PrefillLatency(2e-3, 20e-6), DecodeLatency(2e-3, 50e-6)


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One replica of either pool. Times in seconds, lengths in tokens."""

    prefill: PrefillLatency = _PREFILL
    decode: DecodeLatency = _DECODE
    max_step_tokens: int = 2048
    max_running_requests: int = 64
    kv_capacity_tokens: int = DEFAULT_KV_TOKENS
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    kv_bytes_per_token: int = 131072
    link_gb_per_s: float = 10.0
    """Speed of one prefill replica's link, 10^9 bytes a second."""
    handoff_s: float = 2e-3
    """From the arrival of the last byte to the first decode step: completion, admission."""
    request_s: float = 0.0
    """From a request's arrival until its prompt is queued: validation, tokenization, routing, reservation."""

    @classmethod
    def of(cls, config: EngineConfig) -> EngineModel:
        """The replica of an engine configuration of kind `simulated`."""
        blocks = config.num_blocks or DEFAULT_KV_TOKENS // config.block_size_tokens
        step_s, token2_s = config.simulated_step_s, config.simulated_prefill_token2_s
        return cls(
            PrefillLatency(step_s, config.simulated_prefill_token_s, 2 * token2_s),
            DecodeLatency(step_s, config.simulated_sequence_s, config.simulated_context_token_s),
            max_step_tokens=config.max_step_tokens or DEFAULT_STEP_TOKENS,
            max_running_requests=config.max_running_requests,
            kv_capacity_tokens=blocks * config.block_size_tokens,
            context_tokens=config.context_tokens or DEFAULT_CONTEXT_TOKENS,
        )

    @property
    def latency(self) -> LatencyModel:
        """The latency model in the form that workers report."""
        return LatencyModel(self.prefill, self.decode)

    def chunks_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Seconds that prompt chunks, (tokens, tokens of context before them), add to the base time of a step."""
        return sum(
            self.prefill.prefill_s(tokens, context) - self.prefill.base_s for tokens, context in chunks
        )

    def prompt_s(self, tokens: int) -> float:
        """Time of a whole prompt on an idle replica."""
        steps = math.ceil(tokens / self.max_step_tokens)
        return self.prefill.prefill_s(tokens) + (steps - 1) * self.prefill.base_s

    def transfer_s(self, tokens: int) -> float:
        """Time to write the KV of `tokens` tokens over one link."""
        return tokens * self.kv_bytes_per_token / (self.link_gb_per_s * 1e9)


PRESETS: dict[str, EngineModel] = {
    "simulated": EngineModel.of(EngineConfig(kind="simulated")),
    # Llama-3.1-8B in bf16 on one H100. Prefill: 16 GFLOP a token at about 320 TFLOP/s, so 50 us, and
    # attention, 0.52 MFLOP a token and token of context before it, at about 300 TFLOP/s: 8.7e-10 s.
    # Decode: 16 GB of weights at about 2.3 TB/s, 131,072 bytes of KV a token at about 2.6 TB/s. KV pool:
    # 80 GB less weights and workspace. Lane: 200 Gbit/s.
    "h100-8b": EngineModel(
        PrefillLatency(7e-3, 50e-6, 2 * 8.7e-10),
        DecodeLatency(7e-3, 20e-6, 50e-9),
        max_step_tokens=2048,
        max_running_requests=512,
        kv_capacity_tokens=420_000,
        link_gb_per_s=25.0,
    ),
    # Llama-2-70B in bf16 on four H100, tensor parallel. Prefill: 140 GFLOP a token at about 1 PFLOP/s of the four, so
    # 140 us, and attention, 2.6 MFLOP a token and token of context before it, at 1.2 PFLOP/s: 1.1e-9 s. Decode: 140 GB
    # of weights at about 10 TB/s and the all-reduces of 80 layers; 327,680 bytes of KV a token (grouped queries) at
    # the same rate. KV pool: 320 GB less weights and workspace. One 200 Gbit/s lane a GPU.
    "h100x4-70b": EngineModel(
        PrefillLatency(18e-3, 140e-6, 2 * 1.1e-9),
        DecodeLatency(18e-3, 40e-6, 35e-9),
        max_step_tokens=2048,
        max_running_requests=512,
        kv_capacity_tokens=400_000,
        kv_bytes_per_token=327_680,
        link_gb_per_s=100.0,
    ),
    # The same on eight H100: twice the compute at about 90% of its efficiency.
    "h100x8-70b": EngineModel(
        PrefillLatency(13e-3, 78e-6, 2 * 6e-10),
        DecodeLatency(13e-3, 30e-6, 19e-9),
        max_step_tokens=4096,
        max_running_requests=512,
        kv_capacity_tokens=1_300_000,
        kv_bytes_per_token=327_680,
        link_gb_per_s=200.0,
    ),
}


def preset(name: str) -> EngineModel:
    """A preset by name. Raises InvalidArgumentError with the names there are."""
    if name not in PRESETS:
        names = ", ".join(PRESETS)
        raise InvalidArgumentError(
            f"engine_preset: no such preset: {name!r} ({names})", field="engine_preset"
        )
    return PRESETS[name]


def measured_engine(workers: Sequence[scaling_pb2.WorkerSignals]) -> EngineModel:
    """The mean of the latency models that workers of one model report, and the lowest of their limits.

    Raises FailedPreconditionError (NOT_MEASURED) if no worker has computed enough prompts, or enough decode steps.
    """
    measured = mean_latency([LatencyModel.from_proto(worker.load.latency) for worker in workers])
    for what, part in (("prompts", measured.prefill), ("decode steps", measured.decode)):
        if part is None:
            message = f"no worker has measured how long {what} take: send it requests first"
            raise FailedPreconditionError(message, reason="NOT_MEASURED", field="target")
    assert measured.prefill is not None
    assert measured.decode is not None
    model = EngineModel(measured.prefill, measured.decode)
    reported = {
        name: min(values)
        for name in ("max_step_tokens", "max_running_requests", "kv_capacity_tokens", "kv_bytes_per_token")
        if (values := [value for worker in workers if (value := getattr(worker, name))])
    }
    if lanes := [worker.lane_gb_per_second for worker in workers if worker.HasField("lane_gb_per_second")]:
        model = replace(model, link_gb_per_s=median(lanes))
    return replace(model, **reported)
