"""KV flows: sums by pair over running and ended requests, of the last seconds only."""

from __future__ import annotations

from coordinator.records.kv_flows import KvFlow, kv_flows
from coordinator.records.request_record import AttemptFacts, RequestRecord
from coordinator.request.caller import Caller
from coordinator.request.inference_request import InferenceRequest
from coordinator.request.state import AttemptReport, RequestEstimate, RequestState
from coordinator.workers.catalog import Model
from coordinator.workers.registration import checked_worker
from splitserve.v1 import generation_pb2, registry_pb2
from tests.support.cluster.registrations import registration

PREFILL = checked_worker(registration("p0", registry_pb2.POOL_PREFILL))
DECODE = checked_worker(registration("d0", registry_pb2.POOL_DECODE))
NOW_S, NOW_UNIX_S, WINDOW_S = 100.0, 5000.0, 5.0


def ended(ago_s: float, written: int, decode: str = "d0", computed_ms: float | None = 100.0) -> RequestRecord:
    """A request that took a second and ended `ago_s` seconds ago."""
    report = AttemptReport("p0", transfer_bytes=written)
    attempt = AttemptFacts(
        1, "p0", decode, False, (), report, 0.0, 10.0, 20.0, computed_ms, 120.0, 1000.0, 0, "", ""
    )
    received = NOW_UNIX_S - ago_s - 1.0
    return RequestRecord("r", "t", "m", "completed", received, 1000.0, attempts=[attempt])


def running(prefilled_s: float | None, written: int) -> RequestState:
    request = InferenceRequest(
        "r", Model("m", "m", 64, 100), (1, 2), generation_pb2.SamplingParams(),
        generation_pb2.StopParams(max_tokens=8), 0, NOW_S + 60, NOW_S - 10, Caller("t"),
    )  # fmt: skip
    state = RequestState.of(request, RequestEstimate(8.0, 2.0), NOW_S - 9)
    state.begin_attempt(PREFILL, DECODE, 0, NOW_S - 8)
    state.attempt.prefilled_s, state.attempt.report.transfer_bytes = prefilled_s, written
    return state


def flows(states: list[RequestState], records: list[RequestRecord]) -> list[KvFlow]:
    return kv_flows(states, records, WINDOW_S, NOW_S, NOW_UNIX_S)


def test_handoffs_of_a_pair_add_up_and_the_largest_comes_first() -> None:
    found = flows([running(98.0, 50)], [ended(1.0, 100), ended(2.0, 500, "d1"), ended(3.0, 10)])
    assert found == [KvFlow("p0", "d1", 1, 500), KvFlow("p0", "d0", 3, 160)]


def test_only_the_last_seconds_count() -> None:
    assert flows([running(94.0, 50)], [ended(4.5, 100)]) == []  # the prompt was computed 5.4 s ago
    assert flows([], [ended(6.0, 100), ended(1.0, 100)]) == []  # the second has ended before the first


def test_requests_without_a_handoff_do_not_count() -> None:
    assert flows([running(None, 0), running(99.0, 0)], [ended(1.0, 0), ended(1.0, 5, computed_ms=None)]) == []
