"""Result rows from step times: tokens per second, share of the machine's limit, ratios to peers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

OWN = "splitserve"
LEAST_KV_TOKENS = 8192
"""KV of the longest context asked of vLLM, whatever the cases."""
KV_TOKENS_BESIDE = 512
"""Extra tokens per sequence: those decoded during others' prefill, the timed steps, and partly filled blocks."""


@dataclass(frozen=True)
class EngineCase:
    """One thing to time. `context` is the prompt's length, or the context at which decoding begins."""

    phase: Literal["decode", "prefill"]
    batch: int
    context: int
    steps: int

    @property
    def question(self) -> dict[str, Any]:
        """The case as a question of `bench.engine.processes.questions`, of so many steps."""
        return {"phase": self.phase, "batch": self.batch, "context": self.context, "steps": self.steps}

    @property
    def tokens(self) -> int:
        """Tokens of one step: one per sequence, or the whole prompt."""
        return self.batch if self.phase == "decode" else self.context


@dataclass(frozen=True)
class Work:
    """The least work of a model: bytes and operations that no implementation can avoid.

    `weights`: parameters that take part in every token's products, the output layer left out; `output`: those of the
    output layer; `kv_bytes`: of one token of context; `attention`: layers x query heads x head size.
    """

    weights: int
    output: int
    kv_bytes: int
    attention: int
    bytes_per_weight: int = 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, output layer included."""
        return (self.weights + self.output) * self.bytes_per_weight

    def kv_needed(self, case: EngineCase) -> int:
        """Bytes of KV that an engine must hold for this case."""
        return max(LEAST_KV_TOKENS, case.batch * (case.context + KV_TOKENS_BESIDE)) * self.kv_bytes

    def step_bytes(self, case: EngineCase) -> float:
        """Bytes read by one decode step: all weights once, and every sequence's KV."""
        context = case.context + case.steps / 2
        return self.weight_bytes + case.batch * context * self.kv_bytes

    def prompt_operations(self, case: EngineCase) -> float:
        """FLOPs of one prompt: two per weight and token, output layer once, causal attention."""
        tokens = case.context
        return 2 * self.weights * tokens + 2 * self.output + 4 * self.attention * tokens * (tokens + 1) / 2


@dataclass(frozen=True)
class EngineRow:
    """One case. `share_of_limit`: of the memory rate for decode, of the bf16 matrix rate for prefill, both measured
    beside it. Ratios are above 1 where splitserve is faster; None where the peer was not asked."""

    threads: int
    phase: str
    batch: int
    context_tokens: int
    step_ms: float
    tokens_per_s: float
    share_of_limit: float
    outside_model_ms: float | None
    ratio_to_vllm: float | None
    ratio_to_transformers: float | None


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median per key; for non-numbers, such as a device name, the first value."""
    first = runs[0] if runs else {}
    return {
        key: value if isinstance(value, str) else median(run[key] for run in runs)
        for key, value in first.items()
    }


def make_row(
    case: EngineCase,
    threads: int,
    steps: Mapping[str, Sequence[float]],
    outside_s: Sequence[float],
    work: Work,
    limits: Mapping[str, float],
) -> EngineRow:
    """`steps`: seconds of every step, by engine, `OWN` among them."""
    own_s = median(steps[OWN])
    if case.phase == "decode":
        share = work.step_bytes(case) / own_s / (limits["read_gb_per_s"] * 1e9)
    else:
        share = work.prompt_operations(case) / own_s / (limits["bf16_tflops"] * 1e12)

    def ratio(peer: str) -> float | None:
        return round(median(steps[peer]) / own_s, 3) if steps.get(peer) else None

    return EngineRow(
        threads=threads,
        phase=case.phase,
        batch=case.batch,
        context_tokens=case.context,
        step_ms=round(own_s * 1e3, 3),
        tokens_per_s=round(case.tokens / own_s, 1),
        share_of_limit=round(share, 3),
        outside_model_ms=round(median(outside_s) * 1e3, 3) if outside_s else None,
        ratio_to_vllm=ratio("vllm"),
        ratio_to_transformers=ratio("transformers"),
    )
