"""A worker with faults: `python -m bench.faults PLAN COMMAND...` is `splitserve COMMAND...` with the faults of PLAN, a
`FaultPlan` as JSON."""

from __future__ import annotations

import logging
import math
import random
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from bench.faults.plan import FaultPlan
from bench.faults.transport import FaultyTransport
from engine.scheduling import step_times
from engine.scheduling.step_times import LatencyFit, StepTokens
from kv_transfer.transports import make_transport
from kv_transfer.transports.transport import Transport
from launcher.cli.main import main
from splitserve.logs import log_event
from worker import build
from worker.build import EngineParts


class NoisyFit(LatencyFit):
    """A fit to times with the noise of `plan`."""

    def __init__(self, plan: FaultPlan) -> None:
        super().__init__()
        self._sigma, self._random = plan.step_noise, random.Random(f"{plan.seed}:step_noise")

    @override
    def record(self, size: StepTokens, duration_s: float) -> None:
        super().record(size, duration_s * math.exp(self._sigma * self._random.gauss(0, 1)))


def with_faults(plan: FaultPlan) -> None:
    """Lets the workers of this process have the faults of a plan."""

    def make_faulty(kind: str) -> Transport:
        log_event("worker.faults_on", level=logging.WARNING, planned=plan.model_dump(exclude_defaults=True))
        return FaultyTransport(make_transport(kind), plan)

    def make_vllm(*arguments: Any) -> EngineParts:
        parts = started(*arguments)
        faulty = FaultyTransport(parts.transport, plan)
        faulty.register_memory(parts.kv_memory.region)
        return replace(parts, transport=faulty)

    started = build._vllm
    build._vllm = make_vllm  # type: ignore[assignment]
    build.make_transport = make_faulty  # type: ignore[attr-defined]
    if plan.step_noise:
        step_times.LatencyFit = partial(NoisyFit, plan)  # type: ignore[assignment, misc]


if __name__ == "__main__":
    with_faults(FaultPlan.model_validate_json(sys.argv.pop(1)))
    sys.exit(main())
