"""RequestEvents: what is told of a request, and what its state has then."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from coordinator.health.circuit_breakers import CircuitBreakerRegistry
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.request_events import BATCH_TOKENS, RequestEvents
from coordinator.telemetry.record_keeper import RecordKeeper
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.config.coordinator import CircuitBreakerConfig, RecordsConfig
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.v1 import generation_pb2, prefill_pb2, registry_pb2
from tests.support.clients.inference_requests import inference_request
from tests.support.cluster.registrations import registration


def state() -> RequestState:
    return RequestState(inference_request(), RequestEstimate(8.0, 3.0))


def workers(registry: Registry) -> tuple[Worker, Worker]:
    return (
        registry.register(registration("p", registry_pb2.ROLE_PREFILL), 0.0),
        registry.register(registration("d", registry_pb2.ROLE_DECODE), 0.0),
    )


def delta(position: int = 0, count: int = 1, finish: int = 0) -> generation_pb2.OutputDelta:
    made = generation_pb2.OutputDelta(first_position=position, token_ids=[7] * count)
    made.finish_reason = finish  # type: ignore[assignment]
    return made


class Journal:
    """A RequestControl that records its events."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def output_sent(self, tokens: int) -> None:
        self.events.append(("sent", tokens))

    def decoded(self) -> None:
        self.events.append(("decoded",))

    def ended(self, error: BaseException | None) -> None:
        self.events.append(("ended", type(error)))


def journaled() -> tuple[RequestEvents, Journal]:
    events, journal = RequestEvents(state()), Journal()
    events.control = journal
    return events, journal


def test_tokens_are_told_of_in_batches_and_all_before_the_end() -> None:
    made, journal = journaled()
    with made as events:
        pair = workers(Registry(1.0))
        events.routed(*pair, 0, 1.0)
        for position in range(2 + BATCH_TOKENS + 1):
            events.sent(delta(position), 2.0)
        events.attempt_failed(UnavailableError("gone"))
        events.attempt_ended()
        events.routed(*pair, 0, 3.0)
        events.sent(delta(3 + BATCH_TOKENS), 4.0)
        events.decoded()
    sent = [("sent", count) for count in (1, 1, BATCH_TOKENS, 1, 1)]
    assert journal.events == [*sent, ("decoded",), ("ended", type(None))]


def test_a_record_that_cannot_be_made_does_not_fail_the_request(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    with RequestEvents(state(), RecordKeeper(RecordsConfig(), on_ended=[broken])) as events:
        events.sent(delta(), 1.0)
    (failure,) = [record for record in caplog.records if record.message == "record.failed"]
    assert failure.exc_info


@pytest.mark.parametrize("error", [UnavailableError("gone"), asyncio.CancelledError()])
def test_the_end_is_told_however_it_comes(error: BaseException) -> None:
    made, journal = journaled()
    with pytest.raises(type(error)), made:
        raise error
    assert journal.events == [("ended", type(error))]


def test_a_gap_is_not_counted() -> None:
    events, journal = journaled()
    with pytest.raises(SplitserveError) as caught:
        events.sent(delta(position=3), 1.0)
    assert caught.value.reason == "OUTPUT_GAP"
    assert journal.events == []


def test_attempts_get_unique_ids_and_their_reports_add_up() -> None:
    events = RequestEvents(state())
    prefill, decode = workers(Registry(1.0))
    names = set()
    for _ in range(2):
        events.routed(prefill, decode, 0, 1.0)
        names.add(events.state.attempt.attempt_id)
        events.prefilled(prefill_pb2.FirstToken(queue_ms=2.0, compute_ms=5.0, cached_tokens=1))
        events.transferred(prefill_pb2.HandoffDone(written_bytes=10, transfer_ms=3.0))
        events.decode_began(1.0)
        events.attempt_ended()
    assert len(names) == 2
    report = events.state.report
    assert (report.queue_ms, report.prefill_ms, report.transfer_bytes) == (2.0, 5.0, 20)
    assert (report.transfer_ms, report.decode_admit_ms, report.transport) == (3.0, 1.0, prefill.transport)


def circuit_states(registry: Registry) -> list[str]:
    return [worker.circuit.state for worker in registry.snapshot().workers]


def test_circuit_breakers_see_failures_and_output() -> None:
    registry = Registry(1.0)
    prefill, decode = workers(registry)
    circuits = CircuitBreakerRegistry(registry, CircuitBreakerConfig(consecutive_failures=1, open_s=60))

    def attempted() -> RequestEvents:
        events = RequestEvents(state())
        events.routed(prefill, decode, 0, time.monotonic())
        circuits.attempt_began(events.state)
        return events

    failing = attempted().state
    failing.attempt.suspect = decode.key
    circuits.attempt_failed(failing, UnavailableError("gone", reason="WORKER_LOST"))
    circuits.attempt_ended(failing)
    assert circuit_states(registry) == ["open", "closed"]

    serving = attempted()
    serving.sent(delta(0), time.monotonic())
    circuits.output_sent(serving.state)
    assert circuit_states(registry) == ["open", "closed"], "the first token is not decode's"
    serving.state.attempt.report.decode_worker = "d"
    serving.sent(delta(1), time.monotonic())
    circuits.output_sent(serving.state)
    assert circuit_states(registry) == ["closed", "closed"]
    circuits.attempt_completed(serving.state)
    circuits.attempt_ended(serving.state)


def test_a_local_prompt_says_nothing_of_the_prefill_worker() -> None:
    prefill, decode = workers(Registry(1.0))
    events = RequestEvents(state())
    events.routed(prefill, decode, 0, 1.0)
    attempt = events.state.attempt
    assert attempt.responsive_parts == [(prefill.key,)]
    attempt.report.decode_worker = "d"
    assert attempt.responsive_parts == [(prefill.key,), (decode.key,), (prefill.key, decode.key)]
    attempt.report.prefill_worker = ""
    assert attempt.responsive_parts == [(decode.key,)]
