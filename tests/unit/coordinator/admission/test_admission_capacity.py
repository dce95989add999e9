"""Capacity of the workers: prefill by its horizon, decode by its predicted load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission.decode_capacity import (
    LATE_PATIENCE_S,
    DecodeCapacity,
    NoDecodeCapacity,
    _peak_tokens,
)
from coordinator.admission.entry import Entry
from coordinator.admission.prefill_capacity import PrefillCapacity
from coordinator.workers.load import DecodeLoad
from coordinator.workers.load_ledger import LoadLedger
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import entry, worker


def prefill_capacity(count: int = 1, horizon_s: float = 0.1, **changes: object) -> PrefillCapacity:
    capacity = PrefillCapacity(horizon_s)
    capacity.set_workers(
        LoadLedger.of(worker(f"p{n}", "prefill", **changes) for n in range(count)).prefill.values()
    )
    return capacity


def sent(capacity: PrefillCapacity, one: Entry, now: float = 0.0) -> bool:
    load = capacity.fit(one, now)
    if load is None:
        return False
    capacity.add_flight(load, one, now)
    return True


def test_a_worker_is_sent_what_it_computes_in_the_horizon() -> None:
    capacity = prefill_capacity()  # 10,000 tokens/s for 0.1 s
    assert [sent(capacity, entry(200)) for _ in range(6)] == [True] * 5 + [False]
    assert not capacity.held_by_long


def test_an_idle_worker_takes_anything() -> None:
    assert sent(prefill_capacity(), entry(1_000_000))


def test_capacity_returns_when_a_prompt_is_computed() -> None:
    capacity = prefill_capacity()
    entries = [entry(200) for _ in range(6)]
    loads = [capacity.fit(one, 0.0) for one in entries[:1]]
    for one in entries[:5]:
        assert sent(capacity, one)
    assert capacity.fit(entries[5], 0.0) is None
    assert loads[0] is not None
    loads[0].remove_flight(entries[0])
    loads[0].remove_flight(entries[0])  # idempotent
    assert sent(capacity, entries[5])


def test_long_prompts_go_one_by_one_and_leave_half_to_short_ones() -> None:
    capacity = prefill_capacity()
    assert sent(capacity, entry(30_000))  # 3 s of work
    assert not sent(capacity, entry(30_000))
    assert capacity.held_by_long
    assert [sent(capacity, entry(100)) for _ in range(6)] == [True] * 5 + [False]
    assert capacity.next_change_s(0.0) == pytest.approx(2.95)
    assert sent(capacity, entry(30_000), now=2.96)
    assert not sent(capacity, entry(30_000), now=2.97)


def test_a_lent_decode_worker_is_sent_a_long_prompt_beside_that_of_its_prefill_worker() -> None:
    capacity = prefill_capacity()
    capacity.set_help(1, share=1.0, is_lent=True)
    first, second, third = (entry(30_000) for _ in range(3))
    assert [sent(capacity, one) for one in (first, second, third)] == [True, True, False]
    (load,) = capacity.workers.values()
    assert load.long_until_s == pytest.approx(3.0), "each takes 3 s, at once"
    load.remove_flight(second)
    assert sent(capacity, third)
    capacity.set_help(1, share=1.0, is_lent=False)  # the plan has expired
    load.remove_flight(first)
    assert not sent(capacity, first)
    assert sent(prefill_capacity(), first)


def test_short_prompts_avoid_the_worker_with_the_long_one() -> None:
    capacity = prefill_capacity(2)
    assert sent(capacity, entry(30_000))
    short = [entry(100) for _ in range(10)]
    assert all(sent(capacity, one) for one in short)
    busy = next(load for load in capacity.workers.values() if load.long)
    assert not busy.short


def ordering(count: int = 1, **changes: object) -> PrefillCapacity:
    """Of workers that serve prompts in time before late ones."""
    capacity = PrefillCapacity(0.1)
    workers = (replace(worker(f"p{n}", "prefill", **changes), paces_prompts=True) for n in range(count))
    capacity.set_workers(LoadLedger.of(workers).prefill.values())
    return capacity


def test_who_can_be_in_time_does_not_wait_for_those_who_cannot() -> None:
    capacity = ordering()  # 10,000 tokens/s for 0.1 s
    late = [entry(200, due_s=0.5) for _ in range(6)]
    assert [sent(capacity, one) for one in late] == [True] * 5 + [False]
    (load,) = capacity.workers.values()
    assert capacity.next_change_s(0.0) == pytest.approx(0.48)
    assert not sent(capacity, entry(200, due_s=9.0), now=0.4)
    assert [sent(capacity, entry(200, due_s=9.0), now=0.5) for _ in range(6)] == [True] * 5 + [False]
    assert (len(load.late), load.late_tokens, load.requests) == (5, 1000, 10)
    assert load.backlog_s(0.5) == pytest.approx(0.1), "late ones are behind"
    assert not sent(capacity, late[5], now=0.5)
    assert (capacity.held_by_late, capacity.held_by_long) == (True, False)
    load.remove_flight(late[0])
    load.remove_flight(late[0])  # idempotent
    assert sent(capacity, late[5], now=0.5)
    for one in late[1:]:
        load.remove_flight(one)
    assert (len(load.late), load.late_tokens, load.prompt_tokens) == (0, 0.0, 1000)


def test_a_long_prompt_that_is_late_keeps_no_other_from_its_place() -> None:
    capacity = ordering()
    assert sent(capacity, entry(5_000, due_s=0.4))  # it never can be in time
    assert sent(capacity, entry(5_000, due_s=1.0))
    assert not sent(capacity, entry(5_000, due_s=2.0))
    assert sent(capacity, entry(5_000, due_s=2.0), now=0.6)


def test_where_workers_do_not_order_prompts_late_ones_count_as_before() -> None:
    capacity = prefill_capacity()
    assert [sent(capacity, entry(200, due_s=0.5)) for _ in range(5)] == [True] * 5
    assert not sent(capacity, entry(200, due_s=9.0), now=1.0)


_RATES = st.lists(st.tuples(st.sampled_from([0, 700, 1_000, 1_001, 9_000]), st.booleans()), max_size=6)


@given(_RATES, st.integers(0, 10_000), st.sampled_from([0.0, 1.0, 1.7, 12.5, float("inf")]), st.floats(0, 3))
def test_prompts_are_late_by_the_rates_as_on_each_worker(
    found: list[tuple[int, bool]], tokens: int, due_s: float, now: float
) -> None:
    workers = [
        replace(worker(f"p{n}", "prefill", prefill_tokens_per_second=rate), paces_prompts=orders)
        for n, (rate, orders) in enumerate(found)
    ]
    capacity = PrefillCapacity(0.1)
    capacity.set_workers(LoadLedger.of(workers).prefill.values())
    loads, one = capacity.workers.values(), entry(tokens, due_s=due_s)
    rates = capacity.late_rates()
    late_everywhere = bool(loads) and all(load.will_be_late(one, now) for load in loads)
    assert (now >= rates.everywhere_s(one)) == late_everywhere
    times_s = [load.begin_by_s(one) for load in loads if load.orders_prompts]
    assert rates.next_s(one, now) == min((each for each in times_s if each > now), default=float("inf"))


def test_others_work_counts_once_two_reports_show_it() -> None:
    capacity = prefill_capacity()
    (load,) = capacity.workers.values()
    assert sent(capacity, entry(100))
    report = worker("p0", "prefill", waiting_tokens=5000)
    load.on_report(report.load)
    assert load.others == 0
    load.on_report(report.load)
    assert load.others == 4900
    assert not sent(capacity, entry(100))


def decode_capacity(
    count: int = 1, slots: int = 8, tpot_slo_s: float | None = None, headroom: float = 0.0, **changes: object
) -> DecodeCapacity:
    capacity = DecodeCapacity(tpot_slo_s, headroom)
    loads = LoadLedger.of(worker(f"d{n}", "decode", slots, **changes) for n in range(count))
    capacity.set_workers(loads.decode.values())
    return capacity


def put(capacity: DecodeCapacity, one: Entry, prefill_s: float = 0.1) -> bool:
    load = capacity.fit(one, prefill_s, 0.0)
    if not isinstance(load, DecodeLoad):
        return False
    load.add_flight(one)
    return True


def test_slots_bound_the_batch_and_the_emptier_worker_is_first() -> None:
    capacity = decode_capacity(2, slots=2)
    assert [put(capacity, entry(16)) for _ in range(5)] == [True] * 4 + [False]
    assert [len(load.flights) for load in capacity.workers.values()] == [2, 2]


def test_kv_must_be_free_now() -> None:
    capacity = decode_capacity(total_blocks=100)
    assert put(capacity, entry(1000, 2))  # 63 blocks
    large, small = entry(1000, 2), entry(100, 2)
    assert capacity.fit(large, 0.1, 0.0) == NoDecodeCapacity(smaller_may_fit=True)
    assert put(capacity, small)


def test_what_can_never_fit_is_the_workers_to_refuse() -> None:
    capacity = decode_capacity(total_blocks=100)
    assert put(capacity, entry(100))
    assert put(capacity, entry(5000))


def test_the_predicted_peak_counts_not_the_present_load() -> None:
    capacity = decode_capacity(total_blocks=100, slots=64)  # 1600 tokens
    # Each holds 100 tokens now and will hold 500: four of them peak at 2000 tokens.
    assert [put(capacity, entry(100, 400)) for _ in range(4)] == [True, True, True, False]
    # The same prompts with short answers all fit.
    capacity = decode_capacity(total_blocks=100, slots=64)
    assert all(put(capacity, entry(100, 10)) for _ in range(8))


def fit(base: float = 5, sequence: float = 1, context: float = 0) -> registry_pb2.DecodeStepFit:
    return registry_pb2.DecodeStepFit(base_ms=base, sequence_ms=sequence, context_token_ms=context)


def test_steps_stay_below_the_bound_when_the_prompt_arrives() -> None:
    capacity = decode_capacity(slots=64, tpot_slo_s=0.01, step_fit=fit())
    assert [put(capacity, entry(16)) for _ in range(7)] == [True] * 5 + [False] * 2
    # A sequence that ends before the prompt is computed already frees capacity.
    (load,) = capacity.workers.values()
    ending = next(iter(load.flights))
    ending.computed, ending.sent = True, 45
    assert not put(capacity, entry(16), prefill_s=0.01)
    assert put(capacity, entry(16), prefill_s=0.1)


def test_one_sequence_alone_is_never_too_slow() -> None:
    assert put(decode_capacity(tpot_slo_s=0.001, step_fit=fit()), entry(16))


def test_a_target_of_a_tenant_or_request_goes_before_that_of_the_settings() -> None:
    # 5 ms and 1 ms a sequence.
    loose = decode_capacity(slots=64, tpot_slo_s=0.01, step_fit=fit())
    assert [put(loose, entry(16, tpot_slo_s=0.02)) for _ in range(16)] == [True] * 15 + [False]
    assert not put(loose, entry(16)), "15 more would be too slow for it"
    tight = decode_capacity(slots=64, tpot_slo_s=0.01, step_fit=fit())
    assert [put(tight, entry(16, tpot_slo_s=0.008)) for _ in range(4)] == [True] * 3 + [False]
    assert not put(tight, entry(16, tpot_slo_s=0.02)), "those that run were promised 8 ms"
    (load,) = tight.workers.values()
    for running in [*load.flights]:
        load.remove_flight(running)
    assert load.targets_s == []
    assert [put(tight, entry(16)) for _ in range(6)] == [True] * 5 + [False]


def test_targets_count_without_any_of_the_settings() -> None:
    capacity = decode_capacity(slots=64, step_fit=fit())
    assert put(capacity, entry(16, tpot_slo_s=0.008))
    assert [put(capacity, entry(16)) for _ in range(3)] == [True, True, False]


def test_a_target_that_nobody_can_keep_binds_nobody() -> None:
    capacity = decode_capacity(slots=64, tpot_slo_s=0.01, step_fit=fit())
    assert put(capacity, entry(16, tpot_slo_s=0.004))
    assert [put(capacity, entry(16)) for _ in range(5)] == [True] * 4 + [False]
    assert not put(capacity, entry(16, tpot_slo_s=0.004)), "the settings' bounds it instead"


def test_headroom_is_kept_only_while_a_higher_class_is_active() -> None:
    capacity = decode_capacity(slots=10, headroom=0.2)
    assert sum(put(capacity, entry(16, priority_class="batch")) for _ in range(12)) == 10
    capacity = decode_capacity(slots=10, headroom=0.2)
    capacity.on_arrival("interactive", 0.0)
    assert sum(put(capacity, entry(16, priority_class="batch")) for _ in range(12)) == 8
    assert sum(put(capacity, entry(16, priority_class="interactive")) for _ in range(4)) == 2


def test_shared_prefixes_count_once_two_reports_show_it() -> None:
    capacity = decode_capacity(total_blocks=1000, slots=64)
    (load,) = capacity.workers.values()
    for _ in range(8):
        one = entry(1600, 16)
        load.add_flight(one)
        one.computed, one.sent = True, 1
        load.grow_flight(one, 1, first=True)
    assert not put(capacity, entry(3200, 16))
    report = worker("d0", "decode", total_blocks=1000, referenced_blocks=120, running_requests=8)
    load.on_report(report.load)
    load.on_report(report.load)
    assert put(capacity, entry(3200, 16))


def test_others_load_counts() -> None:
    capacity = decode_capacity(slots=8)
    (load,) = capacity.workers.values()
    report = worker("d0", "decode", running_requests=7, referenced_blocks=100)
    load.on_report(report.load)
    load.on_report(report.load)
    assert (load.other_requests, load.other_blocks) == (7, 100)
    assert [put(capacity, entry(16)) for _ in range(2)] == [True, False]


def test_own_streams_whose_first_token_is_on_its_way_are_not_others() -> None:
    """At any time a few are decoded of which this coordinator has not sent a token yet: others in each report."""
    load = DecodeLoad(("d", 1), 64)
    for running, streams, others in ((1, 1, 0), (2, 2, 0), (12, 5, 3)):
        one = entry()
        load.add_flight(one)
        for _ in range(2):
            load.on_report(registry_pb2.WorkerLoad(running_requests=running, streams=streams, total_blocks=9))
        assert load.other_requests == others, "prompts that are decoded elsewhere do not count"
        one.computed = True
        load.grow_flight(one, 1, True)


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
def test_a_load_counts_what_it_holds(steps: list[tuple[str, int]]) -> None:
    (load,) = decode_capacity(slots=64).workers.values()
    held: list[Entry] = []
    for what, pick in steps:
        if what == "t":
            held.append(entry(10 + pick, 20))
            load.add_flight(held[-1])
        elif held and what in "sg":
            one = held[pick % len(held)]
            first, one.computed = not one.computed, True
            one.sent += 2
            load.grow_flight(one, 2, first)
        elif held:
            load.remove_flight(held.pop(pick % len(held)))
        assert load.context_tokens == sum(one.context_tokens for one in held)
        assert load.computed_context == sum(one.context_tokens for one in held if one.computed)
        assert load.computed == sum(one.computed for one in held)
        assert load.expected == pytest.approx(sum(one.expected_output for one in held))


def full_but_for(places: int) -> DecodeCapacity:
    """A worker whose pace allows 20 streams, without so many."""
    capacity = decode_capacity(slots=64, tpot_slo_s=0.025, step_fit=fit())
    assert all(put(capacity, entry(16, due_s=1.0)) for _ in range(20 - places))
    return capacity


def test_a_late_request_leaves_room_to_those_that_can_be_in_time() -> None:
    late = entry(16, due_s=0.05)
    capacity = full_but_for(1)
    assert capacity.fit(late, 0.1, 0.0) == NoDecodeCapacity(smaller_may_fit=False, held_by_late=True)
    assert put(capacity, entry(16, due_s=0.2))
    for one in (late, entry(16, due_s=0.2)):
        assert capacity.fit(one, 0.1, 0.0) == NoDecodeCapacity(smaller_may_fit=False), "nobody has room"
    assert put(full_but_for(2), late)
    assert put(full_but_for(1), entry(16)), "without a target nobody is late"


def test_a_late_request_that_has_waited_long_takes_any_room() -> None:
    capacity = full_but_for(1)
    late = entry(16, due_s=1.0)
    assert not isinstance(capacity.fit(late, 0.1, LATE_PATIENCE_S - 0.1), DecodeLoad)
    assert isinstance(capacity.fit(late, 0.1, LATE_PATIENCE_S), DecodeLoad)


def test_a_late_request_whose_kv_does_not_fit_lets_smaller_ones_pass() -> None:
    capacity = decode_capacity(total_blocks=100)
    assert put(capacity, entry(1000, 2))
    late = entry(1000, 2, due_s=0.0)
    assert capacity.fit(late, 0.1, 0.5) == NoDecodeCapacity(smaller_may_fit=True)


def test_places_become_free_as_answers_end() -> None:
    capacity = decode_capacity(2, slots=64)
    assert capacity.place_s == 0.0
    assert all(put(capacity, entry(16, 40)) for _ in range(20))
    # Each of two workers has ten answers of 40 steps of 10 ms.
    assert capacity.place_s == pytest.approx(0.4 / 20)
    assert decode_capacity(decode_step_ms=0).place_s == 0.0


def test_what_lent_cores_bring_makes_room() -> None:
    places = [
        sum(
            put(decode, entry(16))
            for decode in [decode_capacity(slots=64, tpot_slo_s=0.01, step_fit=fit(), decode_speedup=speedup)]
            for _ in range(20)
        )
        for speedup in (0, 1, 1.5)
    ]
    assert places == [5, 5, 10]
