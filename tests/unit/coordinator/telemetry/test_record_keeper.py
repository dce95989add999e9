"""Which records are kept: bounds of each kind, tail sampling, whose they are."""

from __future__ import annotations

import tracemalloc

import pytest

from coordinator.request.state import MAX_PAST_ATTEMPTS, RequestEstimate, RequestState
from coordinator.request_events import RequestEvents
from coordinator.telemetry.record_keeper import RecordKeeper
from coordinator.telemetry.request_record import RequestRecord
from coordinator.telemetry.request_stats import RequestStats
from splitserve.config.coordinator import RecordsConfig
from splitserve.errors import ResourceExhaustedError, UnavailableError
from tests.unit.coordinator.telemetry.test_record import Clock, attempt, found, request, request_of, served

CONFIG = RecordsConfig(max_recent_records=3, max_notable_records=2, slow_ttft_s=0.039, slow_gap_s=10)
BYTES_PER_RECORD = 4096


def names(records: list[RequestRecord]) -> list[str]:
    return [record.request_id for record in records]


def test_the_latest_push_out_the_oldest_but_slow_ones_stay(clock: Clock) -> None:
    keeper = RecordKeeper(CONFIG)
    served(clock, keeper, "slow")  # 40 ms to its first token
    quick = RecordKeeper(RecordsConfig(max_recent_records=3, max_notable_records=2))
    for number in range(5):
        served(clock, quick, f"r{number}")
    assert names(keeper.kept(["slow"], None)) == ["slow"]
    assert keeper.why_kept(keeper.kept(["slow"], None)[0]) == ["slow: TTFT 40 ms, from 39 ms on"]
    assert set(names(quick.kept(["recent"], None))) == {"r2", "r3", "r4"}
    assert quick.kept(["slow", "failed"], None) == []
    assert quick.find("r0", None) is None


def test_a_flood_of_refusals_leaves_other_records_alone(clock: Clock) -> None:
    keeper = RecordKeeper(CONFIG)
    with pytest.raises(UnavailableError), request(clock, keeper, "failed"):
        raise UnavailableError("no worker", reason="NO_WORKER")
    served(clock, keeper, "good")
    for number in range(100):
        error = ResourceExhaustedError("too many", reason="TENANT_QUOTA")
        keeper.refused(f"q{number}", "words", "default", clock.received_s, error)
    assert keeper.find("failed", None) is not None
    assert keeper.find("good", None) is not None
    assert set(names(keeper.kept(["failed"], None))) == {"failed", "q98", "q99"}


def test_long_gaps_are_slow(clock: Clock) -> None:
    config = RecordsConfig(slow_gap_s=0.015)
    keeper = RecordKeeper(config)
    record = served(clock, keeper)
    assert keeper.why_kept(record) == ["slow: 20 ms before token 2, from 15 ms on"]
    assert keeper.kept(["slow"], None) == [record]


def test_records_belong_to_their_tenant(clock: Clock) -> None:
    keeper = RecordKeeper(CONFIG)
    served(clock, keeper, "mine", "alice")
    served(clock, keeper, "both", "alice")
    served(clock, keeper, "both", "bob")
    assert keeper.find("mine", "bob") is None
    assert keeper.find("mine", None) is not None
    for tenant in ("alice", "bob"):
        assert found(keeper, "both", tenant).tenant == tenant
    assert names(keeper.kept(["recent"], "bob")) == ["both"]


def test_ids_of_openai_answers_find_their_request(clock: Clock) -> None:
    keeper = RecordKeeper(CONFIG)
    served(clock, keeper, "one")
    served(clock, keeper, "several-0")
    for given in ("one", "chatcmpl-one", "cmpl-one", "chatcmpl-several", "several"):
        assert keeper.find(given, None) is not None, given
    assert keeper.find("chatcmpl-two", None) is None


def test_a_running_request_is_found_and_gone_from_there_at_its_end(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig(max_recent_records=0, max_notable_records=1))
    with request(clock, keeper) as events:
        attempt(events, clock, 5)
        running = found(keeper, "r", "default")
        assert (running.outcome, running.attempt_count) == ("running", 1)
        assert keeper.find("r", "other") is None
        events.attempt_ended()
        events.completed()
    assert keeper.find("r", None) is None


def test_attempts_are_bounded(clock: Clock) -> None:
    state = RequestState(request_of(clock), RequestEstimate(8.0, 40.0))
    keeper = RecordKeeper(CONFIG)
    with RequestEvents(state, keeper) as events:
        events.arrived(RequestStats())
        for number in range(50):
            attempt(events, clock, 10.0 * number)
            events.attempt_failed(UnavailableError("x" * 5000, reason="GONE"))
            events.attempt_ended()
    record = found(keeper)
    assert [one.number for one in record.attempts] == [1, 2, 3, 4, 47, 48, 49, 50]
    assert len(record.attempts) == MAX_PAST_ATTEMPTS
    assert record.attempt_count == 50
    assert all(len(one.failure) <= 300 for one in record.attempts)


def test_a_records_memory(clock: Clock) -> None:
    count = 200
    keeper = RecordKeeper(RecordsConfig(max_recent_records=count))
    served(clock, keeper)
    tracemalloc.start()
    try:
        for number in range(count):
            served(clock, keeper, f"request-{number}")
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / count < BYTES_PER_RECORD


def test_without_room_nothing_is_made(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig(max_recent_records=0, max_notable_records=0))
    keeper.refused("r", "words", "default", clock.received_s, ResourceExhaustedError("no"))
    assert keeper.kept(["recent", "slow", "failed"], None) == []
