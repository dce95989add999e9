"""A request on its way through the simulated cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoscaler.simulation.trace import TraceRequest

if TYPE_CHECKING:
    from autoscaler.simulation.decode_replica import DecodeReplica
    from autoscaler.simulation.prefill_replica import PrefillReplica


class Job:
    """One request's state and stamps. Times in seconds of the virtual clock; None: did not happen."""

    __slots__ = (
        "arrival_s",
        "block_ids",
        "cached",
        "computed",
        "decode",
        "decoded",
        "failed",
        "finished_s",
        "first_token_s",
        "joined_s",
        "output_tokens",
        "prefill",
        "prompt_tokens",
        "reserved_s",
        "started_s",
    )

    def __init__(self, request: TraceRequest) -> None:
        self.arrival_s = request.arrival_s
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.block_ids = request.block_ids
        self.cached = 0
        """Prompt tokens that prefill need not compute."""
        self.computed = 0
        """Position up to which the prompt is computed, cached ones counted."""
        self.decoded = 0
        """Tokens after the first that were decoded before the sequence was preempted."""
        self.prefill: PrefillReplica | None = None
        self.decode: DecodeReplica | None = None
        self.reserved_s: float | None = None
        """Decode had room for it."""
        self.started_s: float | None = None
        """Its first chunk began."""
        self.first_token_s: float | None = None
        self.joined_s: float | None = None
        """Its KV was complete on decode."""
        self.finished_s: float | None = None
        self.failed = False

    @property
    def remaining(self) -> int:
        """Prompt tokens that are still to be computed."""
        return self.prompt_tokens - self.computed

    @property
    def kv_tokens(self) -> int:
        """KV that decode needs to begin with it: the prompt, and what was decoded before a preemption."""
        return self.prompt_tokens + self.decoded

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, handoff included; None with fewer than two tokens."""
        if self.finished_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)
