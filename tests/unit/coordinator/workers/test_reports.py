"""Load reports: each figure against its bound, before anything calculates with it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coordinator.workers.registration import check_report
from engine.core.engine import EngineLoad
from splitserve.errors import InvalidArgumentError
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency
from splitserve.v1 import registry_pb2
from worker.messages import worker_load

NAN, ENDLESS = math.nan, math.inf
PROMPT = {"base_ms": 4.0, "token_ms": 1.0, "pair_ms": 1e-4}


def report(lanes: tuple[dict[str, Any], ...] = (), **load: Any) -> registry_pb2.ReportRequest:
    return registry_pb2.ReportRequest(
        worker_id="w",
        epoch=1,
        load=registry_pb2.WorkerLoad(**load),
        lanes=[{"agent_id": "a"} | lane for lane in lanes],
    )


@pytest.mark.parametrize(
    "load", [{}, {"waiting_tokens": 2**40}, {"latency": {"decode": {}, "prefill": PROMPT}}]
)
def test_what_workers_send(load: dict[str, Any]) -> None:
    check_report(report(({"gb_per_second": 400.0},), **load))


def test_what_engines_send() -> None:
    for fit in (None, PrefillLatency(0.004, 1e-3, 1e-7), PrefillLatency(0.1 / 3, 1e-9)):
        load = EngineLoad(
            waiting_requests=1,
            running_requests=1,
            waiting_tokens=100,
            total_blocks=10,
            free_blocks=5,
            reserved_blocks=1,
            quarantined_blocks=1,
            referenced_blocks=3,
            latency=LatencyModel(fit, DecodeLatency(0.01)),
        )
        check_report(registry_pb2.ReportRequest(load=worker_load(load)))


@pytest.mark.parametrize("bad", [NAN, ENDLESS, -ENDLESS, -1e-9, 1e300])
@pytest.mark.parametrize(
    "field",
    [
        "latency.decode.base_ms",
        "latency.decode.sequence_ms",
        "latency.decode.context_token_ms",
        "latency.prefill.base_ms",
        "latency.prefill.token_ms",
        "latency.prefill.pair_ms",
    ],
)
def test_a_figure_out_of_its_bounds_is_named(field: str, bad: float) -> None:
    load: dict[str, Any] = {"latency": {"prefill": dict(PROMPT), "decode": {}}}
    *path, name = field.split(".")
    part = load
    for key in path:
        part = part[key]
    part[name] = bad
    with pytest.raises(InvalidArgumentError, match=rf"load\.{field} must be") as caught:
        check_report(report(**load))
    assert caught.value.field == f"load.{field}"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (report(waiting_tokens=2**40 + 1), "load.waiting_tokens"),
        (report(latency={"prefill": PROMPT | {"token_ms": 0.0}}), "load.latency.prefill.token_ms"),
        (report(({"gb_per_second": NAN},)), "lanes.gb_per_second"),
        (report(({}, {"latency_ms": -1.0})), "lanes.latency_ms"),
    ],
)
def test_further_bounds(wrong: registry_pb2.ReportRequest, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_report(wrong)
    assert caught.value.field == field


def noticed(seconds: int, nanos: int = 0, source: str = "aws") -> registry_pb2.ReportRequest:
    asked = report()
    asked.preemption.time_left.seconds, asked.preemption.time_left.nanos = seconds, nanos
    asked.preemption.source = source
    return asked


def test_a_spot_notice_within_its_bounds() -> None:
    for seconds in (0, 30, 86_400):
        check_report(noticed(seconds))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (noticed(-1), "preemption.time_left"),
        (noticed(0, -1), "preemption.time_left"),
        (noticed(86_400, 1), "preemption.time_left"),
        (noticed(2**62), "preemption.time_left"),
        (noticed(30, source="x" * 33), "preemption.source"),
    ],
)
def test_a_spot_notice_out_of_its_bounds(asked: registry_pb2.ReportRequest, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_report(asked)
    assert caught.value.field == field
