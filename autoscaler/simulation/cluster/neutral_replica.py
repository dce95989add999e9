"""A neutral replica: one engine that computes prompts for others and decodes, and leans to one pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autoscaler.simulation.cluster.replica import (
    CacheChanges,
    DecodeReplica,
    PrefillReplica,
    SimulatedRequest,
)
from autoscaler.snapshot import PoolName
from engine.pacing.step_time_fit import DecodeStepFit, PromptFit

LEANS_AFTER_S = 0.1
"""From the order to lean elsewhere until coordinators know that the replica does. Both are told at once, but a report
is not sent within this time after the one before."""


class NeutralReplica(PrefillReplica, DecodeReplica):
    """Two parts on one engine. Prompts that stay are computed by the decode part, as on decode replicas."""

    def __init__(self, name: str, ordered_s: float, leans: PoolName) -> None:
        super().__init__(name, ordered_s)
        self.asked = leans
        """Where it is asked to lean."""
        self.stays: list[tuple[float, PoolName]] = [(ordered_s, leans)]
        """Since when it has leaned where, seconds; the last one holds."""

    def bind(self, prefill: PrefillReplica, decode: DecodeReplica) -> None:
        """Sets its parts."""
        self._prefill, self._decode = prefill, decode

    @property
    def leans(self) -> PoolName:
        """The pool in which it is counted."""
        return self.stays[-1][1]

    @property
    def changes(self) -> Sequence[tuple[float, PoolName]]:
        """When it has changed sides, seconds, and where to."""
        return self.stays[1:]

    def lean(self, pool: PoolName, now_s: float) -> None:
        """Leans there from now on. What it has goes on."""
        self.stays.append((now_s, pool))

    @property
    def load(self) -> int:
        """Prompts and sequences of both parts."""
        return self._prefill.load + self._decode.load

    @property
    def prompts(self) -> int:
        """See PrefillReplica."""
        return self._prefill.load

    @property
    def waiting(self) -> int:
        """See PrefillReplica."""
        return self._prefill.waiting

    @property
    def queued_tokens(self) -> int:
        """See PrefillReplica."""
        return self._prefill.queued_tokens

    @property
    def backlog_tokens(self) -> int:
        """See PrefillReplica. Those of prompts that stay here, too."""
        return self._prefill.queued_tokens + self._decode.local_tokens

    @property
    def prefill_tokens_per_s(self) -> float:
        """See PrefillReplica."""
        return self._prefill.prefill_tokens_per_s

    @property
    def prompt_fit(self) -> PromptFit | None:
        """See PrefillReplica."""
        return self._prefill.prompt_fit

    @property
    def lent_speedup(self) -> float:
        """See PrefillReplica."""
        return self._prefill.lent_speedup

    @property
    def computed_tokens(self) -> int:
        """See PrefillReplica."""
        return self._prefill.computed_tokens

    @property
    def busy_s(self) -> float:
        """See PrefillReplica."""
        return self._prefill.busy_s

    def enqueue(self, request: SimulatedRequest, now_s: float) -> None:
        """See PrefillReplica."""
        self._prefill.enqueue(request, now_s)

    @property
    def tells_cache(self) -> bool:
        """See PrefillReplica."""
        return self._prefill.tells_cache

    @property
    def cache_has_changed(self) -> bool:
        """See PrefillReplica."""
        return self._prefill.cache_has_changed

    def take_cache_changes(self) -> CacheChanges:
        """See PrefillReplica."""
        return self._prefill.take_cache_changes()

    @property
    def running(self) -> int:
        """See DecodeReplica."""
        return self._decode.running

    @property
    def waiting_reservations(self) -> int:
        """See DecodeReplica."""
        return self._decode.waiting_reservations

    @property
    def context_tokens(self) -> float:
        """See DecodeReplica."""
        return self._decode.context_tokens

    @property
    def local_tokens(self) -> int:
        """See DecodeReplica."""
        return self._decode.local_tokens

    @property
    def step_s(self) -> float:
        """See DecodeReplica."""
        return self._decode.step_s

    @property
    def step_fit(self) -> DecodeStepFit | None:
        """See DecodeReplica."""
        return self._decode.step_fit

    def produced(self, now_s: float) -> Iterator[tuple[SimulatedRequest, int]]:
        """See DecodeReplica."""
        return self._decode.produced(now_s)

    def reserve(self, request: SimulatedRequest, now_s: float) -> None:
        """See DecodeReplica."""
        self._decode.reserve(request, now_s)

    def prefill_here(
        self, request: SimulatedRequest, now_s: float, computed: Callable[[float], None]
    ) -> None:
        """See DecodeReplica."""
        self._decode.prefill_here(request, now_s, computed)

    def join(self, request: SimulatedRequest, now_s: float) -> None:
        """See DecodeReplica."""
        self._decode.join(request, now_s)

    def leave(self, request: SimulatedRequest, now_s: float) -> None:
        """See DecodeReplica."""
        self._decode.leave(request, now_s)
