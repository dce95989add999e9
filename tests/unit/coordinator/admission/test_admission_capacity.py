"""Capacity of the workers: prefill by its horizon, decode by its predicted load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission.capacity import DecodeCapacity, NoCapacity, PrefillCapacity, _peak_tokens
from coordinator.request.state import Entry
from coordinator.workers.load import DecodeLoad, PrefillLoad, WorkerLoads
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import entry, worker


def prefill_capacity(count: int = 1, horizon_s: float = 0.1, **changes: object) -> PrefillCapacity:
    capacity = PrefillCapacity(horizon_s)
    capacity.set_workers(
        WorkerLoads.of(worker(f"p{n}", "prefill", **changes) for n in range(count)).prefill.values()
    )
    return capacity


def sent(capacity: PrefillCapacity, one: Entry) -> bool:
    load = capacity.fit(one)
    if not isinstance(load, PrefillLoad):
        return False
    load.add_flight(one)
    return True


def test_a_worker_is_sent_what_it_computes_in_the_horizon() -> None:
    capacity = prefill_capacity()  # 10,000 tokens/s for 0.1 s
    assert [sent(capacity, entry(200)) for _ in range(6)] == [True] * 5 + [False]
    assert capacity.fit(entry(200)) == NoCapacity(smaller_may_fit=False)


def test_an_idle_worker_takes_anything() -> None:
    assert sent(prefill_capacity(), entry(1_000_000))


def test_capacity_returns_when_a_prompt_is_computed() -> None:
    capacity = prefill_capacity()
    entries = [entry(200) for _ in range(6)]
    for one in entries[:5]:
        assert sent(capacity, one)
    assert not sent(capacity, entries[5])
    (load,) = capacity.workers.values()
    load.remove_flight(entries[0])
    load.remove_flight(entries[0])  # idempotent
    assert sent(capacity, entries[5])


def test_long_prompts_go_one_by_one_and_leave_room_for_short_ones() -> None:
    capacity = prefill_capacity()
    first = entry(30_000)  # 3 s of work
    assert sent(capacity, first)
    assert capacity.fit(entry(30_000)) == NoCapacity(smaller_may_fit=True)
    assert [sent(capacity, entry(100)) for _ in range(5)] == [True] * 4 + [False]
    (load,) = capacity.workers.values()
    assert load.backlog_s == pytest.approx(3.04)
    load.remove_flight(first)
    assert sent(capacity, entry(30_000))
    assert not sent(capacity, entry(30_000))


def test_a_prompt_that_admission_sent_to_no_prefill_worker_is_not_its_long_one() -> None:
    capacity = prefill_capacity()
    (load,) = capacity.workers.values()
    # A decode worker was to compute it, and the router sends it here after all.
    load.add_flight(entry(30_000))
    assert sent(capacity, entry(30_000))
    assert not sent(capacity, entry(30_000))


def test_short_prompts_avoid_the_worker_with_the_long_one() -> None:
    capacity = prefill_capacity(2)
    long = entry(30_000)
    assert sent(capacity, long)
    assert all(sent(capacity, entry(100)) for _ in range(10))
    busy = next(load for load in capacity.workers.values() if long in load.flights)
    assert list(busy.flights) == [long]


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
    count: int = 1, slots: int = 8, tpot_slo_s: float | None = None, **changes: object
) -> DecodeCapacity:
    capacity = DecodeCapacity(tpot_slo_s)
    loads = WorkerLoads.of(worker(f"d{n}", "decode", slots, **changes) for n in range(count))
    capacity.set_workers(loads.decode.values())
    return capacity


def put(capacity: DecodeCapacity, one: Entry, prefill_s: float = 0.1) -> bool:
    load = capacity.fit(one, prefill_s)
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
    assert capacity.fit(large, 0.1) == NoCapacity(smaller_may_fit=True)
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


def latency(base: float = 5, sequence: float = 1, context: float = 0) -> registry_pb2.LatencyModel:
    decode = registry_pb2.DecodeLatency(base_ms=base, sequence_ms=sequence, context_token_ms=context)
    return registry_pb2.LatencyModel(decode=decode)


def test_steps_stay_below_the_bound_when_the_prompt_arrives() -> None:
    capacity = decode_capacity(slots=64, tpot_slo_s=0.01, latency=latency())
    assert [put(capacity, entry(16)) for _ in range(7)] == [True] * 5 + [False] * 2
    # A sequence that ends before the prompt is computed already frees capacity.
    (load,) = capacity.workers.values()
    ending = next(iter(load.flights))
    ending.computed, ending.sent = True, 45
    assert not put(capacity, entry(16), prefill_s=0.01)
    assert put(capacity, entry(16), prefill_s=0.1)


def test_one_sequence_alone_is_never_too_slow() -> None:
    assert put(decode_capacity(tpot_slo_s=0.001, latency=latency()), entry(16))


def test_a_target_of_a_tenant_or_request_goes_before_that_of_the_settings() -> None:
    # 5 ms and 1 ms a sequence.
    loose = decode_capacity(slots=64, tpot_slo_s=0.01, latency=latency())
    assert [put(loose, entry(16, tpot_slo_s=0.02)) for _ in range(16)] == [True] * 15 + [False]
    assert not put(loose, entry(16)), "15 more would be too slow for it"
    tight = decode_capacity(slots=64, tpot_slo_s=0.01, latency=latency())
    assert [put(tight, entry(16, tpot_slo_s=0.008)) for _ in range(4)] == [True] * 3 + [False]
    assert not put(tight, entry(16, tpot_slo_s=0.02)), "those that run were promised 8 ms"
    (load,) = tight.workers.values()
    for running in [*load.flights]:
        load.remove_flight(running)
    assert load.targets_s == []
    assert [put(tight, entry(16)) for _ in range(6)] == [True] * 5 + [False]


def test_targets_count_without_any_of_the_settings() -> None:
    capacity = decode_capacity(slots=64, latency=latency())
    assert put(capacity, entry(16, tpot_slo_s=0.008))
    assert [put(capacity, entry(16)) for _ in range(3)] == [True, True, False]


def test_a_target_that_nobody_can_keep_binds_nobody() -> None:
    capacity = decode_capacity(slots=64, tpot_slo_s=0.01, latency=latency())
    assert put(capacity, entry(16, tpot_slo_s=0.004))
    assert [put(capacity, entry(16)) for _ in range(5)] == [True] * 4 + [False]
    assert not put(capacity, entry(16, tpot_slo_s=0.004)), "the settings' bounds it instead"


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
