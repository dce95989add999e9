"""Routing of simulated requests: production's scores and order (`coordinator.route_scores`), over simulated replicas.

Every prefill replica is connected to every decode replica here, so that the least pair is the least of each pool;
`LeastWaitRouter` finds the same one. What a coordinator learns by reports every half second is known at once,
and what it has sent counts until it is there.
"""

from __future__ import annotations

import math

from autoscaler.simulation.decode_replica import DecodeReplica
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.jobs import Job
from autoscaler.simulation.prefill_replica import PrefillReplica
from coordinator.local_prefill import LocalPrefillFacts, local_prefill_tokens
from coordinator.route_scores import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    DEFAULT_STEP_S,
    decode_score_s,
    least,
    prefill_score_s,
)

_BLOCK_TOKENS = 16
_ARRIVAL_MEMORY_S = 10.0


class Router:
    """Chooses pairs among the replicas in rotation."""

    def __init__(self, engine: EngineModel) -> None:
        self._engine = engine
        self._turn = -1
        self._arrivals = 0.0
        self._seen_s = 0.0
        self.prefill: list[PrefillReplica] = []
        self.decode: list[DecodeReplica] = []

    def choose(
        self, job: Job, now_s: float, lending: bool
    ) -> tuple[PrefillReplica | None, DecodeReplica | None] | None:
        """A pair; without decode for answers of one token, without prefill where decode computes the prompt itself;
        None while a pool has nobody in rotation."""
        self._turn += 1
        self._arrivals = self._arrivals * math.exp((self._seen_s - now_s) / _ARRIVAL_MEMORY_S) + 1.0
        self._seen_s = now_s
        if not self.prefill or not (self.decode or job.output_tokens < 2):
            return None
        prefill, wait_s = self._least_prefill(job)
        if job.output_tokens < 2:
            return prefill, None
        decode = self._least_decode(job)
        if lending and job.prompt_tokens <= self._local_tokens(prefill, decode, wait_s):
            return None, decode
        return prefill, decode

    def _least_prefill(self, job: Job) -> tuple[PrefillReplica, float]:
        replicas = self.prefill
        rates = [replica.rates.prefill_tokens_per_s for replica in replicas]
        measured = [rate for rate in rates if rate > 0]
        default = sum(measured) / len(measured) if measured else DEFAULT_PREFILL_TOKENS_PER_S
        prompt = job.prompt_tokens
        scores = [
            prefill_score_s(replica.queued_tokens + replica.expected_tokens, prompt, rate or default)
            for replica, rate in zip(replicas, rates, strict=True)
        ]
        best = least(scores, self._turn)
        return replicas[best], scores[best]

    def _least_decode(self, job: Job) -> DecodeReplica:
        replicas = self.decode
        steps = [replica.step_s for replica in replicas]
        measured = [step for step in steps if step > 0]
        default = sum(measured) / len(measured) if measured else DEFAULT_STEP_S
        needed = (job.prompt_tokens + 1) / _BLOCK_TOKENS
        capacity, most = self._engine.kv_capacity_tokens, self._engine.max_running_requests
        scores = [
            decode_score_s(
                needed,
                (capacity - replica.context_tokens) / _BLOCK_TOKENS,
                replica.context_tokens / _BLOCK_TOKENS,
                step or default,
                replica.load,
                most,
            )
            for replica, step in zip(replicas, steps, strict=True)
        ]
        return replicas[least(scores, self._turn)]

    def _local_tokens(self, prefill: PrefillReplica, decode: DecodeReplica, wait_s: float) -> int:
        rate = prefill.rates.prefill_tokens_per_s
        if not rate:
            return 0
        facts = LocalPrefillFacts(
            split_s=wait_s + self._engine.handoff_s,
            tokens_per_s=rate,
            waiting_tokens=decode.local_tokens,
            running_requests=decode.running,
            arrivals_per_s=self._arrivals / _ARRIVAL_MEMORY_S / len(self.decode),
        )
        return local_prefill_tokens(facts)
