"""Recordings of traffic: what belongs to one, what is lost, hashes that tell nothing, terms with bounds."""

from __future__ import annotations

import time

import pytest

from coordinator.records.traffic import (
    BLOCK_TOKENS,
    MAX_BUFFERED,
    MAX_RECORDINGS,
    RecordingTerms,
    TrafficRecorder,
    block_hashes,
)
from coordinator.records.traffic_stream import checked_terms
from coordinator.request.observer import RequestEvents, RequestObserver
from coordinator.request.state import RequestEstimate, RequestState
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from splitserve.v1 import traffic_pb2
from tests.unit.coordinator.records.test_record import Clock, attempt, prefilled, request_of, send

SALT, OTHER = b"s" * 16, b"t" * 16


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def terms(clock: Clock, since_s: float = -10, until_s: float = 10, **more: object) -> RecordingTerms:
    """Bounds relative to the receipt of the test's requests."""
    received_s = time.time() - clock.ms / 1e3
    return RecordingTerms(SALT, received_s + since_s, received_s + until_s, **more)  # type: ignore[arg-type]


def serve(clock: Clock, recorder: TrafficRecorder, *, fails: bool = False) -> None:
    state = RequestState.of(request_of(clock, "r", "alice"), RequestEstimate(8.0, 40.0), clock.at(2))
    with RequestEvents(state, [recorder]) as events:
        events.emit(RequestObserver.arrived)
        attempt(events, clock, 3)
        prefilled(events, clock, 30)
        send(events, clock, 40)
        send(events, clock, 60)
        if fails:
            raise UnavailableError("gone")
        events.attempt_ended()
        events.completed()


def test_requests_are_observed_until_no_recording_can_want_them(clock: Clock) -> None:
    recorder = TrafficRecorder()
    assert not recorder.is_wanted
    recording = recorder.begin(terms(clock, until_s=3600))
    recorder.end(recording)
    assert recorder.is_wanted, "a stream that broke may be opened again"
    other = TrafficRecorder()
    past = other.begin(terms(clock, until_s=-1))
    assert other.is_wanted
    other.end(past)
    assert not other.is_wanted


def test_a_request_is_recorded_at_its_end(clock: Clock) -> None:
    recorder = TrafficRecorder()
    recording = recorder.begin(terms(clock))
    serve(clock, recorder)
    with pytest.raises(UnavailableError):
        serve(clock, recorder, fails=True)
    done, failed = recording.take(9)
    assert (done.outcome, done.prompt_tokens, done.output_tokens, done.max_output_tokens) == (
        "completed", 40, 2, 8,
    )  # fmt: skip
    assert done.ttft_ms == pytest.approx(40)
    assert done.tpot_ms == pytest.approx(20)
    assert (done.prefill_compute_ms, done.prefill_queue_ms, done.prefill_chunks) == (20, 3, 2)
    assert done.cached_tokens == 16
    assert failed.outcome == "failed"
    assert done.tenant_hash == failed.tenant_hash < 2**48
    assert recording.take(9) == []
    assert recorder.ended_requests == 2
    assert recorder.running(recording.terms) == 0


def test_only_what_belongs_to_the_recording(clock: Clock) -> None:
    recorder = TrafficRecorder()
    late = recorder.begin(terms(clock, since_s=5))
    over = recorder.begin(terms(clock, until_s=-5))
    other = recorder.begin(terms(clock, model="another"))
    serve(clock, recorder)
    assert [one.is_empty for one in (late, over, other)] == [True, True, True]
    recorder.end(late)
    recorder.begin(terms(clock))
    recorder.begin(terms(clock))
    with pytest.raises(ResourceExhaustedError, match=f"{MAX_RECORDINGS} recordings"):
        recorder.begin(terms(clock))


def test_what_a_slow_reader_leaves_is_counted(clock: Clock) -> None:
    recorder = TrafficRecorder()
    recording = recorder.begin(terms(clock))
    for _ in range(MAX_BUFFERED + 3):
        serve(clock, recorder)
    assert recording.lost == 3
    assert len(recording.take(2**20)) == MAX_BUFFERED


def test_equal_beginnings_have_equal_hashes_under_one_salt_only() -> None:
    first = block_hashes(list(range(3 * BLOCK_TOKENS)), SALT)
    same = block_hashes([*range(2 * BLOCK_TOKENS), 7], SALT)
    assert len(first) == len(same) == 3
    assert first[:2] == same[:2]
    assert first[2] != same[2]
    assert not set(first) & set(block_hashes(list(range(3 * BLOCK_TOKENS)), OTHER))
    assert all(one < 2**48 for one in first)
    # Chained: a block at another place has another hash.
    assert len(set(block_hashes([5] * (4 * BLOCK_TOKENS), SALT))) == 4


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"salt": b"short"}, "salt"),
        ({"salt": b"l" * 65}, "salt"),
        ({"model": "m" * 129}, "model"),
        ({"seconds": 0}, "duration"),
        ({"seconds": 86_401}, "duration"),
        ({"drain_s": -1}, "drain"),
        ({"drain_s": 3601}, "drain"),
        ({"since_s": 2000}, "since"),
        ({"since_s": 900}, "since"),
    ],
)
def test_terms_have_bounds(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        checked_terms(request(**changes), now_s=1000.0)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_recording_that_goes_on_ends_when_it_would_have() -> None:
    begun = checked_terms(request(), now_s=1000.0)
    assert (begun.since_s, begun.until_s) == (1000, 1060)
    assert checked_terms(request(since_s=1000), now_s=1030.0).until_s == 1060


def request(
    salt: bytes = SALT, model: str = "", seconds: int = 60, drain_s: int = 0, since_s: int | None = None
) -> traffic_pb2.RecordTrafficRequest:
    made = traffic_pb2.RecordTrafficRequest(salt=salt, model=model)
    made.duration.FromSeconds(seconds)
    made.drain.FromSeconds(drain_s)
    if since_s is not None:
        made.since.FromSeconds(since_s)
    return made
