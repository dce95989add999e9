"""KV flows: sums of handoffs by pair of workers, of the last seconds only."""

from __future__ import annotations

from dataclasses import replace

from coordinator.telemetry.record_keeper import KvFlow, RecordKeeper
from splitserve.config.coordinator import RecordsConfig
from splitserve.v1 import prefill_pb2
from tests.unit.coordinator.telemetry.test_record import DECODE, Clock, attempt, prefilled, request

OTHER = replace(DECODE, worker_id="d1")
WINDOW_S = 5.0


def hand_off(
    clock: Clock, keeper: RecordKeeper, at_ms: float, written_bytes: int, to_other: bool = False
) -> None:
    """A request whose KV is written at this time."""
    with request(clock, keeper) as events:
        attempt(events, clock, at_ms - 20, OTHER if to_other else DECODE)
        prefilled(events, clock, at_ms - 1)
        clock.at(at_ms)
        events.transferred(prefill_pb2.HandoffDone(written_bytes=written_bytes))
        events.attempt_ended()


def test_handoffs_of_a_pair_add_up_and_the_largest_comes_first(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    for at_ms, written_bytes in ((100, 50), (200, 100), (300, 10)):
        hand_off(clock, keeper, at_ms, written_bytes)
    hand_off(clock, keeper, 400, 500, to_other=True)
    assert keeper.kv_flows(WINDOW_S) == [KvFlow("p0", "d1", 1, 500), KvFlow("p0", "d0", 3, 160)]


def test_only_the_last_seconds_count(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    hand_off(clock, keeper, 1000, 100)
    hand_off(clock, keeper, 3000, 10)
    clock.at(6500)
    assert keeper.kv_flows(WINDOW_S) == [KvFlow("p0", "d0", 1, 10)]
    clock.at(8001)
    assert keeper.kv_flows(WINDOW_S) == []


def test_requests_without_a_handoff_do_not_count(clock: Clock) -> None:
    keeper = RecordKeeper(RecordsConfig())
    hand_off(clock, keeper, 100, 0)
    assert keeper.kv_flows(WINDOW_S) == []
