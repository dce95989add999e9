"""The mover: which attempts it fails, and how it counts those under way."""

from __future__ import annotations

import time
from typing import Any

import pytest

from coordinator.request.inference_request import InferenceRequest
from coordinator.request.observer import RequestEvents
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.spot.mover import SpotMover
from coordinator.workers.catalog import Model
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.config.coordinator import SpotMovesConfig
from splitserve.errors import SplitserveError
from splitserve.v1 import generation_pb2, registry_pb2
from tests.support.cluster.registrations import registration

NOW = 100.0
STEP_MS = 100.0


class FailingClients:
    """Takes note of what is failed, and does no more."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.reasons: set[str] = set()

    def client_for(self, worker: Worker) -> FailingClients:
        return self

    def fail(self, attempt_id: str, error: SplitserveError) -> bool:
        self.failed.append(attempt_id)
        self.reasons.add(error.reason)
        return True


class Rig:
    """A prefill worker and `decode` decode workers, of which d0 is noticed to have 13 s left."""

    def __init__(self, decode: int = 2) -> None:
        self.registry = Registry(1000.0)
        self.registry.register(registration("p0", registry_pb2.POOL_PREFILL), NOW)
        names = [f"d{number}" for number in range(decode)]
        agents = []
        for name in names:
            made = self.registry.register(registration(name, registry_pb2.POOL_DECODE), NOW)
            agents.append(made.agent_id)
            self.report(name)
            self.registry.set_output_open(made.key, True)
        self.report("p0", connected_agent_ids=agents)
        self.clients = FailingClients()
        clients: Any = self.clients
        config = SpotMovesConfig(margin_s=3.0, moves_at_once=2)
        self.mover = SpotMover(config, self.registry, clients)

    def report(self, name: str, left_s: float | None = None, **fields: Any) -> None:
        load = registry_pb2.WorkerLoad(decode_step_ms=STEP_MS, prefill_tokens_per_second=100.0)
        asked = registry_pb2.ReportRequest(worker_id=name, epoch=1, load=load, **fields)
        if left_s is not None:
            asked.preemption.time_left.FromNanoseconds(round(left_s * 1e9))
        self.registry.report(asked, NOW)

    def run(self, max_tokens: int, usual: float, decode: str = "d0", prefilled: bool = True) -> RequestEvents:
        """A running attempt of a request."""
        request = InferenceRequest(
            "r", Model("words", "words", 64, 100), (1,) * 50, generation_pb2.SamplingParams(),
            generation_pb2.StopParams(max_tokens=max_tokens), 0, time.monotonic() + 60, time.monotonic(),
        )  # fmt: skip
        events = RequestEvents(RequestState(request, RequestEstimate(usual, 50.0)), [self.mover.running])
        self.begin(events, decode)
        if prefilled:
            events.state.attempt.report.decode_worker = decode
        return events

    def begin(self, events: RequestEvents, decode: str) -> str:
        prefill, target = self.worker("p0"), self.worker(decode)
        events.routed(prefill, target, 0, NOW)
        events.prefilling(NOW)
        return events.state.attempt.attempt_id

    def worker(self, name: str) -> Worker:
        key: WorkerKey = (name, 1)
        found = self.registry.get(key)
        assert found is not None
        return found


def id_of(events: RequestEvents) -> str:
    return events.state.attempt.attempt_id


def more(events: RequestEvents) -> None:
    delta = generation_pb2.OutputDelta(first_position=len(events.state.token_ids), token_ids=[7])
    events.sent(delta, NOW)


def test_without_a_notice_nothing_is_looked_at() -> None:
    rig = Rig()
    rig.run(1000, 900.0)
    assert not rig.mover.look(NOW)
    assert rig.clients.failed == []


def test_what_cannot_end_moves_and_the_next_once_it_goes_on() -> None:
    rig = Rig()
    answers = [rig.run(1000, 500.0 + number) for number in range(4)]
    ends, elsewhere = rig.run(50, 50.0), rig.run(1000, 900.0, "d1")
    rig.report("d0", 13.0)
    assert rig.mover.look(NOW)
    first = [id_of(answers[3]), id_of(answers[2])]
    assert rig.clients.failed == first
    assert rig.clients.reasons == {"WORKER_PREEMPTED"}
    rig.mover.look(NOW + 0.1)
    assert rig.clients.failed == first
    answers[3].attempt_ended()
    rig.begin(answers[3], "d1")
    rig.mover.look(NOW + 0.2)
    assert rig.clients.failed == first  # it has no token yet
    more(answers[3])
    rig.mover.look(NOW + 0.3)
    assert rig.clients.failed == [*first, id_of(answers[1])]
    answers[2].attempt_ended()
    with answers[2]:
        pass  # its client has left
    rig.mover.look(NOW + 0.4)
    assert rig.clients.failed == [*first, id_of(answers[1]), id_of(answers[0])]
    rig.mover.look(NOW + 10.1)
    assert rig.clients.failed[4:] == [id_of(ends)]
    assert id_of(elsewhere) not in rig.clients.failed
    moves = next(metric for metric in rig.mover.metrics() if metric.name == "splitserve_spot_moves")
    assert moves.samples[0].value == 5


def test_an_answer_that_is_usually_short_stays_until_little_time_is_left() -> None:
    rig = Rig()
    answer = rig.run(1000, 20.0)
    rig.report("d0", 13.0)
    rig.mover.look(NOW)
    assert rig.clients.failed == []
    rig.mover.look(NOW + 9.5)
    assert rig.clients.failed == [id_of(answer)]


def test_prompts_leave_a_prefill_worker_that_cannot_compute_them_in_time() -> None:
    rig = Rig()
    second = rig.registry.register(registration("p1", registry_pb2.POOL_PREFILL), NOW)
    agents = [rig.worker("d0").agent_id, rig.worker("d1").agent_id]
    rig.report(second.worker_id, connected_agent_ids=agents)
    prompts = [rig.run(10, 10.0, prefilled=False) for _ in range(8)]  # half a second each
    rig.run(1000, 900.0)  # its prompt is computed
    rig.report("p0", 5.5)
    rig.mover.look(NOW)
    assert rig.clients.failed == [id_of(prompts[7]), id_of(prompts[6])]


def test_nothing_moves_while_there_is_nowhere_to_go(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(decode=1)
    rig.run(1000, 900.0)
    rig.report("d0", 13.0)
    with caplog.at_level("INFO"):
        assert rig.mover.look(NOW)
        assert rig.mover.look(NOW + 20.0)
    assert rig.clients.failed == []
    assert sum("spot.stuck" in record.message for record in caplog.records) == 1
