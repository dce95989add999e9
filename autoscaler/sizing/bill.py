"""What a cluster of fixed replicas costs, by the hour and by the token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autoscaler.advisor.advice import Prediction
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.scaling import pool_work_s


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """Of one GPU for an hour."""

    amount: float
    currency: str


@dataclass(frozen=True, slots=True)
class Bill:
    """Tokens are those of the trace, prompts and answers, over its length. Money is None without a price."""

    prefill_gpus: int
    decode_gpus: int
    gpu_hours_per_million_tokens: float
    cost_per_hour: float | None
    replica_cost_per_hour: float | None
    """What one replica more costs, or one less saves."""
    cost_per_million_tokens: float | None
    cost_per_million_output_tokens: float | None
    prefill_busy: float
    """Share of a pool's time that the work of the trace takes; of a full batch in decode. Colocated: of all."""
    decode_busy: float

    @property
    def gpus(self) -> int:
        """Of both pools."""
        return self.prefill_gpus + self.decode_gpus


def bill_of(found: Prediction, scenario: Scenario, gpus_per_replica: int, price: GpuPrice | None) -> Bill:
    """The bill of a cluster that serves this trace for ever."""
    shape, trace = found.candidate, scenario.trace
    length_s = max(trace.duration_s, 1e-3)
    outputs = sum(one.output_tokens for one in trace.requests)
    tokens = outputs + sum(one.prompt_tokens for one in trace.requests)
    gpus = shape.workers * gpus_per_replica
    hours = gpus * length_s / 3600
    prefill_s, decode_s = pool_work_s(trace.requests, scenario.engine, scenario.slo.tpot_s)
    if shape.kind == "colocated":
        prefill_busy = decode_busy = (prefill_s + decode_s) / shape.decode / length_s
    else:
        prefill_busy = prefill_s / shape.prefill / length_s
        decode_busy = decode_s / shape.decode / length_s
    money = None if price is None else hours * price.amount
    return Bill(
        prefill_gpus=shape.prefill * gpus_per_replica,
        decode_gpus=shape.decode * gpus_per_replica,
        gpu_hours_per_million_tokens=hours / tokens * 1e6,
        cost_per_hour=None if price is None else gpus * price.amount,
        replica_cost_per_hour=None if price is None else gpus_per_replica * price.amount,
        cost_per_million_tokens=None if money is None else money / tokens * 1e6,
        cost_per_million_output_tokens=None if money is None else money / outputs * 1e6,
        prefill_busy=prefill_busy,
        decode_busy=decode_busy,
    )


def billed_json(found: Prediction, bill: Bill) -> dict[str, Any]:
    """A cluster with its bill, plain values."""
    return {**found.to_json(), "gpus": bill.gpus, **asdict(bill)}
