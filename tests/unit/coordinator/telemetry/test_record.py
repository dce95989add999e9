"""A request's record from its events: phases without gaps, decisions, cost; resumes, refusals, cancellations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from coordinator.request.inference_request import Caller, InferenceRequest
from coordinator.request.state import (
    AttemptReport,
    Candidate,
    PairCost,
    RequestEstimate,
    RequestState,
    Waits,
)
from coordinator.request_events import RequestEvents
from coordinator.telemetry.explanation import decisions_of
from coordinator.telemetry.record_keeper import RecordKeeper
from coordinator.telemetry.request_record import (
    AttemptFacts,
    PhaseOfRequest,
    RequestRecord,
    cost_of,
    phases_of,
)
from coordinator.telemetry.request_stats import RequestStats
from coordinator.workers.registration import checked_worker
from coordinator.workers.snapshot import Model, Worker
from splitserve.config.coordinator import RecordsConfig
from splitserve.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2, registry_pb2
from tests.support.clients.inference_requests import inference_request
from tests.support.cluster.registrations import registration

MODEL = Model("words", "words", 64, 100, block_size_tokens=16)
PREFILL = checked_worker(registration("p0", registry_pb2.ROLE_PREFILL))
DECODE = checked_worker(registration("d0", registry_pb2.ROLE_DECODE))
OTHER = replace(DECODE, worker_id="d1")
FIRST = prefill_pb2.FirstToken(cached_tokens=16, queue_ms=3, compute_ms=20, chunks=2)
LOST = UnavailableError("d0 is gone", reason="WORKER_LOST")


class Clock:
    """The monotonic clock of a test, in milliseconds since the request was received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received_s = time.monotonic()
        self.ms = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    @property
    def now_s(self) -> float:
        return self.received_s + self.ms / 1e3

    def at(self, ms: float) -> float:
        self.ms = ms
        return self.now_s


def request_of(clock: Clock, name: str = "r", tenant: str = "default", prompt: int = 40) -> InferenceRequest:
    return inference_request(
        prompt, request_id=name, model=MODEL, received_s=clock.received_s, caller=Caller(tenant)
    )


@contextmanager
def request(
    clock: Clock, keeper: RecordKeeper, name: str = "r", tenant: str = "default"
) -> Iterator[RequestEvents]:
    """A request that was tokenized after 2 ms."""
    state = RequestState.of(request_of(clock, name, tenant), RequestEstimate(8.0, 40.0), clock.at(2))
    with RequestEvents(state, keeper) as events:
        events.arrived(RequestStats())
        yield events


def attempt(
    events: RequestEvents,
    clock: Clock,
    from_ms: float,
    decode: Worker = DECODE,
    candidates: tuple[Candidate, ...] = (),
) -> None:
    """Routed at once, reserved in 4 ms; the prompt leaves after 5 ms."""
    events.routed(PREFILL, decode, 0, clock.at(from_ms), candidates)
    events.reserving(clock.at(from_ms + 1))
    report = events.state.attempt.report
    report.reserve_ms, report.reserved_blocks = 4.0, 3
    events.reserve_ended(0.004)
    now = clock.at(from_ms + 5)
    report.queue_ms = clock.ms
    events.prefilling(now)


def prefilled(events: RequestEvents, clock: Clock, at_ms: float) -> None:
    clock.at(at_ms)
    events.prefilled(FIRST)


def send(events: RequestEvents, clock: Clock, at_ms: float, count: int = 1) -> None:
    position = len(events.state.token_ids)
    delta = generation_pb2.OutputDelta(first_position=position, token_ids=[7] * count)
    events.sent(delta, clock.at(at_ms))


def decoding(events: RequestEvents, clock: Clock, at_ms: float) -> None:
    clock.at(at_ms)
    handoff = prefill_pb2.HandoffDone(written_bytes=3000, descriptors=2, transfer_ms=1.5)
    events.transferred(handoff)
    events.decode_began(0.5)


