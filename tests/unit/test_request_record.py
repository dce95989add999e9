"""What requests leave in the signal book: demand at arrival, phases, cold samples, ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from coordinator.answer import Answer
from coordinator.gates import Waits
from coordinator.pools import Model, Worker
from coordinator.registration_checks import checked_worker
from coordinator.request_record import COLD_REQUESTS, RequestRecord
from coordinator.request_validation import Generation
from coordinator.signal_book import DEFAULT_OUTPUT_TOKENS, Held, SignalBook, Stage
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from splitserve.v1 import generation_pb2, prefill_pb2, registry_pb2, scaling_pb2
from tests.fakes.registrations import registration

MODEL = Model("words", "words", 64, 100)
COMPLETED, CANCELLED = scaling_pb2.OUTCOME_COMPLETED, scaling_pb2.OUTCOME_CANCELLED


def some_worker(pool: registry_pb2.Pool.ValueType, served: int = COLD_REQUESTS) -> Worker:
    return replace(checked_worker(registration("w", pool)), total_requests=served)


PREFILL, DECODE = some_worker(registry_pb2.POOL_PREFILL), some_worker(registry_pb2.POOL_DECODE)
COLD_PREFILL = some_worker(registry_pb2.POOL_PREFILL, COLD_REQUESTS - 1)
COLD_DECODE = some_worker(registry_pb2.POOL_DECODE, 0)


def generation(prompt: int = 10, max_tokens: int = 5) -> Generation:
    return Generation(
        "r", MODEL, tuple(range(prompt)), generation_pb2.SamplingParams(),
        generation_pb2.StopParams(max_tokens=max_tokens), 0, time.monotonic() + 60, time.monotonic(),
    )  # fmt: skip


def first(cached: int = 0) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(cached_tokens=cached, queue_ms=30, compute_ms=70)


def run(book: SignalBook, prefill: Worker = PREFILL, decode: Worker = DECODE, attempts: int = 1) -> None:
    """A whole request of two tokens."""
    request = generation()
    answer = Answer(request)
    with RequestRecord(book, request.received_s) as record:
        record.arrived(request)
        for _ in range(attempts):
            record.chosen(prefill, decode)
            record.reserving()
            record.reserve_waited(0.2)
            record.prefilling()
        record.prefilled(first())
        record.transferred(prefill_pb2.HandoffDone(written_bytes=1, transfer_ms=5))
        record.admitted(2.0)
        for position in range(2):
            delta = generation_pb2.OutputDelta(first_position=position, token_ids=[1])
            answer.append(delta, request.received_s + 0.1 + position * 0.02)
            record.sent(answer)
        record.completed(answer)


def test_what_a_request_waited_for_counts_in_the_phase_of_that_pool() -> None:
    book = SignalBook()
    request = generation()
    with RequestRecord(book, request.received_s) as record:
        record.arrived(request)
        record.passed(Waits(prefill_s=100.0, decode_s=200.0))
        record.chosen(PREFILL, DECODE)
        record.reserve_waited(0.1)
        record.prefilled(first())
    phases = book.of(request.model.name).phases
    assert phases[scaling_pb2.PHASE_PREFILL].warm.sum_s > 100
    assert phases[scaling_pb2.PHASE_PREFILL_QUEUE].warm.sum_s > 100
    assert phases[scaling_pb2.PHASE_RESERVE].warm.sum_s > 200
    assert phases[scaling_pb2.PHASE_ADMIT].warm.sum_s == 0


def test_who_is_held_counts_for_the_pool_without_room() -> None:
    book = SignalBook().of("m")
    book.in_stage[Stage.ADMITTING], book.prefilling_tokens = 5, 10.0
    book.held = Held(3, 300.0, "prefill")
    assert (book.stages[Stage.ADMITTING], book.stages[Stage.PREFILLING]) == (2, 3)
    assert book.backlog_tokens == 310
    book.held = Held(3, 300.0, "decode")
    assert (book.stages[Stage.ADMITTING], book.stages[Stage.RESERVING]) == (2, 3)
    assert book.backlog_tokens == 10


def samples(book: SignalBook, phase: scaling_pb2.Phase.ValueType) -> tuple[int, int]:
    """Warm and cold ones."""
    counts = book.of("words").phases[phase]
    return counts.warm.total, counts.cold.total


def test_every_phase_is_stamped_once() -> None:
    book = SignalBook()
    run(book)
    phases = book.of("words").phases
    local = scaling_pb2.PHASE_LOCAL_PREFILL
    assert {phase: counts.warm.total for phase, counts in phases.items()} == {
        phase: int(phase != local) for phase in phases
    }
    assert phases[scaling_pb2.PHASE_PREFILL].warm.sum_s == pytest.approx(0.1)
    assert phases[scaling_pb2.PHASE_RESERVE].warm.sum_s == pytest.approx(0.2)
    assert phases[scaling_pb2.PHASE_TTFT].warm.sum_s == pytest.approx(0.1)
    assert phases[scaling_pb2.PHASE_TPOT].warm.sum_s == pytest.approx(0.02)
    assert book.of("words").outcomes[COMPLETED] == 1
    assert set(book.of("words").in_stage.values()) == {0}


def test_samples_of_a_new_worker_are_cold_where_they_depend_on_it() -> None:
    book = SignalBook()
    run(book, prefill=COLD_PREFILL)
    assert samples(book, scaling_pb2.PHASE_PREFILL) == (0, 1)
    assert samples(book, scaling_pb2.PHASE_TTFT) == (0, 1)
    assert samples(book, scaling_pb2.PHASE_TPOT) == (1, 0)
    run(book, decode=COLD_DECODE)
    assert samples(book, scaling_pb2.PHASE_PREFILL) == (1, 1)
    assert samples(book, scaling_pb2.PHASE_TTFT) == (0, 2)
    assert samples(book, scaling_pb2.PHASE_TPOT) == (1, 1)
    assert samples(book, scaling_pb2.PHASE_RESERVE) == (1, 1)


def test_retried_requests_measure_a_fault() -> None:
    book = SignalBook()
    run(book, attempts=2)
    assert samples(book, scaling_pb2.PHASE_TTFT) == (0, 1)
    assert samples(book, scaling_pb2.PHASE_TPOT) == (0, 1)
    assert book.of("words").requests == 1


def test_demand_is_counted_at_arrival_by_what_was_learned() -> None:
    book, model = SignalBook(), SignalBook().of("x")
    for _ in range(3):
        with RequestRecord(book, 0.0) as record:
            record.arrived(generation(prompt=100, max_tokens=1000))
            record.chosen(PREFILL, DECODE)
            record.prefilled(first(cached=50))
    model = book.of("words")
    assert (model.requests, model.prompt_tokens) == (3, 300)
    assert model.uncached_tokens == pytest.approx(100 + 50 + 50)
    assert model.output_tokens == pytest.approx(3 * DEFAULT_OUTPUT_TOKENS)
    run(book)
    assert model.expected_output.value == 2
    with RequestRecord(book, 0.0) as record:
        record.arrived(generation(prompt=1, max_tokens=1))
    assert model.output_tokens == pytest.approx(3 * DEFAULT_OUTPUT_TOKENS + 5 + 1), "max_tokens at most"


def test_the_backlog_is_what_prefill_has_before_it() -> None:
    book = SignalBook()
    with RequestRecord(book, 0.0) as record:
        record.arrived(generation(prompt=40))
        record.chosen(PREFILL, DECODE)
        record.reserving()
        model = book.of("words")
        assert model.prefilling_tokens == 0, "what waits for KV blocks is not the prefill pool's"
        record.prefilling()
        assert (model.in_stage[Stage.PREFILLING], model.prefilling_tokens) == (1, 40)
        record.prefilled(first())
        assert (model.in_stage[Stage.DECODING], model.prefilling_tokens) == (1, 0)
    assert set(model.in_stage.values()) == {0}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError(), CANCELLED),
        (DeadlineExceededError("late"), scaling_pb2.OUTCOME_TIMED_OUT),
        (ResourceExhaustedError("full"), scaling_pb2.OUTCOME_REJECTED),
        (UnavailableError("gone"), scaling_pb2.OUTCOME_FAILED),
    ],
)
def test_ends_are_counted_by_kind(error: BaseException, outcome: scaling_pb2.Outcome.ValueType) -> None:
    book = SignalBook()

    def failing() -> None:
        with RequestRecord(book, time.monotonic() - 3) as record:
            record.arrived(generation())
            record.chosen(PREFILL, DECODE)
            raise error

    with pytest.raises(type(error)):
        failing()
    assert book.of("words").outcomes[outcome] == 1
    late = outcome == scaling_pb2.OUTCOME_TIMED_OUT
    assert samples(book, scaling_pb2.PHASE_TTFT) == (int(late), 0), "who waited in vain has waited, too"


def test_clients_make_no_series() -> None:
    book = SignalBook()
    with pytest.raises(UnavailableError), RequestRecord(book, 0.0):
        raise UnavailableError("before its model was known")
    book.turned_away("made up")
    assert book.models() == {}
    book.of("words")
    book.turned_away("")
    book.turned_away("words")
    book.turned_away("made up")
    assert book.models()["words"].outcomes[scaling_pb2.OUTCOME_REJECTED] == 2
    assert list(book.models()) == ["words"]
