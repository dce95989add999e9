"""Timing of a replica: the formulas of `engine.runner.simulated_runner`, and presets for real hardware."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoscaler.snapshot import PoolName
from splitserve.config.engine import EngineConfig
from splitserve.errors import InvalidArgumentError

DEFAULT_KV_TOKENS = 65536 * 16
"""Blocks and block size that a simulated engine has by default."""
DEFAULT_CONTEXT_TOKENS = 131072
DEFAULT_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One replica of either pool. Times in seconds, lengths in tokens.

    A step that computes prompt tokens from position s to e takes
    `prefill_step_s + prefill_token_s * (e - s) + prefill_token2_s * (e^2 - s^2)`, summed over the step's chunks; a
    decode step of B sequences with C tokens of context together
    `step_s + sequence_s * B + context_token_s * C`.
    """

    prefill_token_s: float = 20e-6
    prefill_token2_s: float = 0.0
    step_s: float = 2e-3
    sequence_s: float = 50e-6
    context_token_s: float = 0.0
    max_step_tokens: int = 2048
    max_running_requests: int = 64
    kv_capacity_tokens: int = DEFAULT_KV_TOKENS
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    kv_bytes_per_token: int = 131072
    link_gb_per_s: float = 10.0
    """Of one prefill replica's lane, 10^9 bytes a second."""
    handoff_s: float = 2e-3
    """From the arrival of the last byte to the first decode step: completion, admission."""
    prefill_step_s: float | None = None
    """Fixed part of a step with prompt tokens. Default: `step_s`, as for a decode step."""
    separate_steps: bool = False
    """Whether prompts with targets have steps of their own beside decodes that have targets, as on cpu without kernels.
    """
    lent_time: float = 0.53
    """What a chunk takes, of its time alone, on the cores of two replicas, where these lend each other theirs."""
    request_s: float = 0.0
    """From a request's arrival until its prompt is queued: validation, tokenization, routing, reservation."""

    @classmethod
    def of(cls, config: EngineConfig) -> EngineModel:
        """The replica that `config` describes for the simulated runner."""
        blocks = config.num_blocks or DEFAULT_KV_TOKENS // config.block_size_tokens
        return cls(
            prefill_token_s=config.simulated_prefill_token_s,
            prefill_token2_s=config.simulated_prefill_token2_s,
            step_s=config.simulated_step_s,
            sequence_s=config.simulated_sequence_s,
            context_token_s=config.simulated_context_token_s,
            max_step_tokens=config.max_step_tokens or DEFAULT_STEP_TOKENS,
            max_running_requests=config.max_running_requests,
            kv_capacity_tokens=blocks * config.block_size_tokens,
            context_tokens=config.context_tokens or DEFAULT_CONTEXT_TOKENS,
            separate_steps=True,
        )

    def at_speed(self, pool: PoolName, speed: float) -> EngineModel:
        """A replica of a class that does the work of `speed` such replicas, as the policy file has it: prompts in so
        much less time, or so many times the batch in steps as long."""
        if speed == 1:
            return self
        if pool == "prefill":
            return replace(
                self,
                prefill_token_s=self.prefill_token_s / speed,
                prefill_token2_s=self.prefill_token2_s / speed,
                prefill_step_s=self.prefill_base_s / speed,
                link_gb_per_s=self.link_gb_per_s * speed,
            )
        return replace(
            self,
            sequence_s=self.sequence_s / speed,
            context_token_s=self.context_token_s / speed,
            max_running_requests=round(self.max_running_requests * speed),
            kv_capacity_tokens=round(self.kv_capacity_tokens * speed),
        )

    def prefill_s(self, start: int, end: int) -> float:
        """Compute time of the prompt positions [`start`, `end`), without the fixed part of a step."""
        return self.prefill_token_s * (end - start) + self.prefill_token2_s * (end * end - start * start)

    def prompt_s(self, tokens: int) -> float:
        """Time of a whole prompt on an idle replica."""
        return math.ceil(tokens / self.max_step_tokens) * self.prefill_base_s + self.prefill_s(0, tokens)

    @property
    def prefill_base_s(self) -> float:
        """Fixed part of a step with prompt tokens, seconds."""
        return self.step_s if self.prefill_step_s is None else self.prefill_step_s

    def decode_step_s(self, sequences: float, context_tokens: float) -> float:
        """Duration of a decode step."""
        return self.step_s + self.sequence_s * sequences + self.context_token_s * context_tokens

    def step_of(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Duration of a step of these chunks [start, end) of prompts, and of decodes with so many tokens each. One of
        both reads the weights once, while it computes: it takes what the chunks do and each decode adds, and no less
        than the decodes alone."""
        decode_s = self.decode_step_s(len(contexts), sum(contexts))
        if not chunks:
            return decode_s
        prompts_s = self.prefill_base_s + sum(self.prefill_s(start, end) for start, end in chunks)
        return max(decode_s, prompts_s + decode_s - self.step_s) if contexts else prompts_s

    def transfer_s(self, tokens: int) -> float:
        """Time to write the KV of `tokens` tokens over one lane."""
        return tokens * self.kv_bytes_per_token / (self.link_gb_per_s * 1e9)


PRESETS: dict[str, EngineModel] = {
    "simulated": EngineModel.of(EngineConfig(kind="simulated")),
    # Llama-3.1-8B in bf16 on one H100. Prefill: 16 GFLOP a token at about 320 TFLOP/s, so 50 us, and
    # attention, 0.52 MFLOP a token and token of context before it, at about 300 TFLOP/s: 8.7e-10 s.
    # Decode: 16 GB of weights at about 2.3 TB/s, 131,072 bytes of KV a token at about 2.6 TB/s. KV pool:
    # 80 GB less weights and workspace. Lane: 200 Gbit/s.
    "h100-8b": EngineModel(
        prefill_token_s=50e-6,
        prefill_token2_s=8.7e-10,
        step_s=7e-3,
        sequence_s=20e-6,
        context_token_s=50e-9,
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
        prefill_token_s=140e-6,
        prefill_token2_s=1.1e-9,
        step_s=18e-3,
        sequence_s=40e-6,
        context_token_s=35e-9,
        max_step_tokens=2048,
        max_running_requests=512,
        kv_capacity_tokens=400_000,
        kv_bytes_per_token=327_680,
        link_gb_per_s=100.0,
    ),
    # The same on eight H100: twice the compute at about 90% of its efficiency.
    "h100x8-70b": EngineModel(
        prefill_token_s=78e-6,
        prefill_token2_s=6e-10,
        step_s=13e-3,
        sequence_s=30e-6,
        context_token_s=19e-9,
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