def serve(clock: Clock, keeper: RecordKeeper, name: str = "r", tenant: str = "default") -> None:
    """A whole request: admitted after 4 ms, first token after 40, the last one after 70."""
    with request(clock, keeper, name, tenant) as events:
        events.state.admitted_s = clock.at(4)
        attempt(events, clock, 5)
        prefilled(events, clock, 39)
        send(events, clock, 40)
        decoding(events, clock, 45)
        send(events, clock, 50)
        send(events, clock, 70)
        events.attempt_ended()
        events.completed()
        clock.at(71)


def served(clock: Clock, keeper: RecordKeeper, name: str = "r", tenant: str = "default") -> RequestRecord:
    """The record of a whole request."""
    serve(clock, keeper, name, tenant)
    return found(keeper, name, tenant)


def found(keeper: RecordKeeper, name: str = "r", tenant: str | None = None) -> RequestRecord:
    record = keeper.find(name, tenant)
    assert record is not None
    return record


def spans(phases: list[PhaseOfRequest]) -> list[tuple[str, float, float]]:
    return [(phase.name, round(phase.start_ms, 3), round(phase.end_ms, 3)) for phase in phases]


def adds_up(record: RequestRecord) -> bool:
    """Whether the phases until the first token, or the end, follow on each other and add up to it."""
    whole_ms = record.ended_ms if record.first_token_ms is None else record.first_token_ms
    row = [phase for phase in phases_of(record) if phase.start_ms < whole_ms - 1e-6]
    edges = [0.0, *(phase.end_ms for phase in row)]
    joined = all(phase.start_ms == pytest.approx(edge) for phase, edge in zip(row, edges, strict=False))
    return joined and sum(p.end_ms - p.start_ms for p in row) == pytest.approx(whole_ms)


def test_the_phases_of_a_request_add_up_to_its_ttft(clock: Clock) -> None:
    record = served(clock, RecordKeeper(RecordsConfig()))
    assert record.first_token_ms == pytest.approx(40)
    assert spans(phases_of(record)) == [
        ("tokenize", 0, 2),
        ("admission", 2, 4),
        ("route", 4, 6),
        ("reserve", 6, 10),
        ("prefill_queue", 10, 13),
        ("prefill_compute", 13, 33),
        ("deliver", 33, 40),
        ("transfer", 40, 41.5),
        ("decode_admit", 44.5, 45),
        ("decode", 45, 70),
        ("end", 70, 71),
    ]
    assert adds_up(record)
    workers = {phase.name: phase.worker for phase in phases_of(record)}
    assert (workers["reserve"], workers["prefill_compute"], workers["transfer"]) == ("d0", "p0", "p0")


def test_it_tells_counts_gaps_and_cost(clock: Clock) -> None:
    record = served(clock, RecordKeeper(RecordsConfig()))
    assert (record.outcome, record.prompt_tokens, record.output_tokens) == ("completed", 40, 3)
    assert (record.longest_gap_ms, record.longest_gap_position) == (pytest.approx(20), 2)
    report = record.attempts[0].report
    assert (report.chunks, report.descriptors, report.reserved_blocks) == (2, 2, 3)
    cost = cost_of(record)
    assert (cost.prefill_s, cost.decode_s) == (pytest.approx(0.020), pytest.approx(0.025))
    # 3 blocks for 21.5 ms on prefill; 3 of 40 and of 43 tokens, from the reservation at 10 ms to the end on decode.
    assert cost.kv_block_s == pytest.approx(3 * 0.0215 + 3 * 0.060)
    assert cost.written_bytes == 3000


