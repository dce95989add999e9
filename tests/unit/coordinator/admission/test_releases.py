"""When the queue is offered what has become free: once in a turn of the loop, however much ends in it."""

from __future__ import annotations

import asyncio
import time

import pytest

from coordinator.admission.controller import CapacityAdmission
from coordinator.admission.queue import Held
from coordinator.request.state import Entry, RequestEstimate, RequestState
from coordinator.workers.registry import Registry
from splitserve.config.coordinator import AdmissionConfig, CoordinatorConfig
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import entry, load
from tests.support.clients.inference_requests import inference_request
from tests.support.cluster.registrations import registration

pytestmark = pytest.mark.timeout(10)


def one_worker() -> Registry:
    """A registry with a worker of role both that has reported."""
    registry = Registry(5.0)
    request = registration("n", registry_pb2.ROLE_BOTH)
    registry.register(request, 0.0)
    registry.set_output_open(("n", 1), True)
    registry.report(registry_pb2.ReportRequest(worker_id="n", epoch=1, load=load()), 0.0)
    return registry


def state_of(one: Entry) -> RequestState:
    """A request as the flow has it once it was admitted."""
    state = RequestState(inference_request(request_id=one.request_id), RequestEstimate(9.0, 1.0))
    state.flight = one
    return state


def finish(registry: Registry, admission: CapacityAdmission, one: Entry) -> None:
    """A request has its first token, and is over."""
    state = state_of(one)
    admission.output_sent(state, 1, registry.loads.output(one, 1))
    admission.ended(state)


async def test_what_ends_in_one_turn_is_offered_once() -> None:
    registry, published = one_worker(), list[Held]()
    config, now = CoordinatorConfig(), time.monotonic()
    admission = CapacityAdmission(config, registry, lambda model, held: published.append(held))
    tokens = int(0.4 * 10_000 * config.admission.prefill_horizon_s)
    entries = [entry(tokens, arrived_s=now, deadline_s=now + 60) for _ in range(3)]
    waits = [asyncio.create_task(admission.wait("words", one)) for one in entries]
    await asyncio.sleep(0)
    assert [one.started for one in entries] == [True, True, False]
    published.clear()
    for one in entries[:2]:
        finish(registry, admission, one)
    assert not entries[2].started
    await asyncio.sleep(0)
    assert entries[2].started
    assert [held.requests for held in published] == [0]
    await asyncio.wait(waits)


async def test_who_comes_in_that_turn_finds_the_room_that_there_is() -> None:
    registry = one_worker()
    settings = AdmissionConfig(max_queued_requests=1)
    config, now = CoordinatorConfig(admission=settings), time.monotonic()
    admission = CapacityAdmission(config, registry, lambda model, held: None)
    tokens = int(config.admission.prefill_horizon_s * 10_000)
    first, second, third = (entry(tokens, arrived_s=now, deadline_s=now + 60) for _ in range(3))
    waits = [asyncio.create_task(admission.wait("words", one)) for one in (first, second)]
    await asyncio.sleep(0)
    assert (first.started, second.started) == (True, False)
    finish(registry, admission, first)
    waits.append(asyncio.create_task(admission.wait("words", third)))
    await asyncio.sleep(0)
    assert second.started, "the place in the queue is free, so the third one is not refused"
    assert not waits[2].done()
    waits[2].cancel()
    await asyncio.wait(waits)
