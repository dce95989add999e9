"""What workers are told of a request's targets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.request.caller import ANYONE, PriorityClass
from coordinator.request.inference_request import InferenceRequest
from coordinator.request.service_targets import targets_of
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.workers.snapshot import Model
from splitserve.config.coordinator import AdmissionConfig
from splitserve.v1 import generation_pb2

BOTH = AdmissionConfig(ttft_slo_s=1.0, tpot_slo_s=0.05)


def state(priority_class: PriorityClass = "standard", sent: int = 0) -> RequestState:
    """A request that was received at 100 s."""
    request = InferenceRequest(
        "r", Model("words", "words", 64, 100), (1, 2, 3), generation_pb2.SamplingParams(),
        generation_pb2.StopParams(max_tokens=8), 0, 160.0, 100.0,
        replace(ANYONE, priority_class=priority_class),
    )  # fmt: skip
    made = RequestState(request, RequestEstimate(8.0, 3.0))
    made.token_ids.extend([7] * sent)
    return made


@pytest.mark.parametrize(("now", "left_ms"), [(100.25, 750.0), (103.0, -2000.0), (1e9, -86_400e3)])
def test_the_time_to_the_first_token_counts_from_when_it_was_received(now: float, left_ms: float) -> None:
    targets = targets_of(BOTH, state(), now)
    assert targets == generation_pb2.ServiceTargets(tpot_ms=50, ttft_ms=1000, ttft_left_ms=left_ms)


@pytest.mark.parametrize("which", [state("batch"), state(sent=2)])
def test_batch_and_begun_requests_have_no_target_for_the_first_token(which: RequestState) -> None:
    assert targets_of(BOTH, which, 100.0) == generation_pb2.ServiceTargets(tpot_ms=50)
    assert targets_of(AdmissionConfig(ttft_slo_s=1.0), which, 100.0) is None


def test_without_targets_nothing_is_said() -> None:
    assert targets_of(AdmissionConfig(), state(), 100.0) is None
