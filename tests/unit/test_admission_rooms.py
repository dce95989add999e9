"""What the workers have room for: prefill by a horizon, decode by its predicted load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission.decode_room import DecodeLane, DecodeRoom, NoDecodeRoom, _peak_tokens
from coordinator.admission.entry import Entry
from coordinator.admission.prefill_room import PrefillRoom
from splitserve.v1 import registry_pb2
from tests.fakes.admission_parts import entry, worker


def prefill_room(count: int = 1, horizon_s: float = 0.1, **changes: object) -> PrefillRoom:
    room = PrefillRoom(horizon_s)
    room.renew(worker(f"p{n}", "prefill", **changes) for n in range(count))
    return room


def sent(room: PrefillRoom, one: Entry, now: float = 0.0) -> bool:
    lane = room.fit(one, now)
    if lane is None:
        return False
    room.take(lane.key, one, now)
    return True


def test_a_worker_is_sent_what_it_computes_in_the_horizon() -> None:
    room = prefill_room()  # 10,000 tokens/s for 0.1 s
    assert [sent(room, entry(200)) for _ in range(6)] == [True] * 5 + [False]
    assert not room.held_by_long


def test_an_idle_worker_takes_anything() -> None:
    assert sent(prefill_room(), entry(1_000_000))


def test_room_comes_back_when_a_prompt_is_computed() -> None:
    room = prefill_room()
    entries = [entry(200) for _ in range(6)]
    lanes = [room.fit(one, 0.0) for one in entries[:1]]
    for one in entries[:5]:
        assert sent(room, one)
    assert room.fit(entries[5], 0.0) is None
    assert lanes[0] is not None
    lanes[0].give_back(entries[0])
    lanes[0].give_back(entries[0])  # twice is once
    assert sent(room, entries[5])


def test_long_prompts_go_one_by_one_and_leave_half_to_short_ones() -> None:
    room = prefill_room()
    assert sent(room, entry(30_000))  # 3 s of work
    assert not sent(room, entry(30_000))
    assert room.held_by_long
    assert [sent(room, entry(100)) for _ in range(6)] == [True] * 5 + [False]
    assert room.next_long_s(0.0) == pytest.approx(2.95)
    assert sent(room, entry(30_000), now=2.96)
    assert not sent(room, entry(30_000), now=2.97)


def test_short_prompts_avoid_the_worker_with_the_long_one() -> None:
    room = prefill_room(2)
    assert sent(room, entry(30_000))
    short = [entry(100) for _ in range(10)]
    assert all(sent(room, one) for one in short)
    busy = next(lane for lane in room.lanes.values() if lane.long)
    assert not busy.short


def test_others_work_counts_once_two_reports_show_it() -> None:
    room = prefill_room()
    (lane,) = room.lanes.values()
    assert sent(room, entry(100))
    report = worker("p0", "prefill", waiting_tokens=5000)
    lane.hear(report)
    assert lane.others == 0
    lane.hear(report)
    assert lane.others == 4900
    assert not sent(room, entry(100))


def decode_room(
    count: int = 1, slots: int = 8, tpot_slo_s: float | None = None, headroom: float = 0.0, **changes: object
) -> DecodeRoom:
    room = DecodeRoom(tpot_slo_s, headroom)
    room.renew(worker(f"d{n}", "decode", slots, **changes) for n in range(count))
    return room


def put(room: DecodeRoom, one: Entry, prefill_s: float = 0.1) -> bool:
    lane = room.fit(one, prefill_s, 0.0)
    if not isinstance(lane, DecodeLane):
        return False
    lane.take(one)
    return True


def test_slots_bound_the_batch_and_the_emptier_worker_is_first() -> None:
    room = decode_room(2, slots=2)
    assert [put(room, entry(16)) for _ in range(5)] == [True] * 4 + [False]
    assert [len(lane.entries) for lane in room.lanes.values()] == [2, 2]


def test_kv_must_be_free_now() -> None:
    room = decode_room(total_blocks=100)
    assert put(room, entry(1000, 2))  # 63 blocks
    large, small = entry(1000, 2), entry(100, 2)
    assert room.fit(large, 0.1, 0.0) == NoDecodeRoom(smaller_may_fit=True)
    assert put(room, small)


def test_what_can_never_fit_is_the_workers_to_refuse() -> None:
    room = decode_room(total_blocks=100)
    assert put(room, entry(100))
    assert put(room, entry(5000))


def test_the_predicted_peak_counts_not_the_present_load() -> None:
    room = decode_room(total_blocks=100, slots=64)  # 1600 tokens
    # Each holds 100 tokens now and will hold 500: four of them peak at 2000 tokens.
    assert [put(room, entry(100, 400)) for _ in range(4)] == [True, True, True, False]
    # The same prompts with short answers all fit.
    room = decode_room(total_blocks=100, slots=64)
    assert all(put(room, entry(100, 10)) for _ in range(8))


def fit(base: float = 5, sequence: float = 1, context: float = 0) -> registry_pb2.DecodeStepFit:
    return registry_pb2.DecodeStepFit(base_ms=base, sequence_ms=sequence, context_token_ms=context)


def test_steps_stay_below_the_bound_when_the_prompt_arrives() -> None:
    room = decode_room(slots=64, tpot_slo_s=0.01, step_fit=fit())
    assert [put(room, entry(16)) for _ in range(7)] == [True] * 5 + [False] * 2
    # A sequence that ends before the prompt has been computed makes room already.
    (lane,) = room.lanes.values()
    ending = next(iter(lane.entries))
    ending.computed, ending.sent = True, 45
    assert not put(room, entry(16), prefill_s=0.01)
    assert put(room, entry(16), prefill_s=0.1)


def test_one_sequence_alone_is_never_too_slow() -> None:
    assert put(decode_room(tpot_slo_s=0.001, step_fit=fit()), entry(16))


def test_headroom_is_kept_only_while_a_higher_class_is_about() -> None:
    room = decode_room(slots=10, headroom=0.2)
    assert sum(put(room, entry(16, priority_class="batch")) for _ in range(12)) == 10
    room = decode_room(slots=10, headroom=0.2)
    room.saw("interactive", 0.0)
    assert sum(put(room, entry(16, priority_class="batch")) for _ in range(12)) == 8
    assert sum(put(room, entry(16, priority_class="interactive")) for _ in range(4)) == 2


def test_shared_prefixes_count_once_two_reports_show_it() -> None:
    room = decode_room(total_blocks=1000, slots=64)
    (lane,) = room.lanes.values()
    for _ in range(8):
        one = entry(1600, 16)
        lane.take(one)
        one.computed, one.sent = True, 1
        lane.grown(one, 1, first=True)
    assert not put(room, entry(3200, 16))
    report = worker("d0", "decode", total_blocks=1000, referenced_blocks=120, running_requests=8)
    lane.hear(report)
    lane.hear(report)
    assert put(room, entry(3200, 16))


def test_others_load_counts() -> None:
    room = decode_room(slots=8)
    (lane,) = room.lanes.values()
    report = worker("d0", "decode", running_requests=7, referenced_blocks=100)
    lane.hear(report)
    lane.hear(report)
    assert (lane.other_requests, lane.other_blocks) == (7, 100)
    assert [put(room, entry(16)) for _ in range(2)] == [True, False]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(2, 200), st.integers(0, 150)), min_size=1, max_size=12
    )
)
def test_the_peak_is_that_of_a_simulation(kinds: list[tuple[int, int, int]]) -> None:
    entries = []
    for prompt, output, done in kinds:
        one = entry(prompt, output)
        one.sent = min(done, output - 1)
        entries.append(one)
    held = [(one.context_tokens, int(one.remaining_output)) for one in entries]
    peak = max(
        sum(context + step for context, left in held if left >= step)
        for step in range(max(left for _, left in held) + 1)
    )
    assert abs(_peak_tokens(entries) - peak) <= len(entries)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("tsge"), st.integers(0, 5)), max_size=60))
def test_a_lane_counts_what_it_holds(steps: list[tuple[str, int]]) -> None:
    (lane,) = decode_room(slots=64).lanes.values()
    held: list[Entry] = []
    for what, pick in steps:
        if what == "t":
            held.append(entry(10 + pick, 20))
            lane.take(held[-1])
        elif held and what in "sg":
            one = held[pick % len(held)]
            first, one.computed = not one.computed, True
            one.sent += 2
            lane.grown(one, 2, first)
        elif held:
            lane.give_back(held.pop(pick % len(held)))
        assert lane.context_tokens == sum(one.context_tokens for one in held)
        assert lane.computed_context == sum(one.context_tokens for one in held if one.computed)
        assert lane.computed == sum(one.computed for one in held)
        assert lane.expected == pytest.approx(sum(one.expected_output for one in held))