def test_a_resume_before_the_first_token_keeps_the_sum(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    with request(clock, keeper) as events:
        events.state.admitted_s = clock.at(4)
        attempt(events, clock, 5)
        clock.at(30)
        events.state.attempt.suspect = DECODE.key
        events.attempt_failed(LOST)
        events.attempt_ended()
        attempt(events, clock, 32, OTHER)
        prefilled(events, clock, 60)
        send(events, clock, 61)
        events.attempt_ended()
        events.completed()
    record = found(keeper)
    assert spans(phases_of(record))[3:] == [
        ("reserve", 6, 10),
        ("prefill", 10, 30),
        ("route", 30, 33),
        ("reserve", 33, 37),
        ("prefill_queue", 37, 40),
        ("prefill_compute", 40, 60),
        ("deliver", 60, 61),
    ]
    assert adds_up(record)
    assert keeper.why_kept(record) == ["resumed: d0: WORKER_LOST: d0 is gone"]
    resume = next(one for one in decisions_of(record) if one.stage == "resume")
    assert (resume.chosen, resume.attempt) == ("p0+d1", 2)
    assert resume.reason == "d0 failed (WORKER_LOST: d0 is gone); 0 tokens had been sent"


def test_a_resume_after_the_first_token_shows_both_parts(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    with request(clock, keeper) as events:
        events.state.admitted_s = clock.at(4)
        attempt(events, clock, 5)
        prefilled(events, clock, 39)
        send(events, clock, 40)
        decoding(events, clock, 45)
        send(events, clock, 50)
        clock.at(60)
        events.attempt_failed(LOST)
        events.attempt_ended()
        attempt(events, clock, 61, OTHER)
        prefilled(events, clock, 95)
        send(events, clock, 96)
        events.attempt_ended()
        events.completed()
    record = found(keeper)
    assert adds_up(record)
    assert (record.longest_gap_ms, record.longest_gap_position) == (pytest.approx(46), 2)
    second = [phase for phase in phases_of(record) if phase.attempt == 2]
    assert [phase.name for phase in second][:4] == ["route", "reserve", "prefill_queue", "prefill_compute"]
    assert record.attempts[1].first_position == 2


def test_a_local_prefill_is_the_decode_workers(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    with request(clock, keeper) as events:
        events.state.admitted_s = clock.at(4)
        events.routed(PREFILL, DECODE, 0, clock.at(5))
        events.reserving(clock.at(6))
        clock.at(8)
        events.prefilling_locally()
        clock.at(30)
        events.prefilled_locally(decode_pb2.LocalPrefill(queue_ms=1, compute_ms=22))
        send(events, clock, 31)
        send(events, clock, 40)
        events.attempt_ended()
        events.completed()
    record = found(keeper)
    assert spans(phases_of(record))[2:] == [
        ("route", 4, 6),
        ("prefill_queue", 6, 7),
        ("prefill_compute", 7, 29),
        ("deliver", 29, 31),
        ("decode", 31, 40),
    ]
    assert adds_up(record)
    assert {phase.worker for phase in phases_of(record)} == {"", "d0"}
    assert [one.stage for one in decisions_of(record)] == [
        "admission",
        "prefill",
        "decode",
        "local_prefill",
    ]
    assert cost_of(record).decode_s == pytest.approx(0.010)


def test_a_refusal_in_admission(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    with suppress(ResourceExhaustedError), request(clock, keeper):
        clock.at(12)
        raise ResourceExhaustedError("1024 requests are waiting", reason="QUEUE_FULL")
    record = found(keeper, "r", "default")
    assert record.outcome == "rejected"
    assert spans(phases_of(record)) == [("tokenize", 0, 2), ("admission", 2, 12)]
    assert adds_up(record)
    decision = decisions_of(record)[0]
    assert (decision.stage, decision.chosen) == ("admission", "refused")
    assert decision.reason == "QUEUE_FULL: 1024 requests are waiting"
    assert keeper.kept(["recent"], None) == []
    assert keeper.kept(["failed"], None) == [record]


def test_a_wait_in_admission_says_what_for(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    with request(clock, keeper) as events:
        state = events.state
        state.waits, state.predicted_ttft_s = Waits(prefill_s=0.3), 0.42
        state.admitted_s = clock.at(302)
        running = found(keeper, "r", "default")
    assert running.outcome == "running"
    decision = decisions_of(running)[0]
    assert (decision.chosen, decision.reason) == (
        "queued",
        "300 ms because prefill had no capacity; TTFT forecast 420 ms",
    )


@pytest.mark.parametrize(
    ("error", "outcome", "is_kept"),
    [
        (asyncio.CancelledError(), "cancelled", False),
        (DeadlineExceededError("the generation took longer than 1 s"), "timed_out", True),
        (RuntimeError("a bug"), "failed", True),
    ],
)
def test_what_ends_while_prefilling(clock: Clock, error: BaseException, outcome: str, is_kept: bool) -> None:
    keeper = RecordKeeper(RecordsConfig())
    with suppress(type(error)), request(clock, keeper) as events:
        events.state.admitted_s = clock.at(4)
        attempt(events, clock, 5)
        clock.at(20)
        events.attempt_ended()
        raise error
    record = found(keeper)
    assert (record.outcome, record.first_token_ms) == (outcome, None)
    assert spans(phases_of(record))[-1] == ("prefill", 10, 20)
    assert adds_up(record)
    assert bool(keeper.kept(["failed"], None)) == is_kept


def test_what_was_not_understood_is_kept_with_its_error(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    clock.at(3)
    error = InvalidArgumentError("prompt must be set", field="prompt")
    keeper.refused("bad", "words", "default", clock.received_s, error)
    record = found(keeper, "bad", "default")
    assert spans(phases_of(record)) == [("tokenize", 0, 3)]
    assert decisions_of(record) == []
    assert keeper.why_kept(record) == ["refused: INVALID_ARGUMENT: prompt"]


def test_a_workers_own_times_never_exceed_what_passed(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    with request(clock, keeper) as events:
        events.state.admitted_s = clock.at(4)
        attempt(events, clock, 5)
        prefilled(events, clock, 20)  # 23 ms of its own, of the 10 ms that there were
        send(events, clock, 20)
        events.attempt_ended()
        events.completed()
    record = found(keeper)
    assert adds_up(record)


def test_it_holds_no_tokens(clock: Clock) -> None:
    record = served(clock, RecordKeeper(RecordsConfig()))
    shown = repr(record)
    assert str(list(range(40)))[1:20] not in shown
    assert str(tuple(range(40)))[1:20] not in shown


def test_what_each_other_candidate_would_have_cost(clock: Clock) -> None:
    chosen = PairCost(queue_s=0.002, prefill_s=0.010, transfer_s=0.001, decode_wait_s=0.050, cached_tokens=32)
    cold = replace(chosen, decode_wait_s=0.010, prefill_s=0.320, cached_tokens=0)
    later = replace(chosen, decode_wait_s=0.0625)
    candidates = (
        Candidate("p0", "prefill", chosen),
        Candidate("p1", "prefill", cold),
        Candidate("d0", "decode", chosen),
        Candidate("d1", "decode", later),
        Candidate("d2", "decode", chosen),
    )
    keeper = RecordKeeper(RecordsConfig())
    with request(clock, keeper) as events:
        events.state.admitted_s = clock.at(4)
        attempt(events, clock, 5, candidates=candidates)
        events.attempt_ended()
    record = found(keeper)
    prefill, decode = decisions_of(record)[1:]
    assert prefill.reason == (
        "predicted 63.0 ms, 32 of 40 prompt tokens held; p1: +310.0 ms prefill, -40.0 ms decode"
    )
    assert decode.reason == (
        "predicted 63.0 ms, 0 of 40 prompt tokens held; d1: +12.5 ms decode; "
        "d2 was predicted the same; equal workers take turns"
    )
    assert [one.worker for one in decode.candidates] == ["d0", "d1", "d2"]


def test_a_worker_that_decodes_what_it_computes_hands_nothing_off() -> None:
    attempt = AttemptFacts(
        1, "w0", "w0", True, (), AttemptReport(""), 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0, "", ""
    )
    record = RequestRecord("r", "t", "m", "completed", 0.0, 5.0, served_model="m", attempts=[attempt])
    local = decisions_of(record)[-1]
    assert local.reason == "the worker that computes it keeps the answer, without a handoff"
