"""What a request is to be served with, and what workers are told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.request.inference_request import (
    ANYONE,
    NO_TARGETS,
    PriorityClass,
    RequestTargets,
    resolved_targets,
)
from coordinator.request.state import RequestEstimate, RequestState
from splitserve.config.coordinator import AdmissionConfig, OnLate
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.clients.inference_requests import inference_request

BOTH = AdmissionConfig(ttft_slo_s=1.0, tpot_slo_s=0.05, on_late="refuse")
SERVED = AdmissionConfig(ttft_slo_s=1.0)
NONE = AdmissionConfig()


def resolved(
    settings: AdmissionConfig,
    priority_class: PriorityClass = "standard",
    tenant: RequestTargets = NO_TARGETS,
    any_target: bool = True,
    on_late: OnLate | None = None,
    **asked: Any,
) -> tuple[tuple[float | None, float | None], float | None]:
    """Both targets, and what admission refuses by."""
    caller = replace(
        ANYONE, priority_class=priority_class, targets=tenant, any_target=any_target, on_late=on_late
    )
    targets, slo_ttft_s = resolved_targets(inference_pb2.GenerateRequest(**asked), caller, settings)
    return (targets.ttft_s, targets.tpot_s), slo_ttft_s


def test_the_settings_hold_for_who_names_nothing() -> None:
    assert resolved(BOTH) == ((1.0, 0.05), 1.0)
    assert resolved(BOTH, "batch") == ((None, 0.05), None)


def test_a_tenant_s_own_go_before_them() -> None:
    assert resolved(BOTH, tenant=RequestTargets(0.5, None)) == ((0.5, 0.05), 0.5)
    assert resolved(BOTH, tenant=RequestTargets(None, 0.2)) == ((1.0, 0.2), 1.0)
    assert resolved(BOTH, "batch", tenant=RequestTargets(9.0, None)) == ((9.0, 0.05), None)


def test_a_request_may_ask_for_less() -> None:
    assert resolved(BOTH, ttft_ms=3000, tpot_ms=100) == ((3.0, 0.1), 3.0)
    assert resolved(BOTH, "batch", ttft_ms=60_000) == ((60.0, 0.05), None)
    assert resolved(BOTH, ttft_ms=1000.0, tpot_ms=50.0) == ((1.0, 0.05), 1.0)


def test_what_only_a_request_asks_for_is_no_reason_to_refuse_it() -> None:
    assert resolved(NONE, ttft_ms=300) == ((0.3, None), None)


def test_late_ones_are_refused_only_where_settings_or_tenant_say_so() -> None:
    assert resolved(SERVED) == ((1.0, None), None)
    assert resolved(SERVED, on_late="refuse") == ((1.0, None), 1.0)
    assert resolved(SERVED, on_late="refuse", ttft_ms=3000) == ((3.0, None), 3.0)
    assert resolved(SERVED, "batch", on_late="refuse") == ((None, None), None)
    assert resolved(BOTH, on_late="serve") == ((1.0, 0.05), None)


@pytest.mark.parametrize("slo_s", [0.07, 0.29, 0.57, 1.1, 2.3])
def test_the_target_itself_may_be_asked_for(slo_s: float) -> None:
    asked = resolved(AdmissionConfig(ttft_slo_s=slo_s), ttft_ms=round(slo_s * 1e3))
    assert asked[0][0] == pytest.approx(slo_s)


@pytest.mark.parametrize(
    ("settings", "tenant", "asked", "text"),
    [
        (BOTH, NO_TARGETS, {"ttft_ms": 999}, "ttft_ms must be at least 1000"),
        (BOTH, NO_TARGETS, {"tpot_ms": 49.9}, "tpot_ms must be at least 50"),
        (NONE, RequestTargets(2.0, None), {"ttft_ms": 1000}, "ttft_ms must be at least 2000"),
        (NONE, NO_TARGETS, {"ttft_ms": 0}, "ttft_ms must be 0.001..86400000"),
        (NONE, NO_TARGETS, {"ttft_ms": float("nan")}, "ttft_ms must be 0.001..86400000"),
        (NONE, NO_TARGETS, {"tpot_ms": 5e-324}, "tpot_ms must be 0.001"),
        (NONE, NO_TARGETS, {"tpot_ms": 3.7e6}, "tpot_ms must be 0.001..3600000"),
    ],
)
def test_more_than_that_is_refused_by_name(
    settings: AdmissionConfig, tenant: RequestTargets, asked: dict[str, float], text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        resolved(settings, tenant=tenant, **asked)
    assert caught.value.field in asked


def test_a_batch_request_asks_for_no_less_than_the_settings_either() -> None:
    with pytest.raises(InvalidArgumentError, match="ttft_ms must be at least 1000"):
        resolved(BOTH, "batch", ttft_ms=500)


@pytest.mark.parametrize("asked", [{"ttft_ms": 100.0}, {"tpot_ms": 100.0}])
def test_a_tenant_s_request_cannot_name_what_nobody_else_has(asked: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="_ms must be left out") as caught:
        resolved(NONE, any_target=False, **asked)
    assert caught.value.field in asked
    assert resolved(BOTH, any_target=False, ttft_ms=2000) == ((2.0, 0.05), 2.0)
    assert resolved(NONE, tenant=RequestTargets(1.0), any_target=False, ttft_ms=2000)[0] == (2.0, None)


def state(targets: RequestTargets = RequestTargets(1.0, 0.05), sent: int = 0) -> RequestState:  # noqa: B008
    """A request that was received at 100 s."""
    made = RequestState(inference_request(received_s=100.0, targets=targets), RequestEstimate(8.0, 3.0))
    made.token_ids.extend([7] * sent)
    return made


@pytest.mark.parametrize(("now", "left_ms"), [(100.25, 750.0), (103.0, -2000.0), (1e9, -86_400e3)])
def test_the_time_to_the_first_token_counts_from_when_it_was_received(now: float, left_ms: float) -> None:
    targets = state().targets_left(now)
    assert targets == generation_pb2.ServiceTargets(tpot_ms=50, ttft_ms=1000, ttft_left_ms=left_ms)


def test_an_answer_that_goes_on_is_due_anew() -> None:
    targets = state(sent=2).targets_left(103.0)
    assert targets == generation_pb2.ServiceTargets(tpot_ms=50, ttft_ms=1000, ttft_left_ms=1000)


def test_without_targets_nothing_is_said() -> None:
    assert state(RequestTargets()).targets_left(100.0) is None
