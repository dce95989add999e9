"""Load reports: each figure against its bound, before anything calculates with it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coordinator.workers.registration import check_report
from engine.core.types import EngineLoad
from engine.pacing.step_time_fit import DecodeStepFit, PromptFit
from engine.worker.messages import worker_load
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import registry_pb2

NAN, ENDLESS = math.nan, math.inf
PROMPT = {"base_ms": 4.0, "token_ms": 1.0, "pair_ms": 1e-4, "mixing_ms": -4.0}


def report(lanes: tuple[dict[str, Any], ...] = (), **load: Any) -> registry_pb2.ReportRequest:
    return registry_pb2.ReportRequest(
        worker_id="w",
        epoch=1,
        load=registry_pb2.WorkerLoad(**load),
        lanes=[{"agent_id": "a"} | lane for lane in lanes],
    )


@pytest.mark.parametrize(
    "load",
    [
        {},
        {"waiting_tokens": 2**40, "prefill_tokens_per_second": 1e9, "decode_step_ms": 1e9},
        {"step_fit": {}, "prompt_fit": PROMPT},
        {"host_tier": {"gb_per_second": 40.0}, "disk_tier": {"gb_per_second": 1e-6, "waiting_bytes": 2**50}},
    ],
)
def test_what_workers_send(load: dict[str, Any]) -> None:
    check_report(report(({"gb_per_second": 400.0},), **load))


def test_what_engines_send() -> None:
    for fit in (None, PromptFit(0.004, 1e-3, 1e-7, -0.004), PromptFit(0.1 / 3, 1e-9, 0.0, -0.1 / 3)):
        load = EngineLoad(
            waiting_requests=1,
            running_requests=1,
            waiting_tokens=100,
            total_blocks=10,
            free_blocks=5,
            reserved_blocks=1,
            quarantined_blocks=1,
            referenced_blocks=3,
            prefill_tokens_per_s=1e4,
            decode_step_s=0.02,
            step_fit=DecodeStepFit(0.01, 0.0, 0.0),
            prompt_fit=fit,
        )
        check_report(registry_pb2.ReportRequest(load=worker_load(load)))


@pytest.mark.parametrize("bad", [NAN, ENDLESS, -ENDLESS, -1e-9, 1e300])
@pytest.mark.parametrize(
    "field",
    [
        "prefill_tokens_per_second",
        "decode_step_ms",
        "step_fit.base_ms",
        "step_fit.sequence_ms",
        "step_fit.context_token_ms",
        "prompt_fit.base_ms",
        "prompt_fit.token_ms",
        "prompt_fit.pair_ms",
        "prompt_fit.mixing_ms",
    ],
)
def test_a_figure_out_of_its_bounds_is_named(field: str, bad: float) -> None:
    load: dict[str, Any] = {"prompt_fit": dict(PROMPT) | {"base_ms": 0.0, "mixing_ms": 0.0}, "step_fit": {}}
    *path, name = field.split(".")
    (load[path[0]] if path else load)[name] = bad
    with pytest.raises(InvalidArgumentError, match=rf"load\.{field} must be") as caught:
        check_report(report(**load))
    assert caught.value.field == f"load.{field}"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (report(waiting_tokens=2**40 + 1), "load.waiting_tokens"),
        (report(lent_speedup=NAN), "load.lent_speedup"),
        (report(lent_speedup=0.5), "load.lent_speedup"),
        (report(lent_speedup=64.5), "load.lent_speedup"),
        (report(prompt_fit=PROMPT | {"token_ms": 0.0}), "load.prompt_fit.token_ms"),
        (report(prompt_fit=PROMPT | {"mixing_ms": -4.1}), "load.prompt_fit.mixing_ms"),
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


@pytest.mark.parametrize("tier", ["host_tier", "disk_tier"])
@pytest.mark.parametrize("bad", [NAN, ENDLESS, 0.0, -1.0, 1e7])
def test_the_speed_of_a_tier_is_a_number_above_0(tier: str, bad: float) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_report(report(**{tier: {"gb_per_second": bad}}))
    assert caught.value.field == f"load.{tier}.gb_per_second"


def test_reads_that_wait_are_bounded() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_report(report(disk_tier={"gb_per_second": 1.0, "waiting_bytes": 2**50 + 1}))
    assert caught.value.field == "load.disk_tier.waiting_bytes"
