"""How long prompts and decode steps take on one worker: the one model that all of splitserve predicts with.

A worker fits it to its own steps (`engine/scheduling`) and sends it in its load reports. Routing, admission, scaling
policies, the simulator and `splitserve plan` read it from there. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from statistics import fmean
from typing import TypeVar

from splitserve.v1 import registry_pb2

RATE_TOKENS = 512
"""Length of the prompt that `LatencyModel.prefill_tokens_per_s` is the rate of."""


def attention_pairs(tokens: int, context_tokens: int) -> float:
    """Pairs of a token and a key that it attends to, in a chunk of `tokens` after `context_tokens` with KV."""
    return tokens * (context_tokens + tokens / 2)


@dataclass(frozen=True, slots=True)
class PrefillLatency:
    """Seconds of a step that computes prompts: base_s + token_s * tokens + pair_s * pairs (`attention_pairs`)."""

    base_s: float
    token_s: float
    """Above 0."""
    pair_s: float = 0.0

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds for `tokens` prompt tokens after `context_tokens` that are computed or cached; 0 for no tokens."""
        return self.seconds(tokens, attention_pairs(tokens, context_tokens)) if tokens > 0 else 0.0

    def seconds(self, tokens: int, pairs: float) -> float:
        """Seconds of a step with `tokens` prompt tokens, of one or more prompts, and so many `attention_pairs`."""
        return self.base_s + self.token_s * tokens + self.pair_s * pairs

    def tokens_within(self, seconds: float, context_tokens: int = 0) -> int:
        """The most prompt tokens after `context_tokens` that take at most `seconds`."""
        left_s = seconds - self.base_s
        if left_s <= 0:
            return 0
        # pair_s / 2 * n^2 + linear_s * n = left_s, solved for n without cancellation.
        linear_s = self.token_s + self.pair_s * context_tokens
        return int(2 * left_s / (linear_s + math.sqrt(linear_s * linear_s + 2 * self.pair_s * left_s)))


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """Seconds of a step that only decodes: base_s + sequence_s * sequences + context_token_s * their KV tokens."""

    base_s: float
    sequence_s: float = 0.0
    context_token_s: float = 0.0

    def decode_step_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of a step of `sequences` sequences that have `context_tokens` tokens of KV together."""
        return self.base_s + self.sequence_s * sequences + self.context_token_s * context_tokens


Part = TypeVar("Part", PrefillLatency, DecodeLatency)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """What one worker has measured of its steps. A part is None until the worker has computed enough steps of its
    kind."""

    prefill: PrefillLatency | None = None
    decode: DecodeLatency | None = None

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float | None:
        """Seconds for `tokens` prompt tokens after `context_tokens`; None while unmeasured."""
        return self.prefill.prefill_s(tokens, context_tokens) if self.prefill is not None else None

    def decode_step_s(self, sequences: int, context_tokens: int) -> float | None:
        """Seconds of a decode step of `sequences` sequences with `context_tokens` of KV; None while unmeasured."""
        return self.decode.decode_step_s(sequences, context_tokens) if self.decode is not None else None

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second in a prompt of RATE_TOKENS; 0 while unmeasured."""
        seconds = self.prefill_s(RATE_TOKENS)
        return RATE_TOKENS / seconds if seconds else 0.0

    def present_step_s(self, load: registry_pb2.WorkerLoad, block_size_tokens: int) -> float:
        """Seconds of a decode step of the sequences and blocks that a load report counts; 0 while unmeasured."""
        sequences, context_tokens = max(1, load.running_requests), load.referenced_blocks * block_size_tokens
        return self.decode_step_s(sequences, context_tokens) or 0.0

    @classmethod
    def from_proto(cls, message: registry_pb2.LatencyModel) -> LatencyModel:
        """Reads a checked message."""
        prefill = decode = None
        if message.HasField("prefill"):
            part = message.prefill
            prefill = PrefillLatency(part.base_ms / 1e3, part.token_ms / 1e3, part.pair_ms / 1e3)
        if message.HasField("decode"):
            step = message.decode
            decode = DecodeLatency(step.base_ms / 1e3, step.sequence_ms / 1e3, step.context_token_ms / 1e3)
        return cls(prefill, decode)

    def to_proto(self) -> registry_pb2.LatencyModel:
        """The message of a load report."""
        message = registry_pb2.LatencyModel()
        if self.prefill is not None:
            message.prefill.base_ms = self.prefill.base_s * 1e3
            message.prefill.token_ms = self.prefill.token_s * 1e3
            message.prefill.pair_ms = self.prefill.pair_s * 1e3
        if self.decode is not None:
            message.decode.base_ms = self.decode.base_s * 1e3
            message.decode.sequence_ms = self.decode.sequence_s * 1e3
            message.decode.context_token_ms = self.decode.context_token_s * 1e3
        return message


UNMEASURED = LatencyModel()
"""The model of a worker that has computed nothing yet."""


def mean_latency(models: Iterable[LatencyModel]) -> LatencyModel:
    """The means of what workers have measured; a part that none of them has measured is None."""
    measured = list(models)
    prefill, decode = ([model.prefill for model in measured], [model.decode for model in measured])
    return LatencyModel(_mean(prefill), _mean(decode))


def _mean(parts: Iterable[Part | None]) -> Part | None:
    """The mean of each figure."""
    measured = [part for part in parts if part is not None]
    if not measured:
        return None
    kind = type(measured[0])
    return kind(*(fmean(getattr(part, figure.name) for part in measured) for figure in fields(kind)))
