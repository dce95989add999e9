"""A coordinator's signals, scripted: what an autoscaler sees without any coordinator."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.signals.worker_view import Sighting, joined
from autoscaler.snapshot import Replica
from splitserve.errors import UnavailableError
from splitserve.histograms import LATENCY_BOUNDS_S
from splitserve.roles import PoolName
from splitserve.v1 import registry_pb2, scaling_pb2

ROLES = {"prefill": registry_pb2.ROLE_PREFILL, "decode": registry_pb2.ROLE_DECODE}
STATES = {
    "starting": scaling_pb2.WORKER_STATE_STARTING,
    "standby": scaling_pb2.WORKER_STATE_STANDBY,
    "ready": scaling_pb2.WORKER_STATE_READY,
    "draining": scaling_pb2.WORKER_STATE_DRAINING,
}


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FakeSource:
    """Counts like a coordinator; `restart` begins anew, `down` answers nothing."""

    def __init__(self, target: str, clock: Clock) -> None:
        self.target = target
        self.down = False
        self.workers: list[scaling_pb2.WorkerSignals] = []
        self.other_workers: list[scaling_pb2.WorkerSignals] = []
        """Of another model."""
        self.in_progress = scaling_pb2.InProgress()
        self.served = registry_pb2.ServedModel()
        """Not known while it has no name."""
        self._clock = clock
        self._boots = 0
        self.restart()

    def restart(self) -> None:
        self._boots += 1
        self._began_s = self._clock()
        self._arrivals = scaling_pb2.Arrivals()
        self._counts: dict[int, list[int]] = {}

    def arrive(self, requests: int, prompt_tokens: int = 100, output_tokens: float = 10.0) -> None:
        self._arrivals.requests += requests
        self._arrivals.prompt_tokens += requests * prompt_tokens
        self._arrivals.uncached_tokens += requests * prompt_tokens
        self._arrivals.output_tokens += requests * output_tokens

    def compute_locally(self, requests: int, prompt_tokens: int = 100) -> None:
        """Decode workers compute the prompts of requests that have arrived."""
        self._arrivals.local_requests += requests
        self._arrivals.local_tokens += requests * prompt_tokens

    def took(self, phase: int, *seconds: float) -> None:
        counts = self._counts.setdefault(phase, [0] * (len(LATENCY_BOUNDS_S) + 1))
        for value in seconds:
            counts[bisect_left(LATENCY_BOUNDS_S, value)] += 1

    async def signals(self, model: str = "") -> scaling_pb2.GetSignalsResponse:
        if self.down:
            raise UnavailableError(f"{self.target} is down")
        phases = [
            scaling_pb2.PhaseHistogram(phase=phase, counts=counts)  # type: ignore[arg-type]
            for phase, counts in self._counts.items()
        ]
        signals = scaling_pb2.ModelSignals(
            model="m",
            arrivals=self._arrivals,
            phases=phases,
            in_progress=self.in_progress,
            workers=self.workers,
            served=self.served if self.served.name else None,
        )
        answer = scaling_pb2.GetSignalsResponse(
            coordinator_id=f"{self.target}.{self._boots}",
            uptime_seconds=self._clock() - self._began_s,
            bounds_seconds=LATENCY_BOUNDS_S,
            models=[
                each
                for each in (signals, scaling_pb2.ModelSignals(model="other", workers=self.other_workers))
                if not model or each.model == model
            ],
        )
        # Counters go on after the answer; what was said must not change with them.
        copy = scaling_pb2.GetSignalsResponse()
        copy.CopyFrom(answer)
        return copy


def worker(
    name: str, state: str = "ready", for_s: float = 0.0, load: Mapping[str, Any] | None = None, **fields: Any
) -> scaling_pb2.WorkerSignals:
    """A worker of the pool that its name begins with."""
    pool = "prefill" if name.startswith("p") else "decode"
    return scaling_pb2.WorkerSignals(
        worker_id=name,
        state=STATES[state],
        state_seconds=for_s,
        load=registry_pb2.WorkerLoad(**(load or {})),
        block_size_tokens=16,
        max_running_requests=64,
        **{"role": ROLES[pool]} | fields,
    )


def with_actual(
    actual: Sequence[ActualReplica], serving: Sequence[str]
) -> dict[PoolName, tuple[Replica, ...]]:
    """An actuator's replicas as the autoscaler sees them, where the coordinators see those of `serving` as ready."""
    listed = {replica.name for replica in actual}
    return joined({name: Sighting(worker(name), 0.0) for name in listed & set(serving)}, actual, 0.0, 0.0)


def names(replicas: Sequence[Any]) -> dict[str, str]:
    """State by name."""
    return {replica.name: replica.state.value for replica in replicas}
