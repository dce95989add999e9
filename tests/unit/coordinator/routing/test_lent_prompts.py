"""Prompts on lent decode workers: what the coordinator itself knows of them goes before reports, which are late."""

from __future__ import annotations

import time

import pytest

from coordinator.request.candidates import PairCost
from coordinator.request.inference_request import InferenceRequest
from coordinator.request.observer import RequestEvents
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.routing.first_workers import FirstWorkers
from coordinator.routing.pair_selector import PairSelector, make_router
from coordinator.routing.router import Pair
from coordinator.workers.catalog import Model
from coordinator.workers.load import Flight
from coordinator.workers.registry import Registry
from coordinator.workers.rotation import RotationPlan
from coordinator.workers.snapshot import Worker
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.v1 import decode_pb2, generation_pb2, registry_pb2
from tests.support.clients.admission_parts import load
from tests.support.cluster.registrations import registration

TOKENS = 100
PREFILL, DECODE = registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE


class Lent:
    """One pair of idle workers, the decode worker lent, and the requests that are routed to it."""

    def __init__(self) -> None:
        self.registry = Registry(60.0)
        for name, pool in (("p", PREFILL), ("d", DECODE)):
            self.registry.register(registration(name, pool), 0.0)
            self.report(name)
        self.registry.apply_plan(RotationPlan(lend=True))
        config = CoordinatorConfig()
        first = FirstWorkers(config.admission, self.registry, lambda model, count: None)
        self.selector = PairSelector(config, self.registry, make_router("prefix"), first)
        self.prefill_load = self.registry.loads.prefill["p", 1]
        self.decode_load = self.registry.loads.decode["d", 1]

    def report(self, name: str, **changes: object) -> None:
        request = registry_pb2.ReportRequest(worker_id=name, epoch=1, load=load(**changes))
        self.registry.report(request, 0.0)

    def worker(self, name: str) -> Worker:
        return next(w for w in self.registry.snapshot().workers if w.worker_id == name)

    def routed(self, held: int = 0) -> tuple[RequestEvents, int]:
        """The next request, of which the decode worker is thought to hold so many tokens, and what it may compute."""
        request = InferenceRequest(
            "r", Model("words", "words", 64, 100), tuple(range(TOKENS)), generation_pb2.SamplingParams(),
            generation_pb2.StopParams(max_tokens=8), 0, time.monotonic() + 60, time.monotonic(),
        )  # fmt: skip
        events = RequestEvents(RequestState(request, RequestEstimate(8.0, float(TOKENS))), [self.selector])
        prefill, decode = self.worker("p"), self.worker("d")
        cost = PairCost(0.0, 0.0, 0.0, decode_cached_tokens=held)
        pair = Pair(prefill, decode, 0.0, cost, queued_tokens=self.prefill_load.queued_tokens)
        events.routed(prefill, decode, 0, time.monotonic())
        return events, self.selector.local_prefill_tokens(events.state, pair)


def test_prompts_at_once_are_shared_by_both_workers() -> None:
    lent = Lent()
    by_decode = [lent.routed()[1] >= TOKENS for _ in range(8)]
    assert by_decode == [False, True] * 4
    assert lent.decode_load.waiting_prompt_tokens == lent.prefill_load.queued_tokens == 4 * TOKENS


def test_streams_that_have_ended_since_the_report_stand_in_no_prompt_s_way() -> None:
    lent = Lent()
    streams = [
        Flight(prompt_tokens=9, uncached_tokens=9.0, expected_output=8.0, max_output=8, computed=True)
        for _ in range(10)
    ]
    for stream in streams:
        lent.decode_load.add_flight(stream)
    for _ in range(2):
        lent.report("d", running_requests=10, streams=10)
    lent.routed()
    assert lent.decode_load.streams == 10
    assert lent.routed()[1] < TOKENS, "ten streams would stand still meanwhile"
    for stream in streams:
        lent.decode_load.remove_flight(stream)
    assert lent.routed()[1] >= TOKENS


def test_streams_of_other_coordinators_count_as_reported() -> None:
    lent = Lent()
    for _ in range(2):
        lent.report("d", running_requests=10, streams=10)
    lent.routed()
    assert lent.decode_load.streams == 10
    assert lent.routed()[1] < TOKENS


@pytest.mark.parametrize("end", ["computed", "handed off", "failed"])
def test_a_prompt_counts_until_it_is_computed_or_goes_elsewhere(end: str) -> None:
    lent = Lent()
    lent.routed()
    events, granted = lent.routed(held=32)
    assert granted >= TOKENS - 32
    assert lent.decode_load.expected_tokens == TOKENS - 32
    assert lent.prefill_load.queued_tokens == TOKENS, "that of the first one"
    match end:
        case "computed":
            events.prefilling_locally()
            events.prefilled_locally(decode_pb2.LocalPrefill())
        case "handed off":  # the cache had lost what was believed
            events.prefilling(1.0)
            assert lent.prefill_load.queued_tokens == 2 * TOKENS
    assert (lent.decode_load.expected_tokens == 0) is (end != "failed")
    events.attempt_ended()
    assert lent.decode_load.expected_tokens == 0
    assert lent.prefill_load.expected_tokens == TOKENS
