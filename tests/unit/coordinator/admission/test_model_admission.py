"""Admission to one model: which requests start, wait or are refused, and their retry hints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission.model_admission import MAX_BYPASSES, MOST_RETRY_S, ModelAdmission, retry_after_s
from coordinator.request.state import Entry
from coordinator.workers.load import WorkerLoads
from coordinator.workers.snapshot import CircuitStatus, PoolSnapshot
from splitserve.config.coordinator import AdmissionConfig, LocalPrefill
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import (
    MODEL,
    admission,
    decoded,
    ended,
    entry,
    finish,
    sent,
    worker,
)


def small(slots: int = 2, **settings: object) -> ModelAdmission:
    return admission((worker("p0", "prefill"), worker("d0", "decode", slots)), **settings)


def refused_after(seconds: float) -> dict[str, float]:
    """Of a request that comes at 0."""
    return {"due_s": seconds, "ttft_slo_s": seconds}


def test_an_idle_cluster_starts_at_once_and_a_freed_slot_starts_the_next() -> None:
    model = small()
    first, second, third = (entry() for _ in range(3))
    assert model.arrive(first, 0.0).started
    assert model.arrive(second, 0.0).started
    arrival = model.arrive(third, 0.0)
    assert (arrival.started, arrival.refused) == (False, None)
    assert model.release(1.0).started == ()
    sent(model, first, 1)
    decoded(model, first)
    assert model.release(1.5).started == (third,)
    assert third.marks == pytest.approx((0.0, 1.5))  # it waited for decode


def test_waits_are_attributed_to_prefill_or_decode() -> None:
    model = admission(prefill_horizon_s=0.1)
    first, second = entry(2000), entry(2000)
    assert model.arrive(first, 0.0).started
    assert not model.arrive(second, 0.0).started
    assert model.held_by == "prefill"
    sent(model, first, 1)
    assert model.release(0.5).started == (second,)
    assert second.marks == pytest.approx((0.5, 0.0))


def test_leaving_the_queue_frees_the_place_at_once() -> None:
    model = small(slots=1, max_queued_requests=1)
    running, waiting = entry(), entry()
    model.arrive(running, 0.0)
    model.arrive(waiting, 0.0)
    assert model.arrive(entry(), 0.0).refused is not None
    ended(model, waiting)
    ended(model, waiting)  # idempotent
    assert not model.arrive(entry(), 0.0).started
    assert len(model.queue) == 1


def test_a_request_that_would_start_after_its_deadline_is_refused_when_it_comes() -> None:
    model = small(slots=1)
    model.arrive(entry(output=1000), 0.0)
    for _ in range(5):
        model.arrive(entry(output=1000), 0.0)
    refused = model.arrive(entry(deadline_s=5.0), 0.0).refused
    assert refused is not None
    assert refused.reason == "WOULD_MISS_DEADLINE"
    assert refused.retry_after_s > 1


def test_a_request_that_would_miss_the_ttft_target_is_refused_and_batch_is_not() -> None:
    model = small(slots=100, prefill_horizon_s=0.1)
    arrivals = [
        model.arrive(entry(1000, 2, **refused_after(0.5)), 0.0) for _ in range(20)
    ]  # 0.1 s of prefill each
    assert arrivals[0].started
    reasons = [a.refused.reason for a in arrivals if a.refused]
    assert reasons == ["WOULD_MISS_SLO"] * len(reasons)
    assert 12 <= len(reasons) <= 16
    assert model.arrive(entry(1000, 2, priority_class="batch"), 0.0).refused is None
    interactive = entry(1000, 2, priority_class="interactive", **refused_after(0.5))
    assert model.arrive(interactive, 0.0).refused is None


def test_each_request_is_refused_by_its_own_target_and_served_late_where_that_is_allowed() -> None:
    model = small(slots=100, prefill_horizon_s=0.1)
    while model.arrive(entry(1000, 2, **refused_after(0.5)), 0.0).refused is None:
        pass
    assert model.arrive(entry(1000, 2, **refused_after(60.0)), 0.0).refused is None
    # More urgent ones go first, as long as they can be in time.
    urgent = [model.arrive(entry(1000, 2, **refused_after(0.4)), 0.0).refused for _ in range(8)]
    assert [refusal is None for refusal in urgent[:2]] == [True, True]
    assert urgent[-1] is not None
    assert model.arrive(entry(1000, 2, due_s=0.4), 0.0).refused is None


def test_an_answer_that_has_begun_goes_before_its_tenants_others_and_no_forecast_refuses_it() -> None:
    model = small(slots=1)
    running = entry()
    model.arrive(running, 0.0)
    urgent = entry(output=2, priority=100, priority_class="batch")
    assert model.arrive(urgent, 0.0).refused is None
    assert model.arrive(entry(1000, 1000, **refused_after(0.5)), 0.0).refused is not None
    resumed = entry(1000, 1000, priority=-100, priority_class="batch", resumed=True, deadline_s=1.0)
    other = entry(priority_class="batch", tenant="b", weight=1e6)
    assert model.arrive(other, 0.0).refused is None
    arrival = model.arrive(resumed, 0.0)
    assert (arrival.started, arrival.refused) == (False, None)
    served = []
    for _ in range(3):
        finish(model, running)
        (running,) = model.release(0.5).started
        served.append(running)
    assert served.index(resumed) < served.index(urgent)


def test_a_full_queue_takes_an_answer_that_has_begun_for_its_tenants_last() -> None:
    model = small(slots=1, max_queued_requests=1)
    model.arrive(entry(), 0.0)
    model.arrive(entry(), 0.0)
    resumed = entry(resumed=True)
    arrival = model.arrive(resumed, 0.0)
    assert (arrival.refused, len(arrival.evicted)) == (None, 1)
    assert model.arrive(entry(priority=100), 0.0).refused is not None


def test_nothing_is_refused_on_rates_that_nobody_measured() -> None:
    workers = (worker("p0", "prefill", tokens_per_s=0), worker("d0", "decode", step_ms=0))
    model = admission(workers)
    late = refused_after(0.1)
    assert all(model.arrive(entry(10_000, **late), 0.0).refused is None for _ in range(50))


def test_a_full_batch_is_predicted_too() -> None:
    latency = registry_pb2.LatencyModel(decode=registry_pb2.DecodeLatency(base_ms=10, sequence_ms=1))
    workers = (worker("p0", "prefill"), worker("d0", "decode", latency=latency))
    # Ten at a time keep the pace; they end after 1 s.
    model = admission(workers, tpot_slo_s=0.02)
    arrivals = [model.arrive(entry(20, 50, **refused_after(1.5)), 0.0) for _ in range(30)]
    assert sum(arrival.started for arrival in arrivals) == 10
    refused = [arrival.refused.reason for arrival in arrivals if arrival.refused]
    assert refused == ["WOULD_MISS_SLO"] * len(refused)
    assert 6 <= len(refused) <= 12


def test_a_request_predicted_to_exceed_its_queue_time_is_not_queued() -> None:
    latency = registry_pb2.LatencyModel(decode=registry_pb2.DecodeLatency(base_ms=10, sequence_ms=1))
    workers = (worker("p0", "prefill"), worker("d0", "decode", latency=latency))
    # Ten at a time keep the pace and end after 1 s; in the queue one may stay for 1.08 s.
    model = admission(workers, tpot_slo_s=0.02, prefill_horizon_s=0.4)
    arrivals = [model.arrive(entry(20, 50, **refused_after(1.5)), 0.0) for _ in range(30)]
    assert sum(arrival.started for arrival in arrivals) == 10
    refused = [arrival.refused for arrival in arrivals if arrival.refused]
    assert len(refused) == 20
    assert "leave the queue in" in refused[0].message
    assert model.next_release_s() == float("inf")


def test_a_prompt_longer_than_the_target_is_served_when_there_is_capacity() -> None:
    assert admission().arrive(entry(30_000, 2, **refused_after(0.5)), 0.0).started


def test_a_request_that_waits_too_long_is_refused_on_time() -> None:
    model = small(slots=1, max_queue_s=2.0)
    model.arrive(entry(), 0.0)
    waiting = entry()
    model.arrive(waiting, 0.0)
    assert model.next_release_s() == 2.0
    assert model.release(1.9).refused == ()
    (refused,) = model.release(2.0).refused
    assert (refused.entry, refused.reason) == (waiting, "WAITED_TOO_LONG")
    assert model.next_release_s() == float("inf")
    assert len(model.queue) == 0


def test_short_prompts_pass_long_ones_that_wait_for_each_other() -> None:
    model = admission(prefill_horizon_s=0.1)
    longs = [entry(30_000, 2) for _ in range(4)]
    assert [model.arrive(one, 0.0).started for one in longs] == [True, False, False, False]
    for _ in range(3 * MAX_BYPASSES):
        short = entry(100, 2)
        model.arrive(short, 0.0)
        assert model.release(0.0).started == (short,)
        finish(model, short)
    finish(model, longs[0])
    assert model.release(3.0).started[0] is longs[1]


def two_pools(local_prefill: LocalPrefill, **decoding: object) -> ModelAdmission:
    """Ten thousand tokens a second on either worker, and a horizon of a tenth of that."""
    workers = worker("p0", "prefill"), worker("d0", "decode", **decoding)
    settings = AdmissionConfig(prefill_horizon_s=0.1)
    model = ModelAdmission(settings, WorkerLoads.of(workers), local_prefill)
    model.set_workers(PoolSnapshot(workers), MODEL.name)
    return model


def test_what_a_decode_worker_computes_sooner_does_not_wait_for_the_prefill_pool() -> None:
    waiting = two_pools("never")
    assert [waiting.arrive(entry(500), 0.0).started for _ in range(3)] == [True, True, False]
    model = two_pools("auto")
    assert [model.arrive(entry(500), 0.0).started for _ in range(2)] == [True, True]
    model.loads.on_report(("p0", 1), worker("p0", "prefill", waiting_tokens=1000).load)
    started = [model.arrive(entry(100), 0.0).started for _ in range(12)]
    assert started == [True] * 10 + [False] * 2, "the eleventh is sooner by way of the prefill worker"
    assert model.held_by == "prefill"
    (decode,) = model.decode.workers.values()
    assert decode.waiting_prompt_tokens == 1000
    assert len(decode.flights) == 12


def test_a_prompt_that_would_hold_up_streams_waits_for_the_prefill_pool() -> None:
    model = two_pools("auto")
    assert [model.arrive(entry(500), 0.0).started for _ in range(2)] == [True, True]
    model.loads.on_report(("p0", 1), worker("p0", "prefill", waiting_tokens=1000).load)
    assert not model.arrive(entry(300), 0.0).started, "no target says that the streams may wait for it"


def test_where_decode_workers_compute_all_prompts_the_prefill_pool_bounds_none() -> None:
    model = two_pools("always")
    assert all(model.arrive(entry(1000), 0.0).started for _ in range(3))
    (decode,), (prefill,) = model.decode.workers.values(), model.prefill.workers.values()
    assert (decode.waiting_prompt_tokens, prefill.requests) == (3000, 0)


def test_bypasses_of_a_prompt_that_does_not_fit_are_bounded() -> None:
    model = admission((worker("p0", "prefill"), worker("d0", "decode", 200, total_blocks=101)))
    holder = entry(800, 2)  # 51 blocks
    model.arrive(holder, 0.0)
    large = entry(1000, 2)
    model.arrive(large, 0.0)
    for _ in range(MAX_BYPASSES):
        one = entry(16, 2)
        model.arrive(one, 0.0)
        assert model.release(0.0).started == (one,)
        finish(model, one)
    model.arrive(entry(16, 2), 0.0)
    assert model.release(0.0).started == ()
    finish(model, holder)
    assert model.release(1.0).started[0] is large


def test_without_workers_requests_start_and_the_flow_reports_why() -> None:
    model = admission(())
    assert model.arrive(entry(), 0.0).started
    assert admission((worker("p0", "prefill"),)).arrive(entry(output=1), 0.0).started


def test_a_new_worker_releases_the_queue() -> None:
    prefill, decode = worker("p0", "prefill"), worker("d0", "decode", 1)
    loads = WorkerLoads.of((prefill, decode))
    model = admission((prefill, decode), loads)
    model.arrive(entry(), 0.0)
    waiting = entry()
    model.arrive(waiting, 0.0)
    later = worker("d1", "decode", 1)
    loads.take_role(later)
    model.set_workers(PoolSnapshot((prefill, decode, later)), MODEL.name)
    assert model.release(0.1).started == (waiting,)
    assert waiting.decode == ("d1", 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("aaasdex"), st.integers(0, 7), st.integers(1, 400)), max_size=80),
    st.integers(1, 4),
)
def test_nothing_is_lost_or_counted_twice(steps: list[tuple[str, int, int]], slots: int) -> None:
    model = small(slots=slots, max_queued_requests=5, prefill_horizon_s=0.02)
    live: list[Entry] = []
    now = 0.0
    for what, pick, size in steps:
        now += 0.01
        if what == "a":
            one = entry(size, 1 + size % 60, tenant="abc"[pick % 3])
            arrival = model.arrive(one, now)
            live = [e for e in live if e not in {r.entry for r in arrival.evicted}]
            if arrival.refused is None:
                live.append(one)
        elif live:
            one = live[pick % len(live)]
            if what == "s" and one.started:
                sent(model, one, 1)
            elif what == "d" and one.started:
                decoded(model, one)
            elif what in "ex":
                ended(model, one)
                live.remove(one)
        model.release(now)
        queued = [e for e in live if not e.started]
        assert set(model.queue.offers()) == set(queued)
        (prefill,), (decode,) = model.prefill.workers.values(), model.decode.workers.values()
        assert prefill.requests == sum(e.started and not e.computed for e in live)
        assert set(decode.flights) == {e for e in live if e.decode is not None}
        assert len(decode.flights) <= slots
        # Work conserving: a request waits only because a pool lacks capacity for it.
        if queued:
            assert len(decode.flights) == slots or prefill.requests
    for one in live:
        ended(model, one)
    assert len(model.queue) == 0
    assert all(not load.requests for load in model.prefill.workers.values())
    assert all(not load.requests for load in model.decode.workers.values())


def test_retry_hints_are_bounded_spread_and_the_same_each_time() -> None:
    hints = [retry_after_s(f"request-{n}", 5.0, 1.0) for n in range(200)]
    assert hints == [retry_after_s(f"request-{n}", 5.0, 1.0) for n in range(200)]
    assert 3.0 <= min(hints) < 3.2 < 4.8 < max(hints) <= 5.0
    assert retry_after_s("x", 1e9, 0.0) == MOST_RETRY_S
    assert 0.1 <= retry_after_s("x", 0.0, 5.0) <= 0.2


def at_zero(**settings: Any) -> ModelAdmission:
    """A model without workers, which are started on demand."""
    made = ModelAdmission(AdmissionConfig(**settings), WorkerLoads())
    made.set_workers(PoolSnapshot(), MODEL.name, on_demand=True)
    return made


def test_without_workers_requests_wait_for_the_first_ones_and_start_in_order() -> None:
    model = at_zero(max_queue_s=10.0)
    first, second = entry(), entry()
    for one in (first, second):
        arrival = model.arrive(one, 0.0)
        assert (arrival.started, arrival.refused) == (False, None)
    assert model.held_by == "workers"
    assert model.next_release_s() == float("inf")
    assert model.release(1000.0).started == model.release(1000.0).refused == (), "only its deadline bounds it"
    workers = (worker("p0", "prefill"), worker("d0", "decode"))
    model.loads = WorkerLoads.of(workers)
    model.set_workers(PoolSnapshot(workers), MODEL.name, on_demand=True)
    assert model.release(1000.0).started == (first, second)
    assert first.marks == second.marks == (0.0, 0.0), "it waited for no capacity"


def test_one_pool_alone_serves_nothing() -> None:
    model = at_zero()
    model.loads = WorkerLoads.of(workers := (worker("p0", "prefill"),))
    model.set_workers(PoolSnapshot(workers), MODEL.name, on_demand=True)
    assert not model.arrive(entry(), 0.0).started
    assert model.held_by == "workers"
    assert model.arrive(entry(output=1), 0.0).refused is None


def test_the_queue_is_bounded_without_workers_too_and_a_client_that_leaves_frees_its_place() -> None:
    model = at_zero(max_queued_requests=1)
    waiting = entry()
    model.arrive(waiting, 0.0)
    refused = model.arrive(entry(), 0.0).refused
    assert refused is not None
    assert refused.reason == "QUEUE_FULL"
    ended(model, waiting)
    assert model.queue.requests == 0
    assert model.arrive(entry(), 0.0).refused is None


def test_where_nobody_starts_workers_requests_go_on_and_are_told_that_there_are_none() -> None:
    model = at_zero()
    waiting = entry()
    model.arrive(waiting, 0.0)
    model.set_workers(PoolSnapshot(), MODEL.name)
    assert model.release(1.0).started == (waiting,)
    assert model.arrive(entry(), 1.0).started


def test_workers_that_a_breaker_has_put_aside_are_there() -> None:
    tripped = replace(worker("p0", "prefill"), circuit=CircuitStatus("open", tripped=True))
    snapshot = PoolSnapshot((tripped, worker("d0", "decode")))
    assert not snapshot.accepting(MODEL.name, "prefill")
    assert not snapshot.lacks_workers(MODEL.name)
    for away in ({"draining": True}, {"in_rotation": False}, {"joined": False}):
        assert PoolSnapshot((replace(tripped, **away), worker("d0", "decode"))).lacks_workers(MODEL.name)
    both = replace(worker("n0", "decode"), role="both")
    assert not PoolSnapshot((both,)).lacks_workers(MODEL.name)
