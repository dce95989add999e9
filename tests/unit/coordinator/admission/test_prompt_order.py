"""The queue in order of triage: late prompts give way and are served, the oldest never starves, tenants keep shares."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission.decode_capacity import LATE_PATIENCE_S
from coordinator.admission.entry import Entry
from coordinator.admission.model_admission import ModelAdmission
from coordinator.admission.prefill_capacity import PrefillPace
from coordinator.admission.prompt_order import RENEWED_S, TRIAGED, PromptOrder
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import admission, entry, worker

RATE = 10_000.0
TARGET_S = 1.0


def due(prompt: int, now: float = 0.0, target_s: float = TARGET_S, **changes: Any) -> Entry:
    return entry(prompt, 1, arrived_s=now, due_s=now + target_s, **changes)


def one_worker(orders: bool = False, **changes: Any) -> ModelAdmission:
    """`orders`: it serves prompts that cannot be in time last."""
    workers = (replace(worker("p0", "prefill"), paces_prompts=orders),)
    return admission(workers, prefill_horizon_s=0.1, **changes)


def busy(model: ModelAdmission, **changes: Any) -> Entry:
    """A prompt that the worker computes for 0.1 s."""
    running = entry(1000, 1, **changes)
    assert model.arrive(running, 0.0).started
    return running


def served(model: ModelAdmission, *running: Entry) -> Iterator[Entry]:
    """What the only worker computes next, prompt by prompt, as it is sent: the order of the queue."""
    now, sent = 0.0, list(running)
    while sent:
        one = sent.pop(0)
        now += one.uncached_tokens / RATE
        model.sent(one, 1, now)
        model.ended(one)
        if one not in running:
            yield one
        sent += model.release(now).started


def test_one_long_prompt_that_would_be_late_makes_no_short_one_late() -> None:
    model = one_worker()
    running = busy(model)
    long = due(9500)
    shorts = [due(500) for _ in range(10)]
    for one in (long, *shorts):
        assert model.arrive(one, 0.0).refused is None
    assert list(served(model, running)) == [*shorts, long]


def test_who_is_due_first_is_served_first_and_a_stream_that_goes_on_before() -> None:
    model = one_worker()
    running = busy(model)
    late, soon, urgent = due(600, target_s=9.0), due(600, target_s=2.0), due(600, target_s=9.0, priority=5)
    goes_on = entry(600, 1, resumed=True)
    for one in (late, soon, urgent, goes_on):
        model.arrive(one, 0.0)
    assert list(served(model, running)) == [goes_on, urgent, soon, late]


def test_without_targets_or_measured_rates_it_is_first_come_first_served() -> None:
    for workers, target_s in (
        (None, float("inf")),
        (worker("p0", "prefill", prefill_tokens_per_second=0), 1.0),
    ):
        model = one_worker() if workers is None else admission((workers,), prefill_horizon_s=0.1)
        model.arrive(entry(5000, 1), 0.0)
        waiting = [due(size, target_s=target_s) for size in (900, 300, 600)]
        for one in waiting:
            model.arrive(one, 0.0)
        assert list(model.queue.offers(model.prefill.pace(0.0))) == waiting


def test_where_answers_wait_for_places_short_prompts_are_not_the_only_cheap_ones() -> None:
    """By prompts alone all three end in time; there are two places within the target."""
    long, *shorts = answers = [
        replaced(due(size, number=number), True) for number, size in enumerate((2000, 500, 400))
    ]
    pace = PrefillPace(0.0, 0.0, 1e-4, 1e-4)
    assert list(PromptOrder().of(answers, pace)) == answers
    assert list(PromptOrder().of(answers, replace(pace, place_s=0.3))) == [*shorts, long]
    without_answers = [replaced(each, False) for each in answers]
    assert list(PromptOrder().of(without_answers, replace(pace, place_s=0.3))) == without_answers


def one_place_left(orders: bool = True, **changes: Any) -> tuple[ModelAdmission, list[Entry]]:
    """Nine of ten places of a decode worker are taken, by answers that have begun."""
    step = registry_pb2.DecodeStepFit(base_ms=5, sequence_ms=1)
    workers = (
        replace(worker("p0", "prefill"), paces_prompts=orders),
        worker("d0", "decode", step_fit=step),
    )
    model = admission(workers, prefill_horizon_s=10.0, tpot_slo_s=0.015)
    running = [entry(16, **changes) for _ in range(9)]
    assert all(model.arrive(each, 0.0).started for each in running)
    for each in running:
        model.sent(each, 1, 0.1)
    return model, running


def late_one(now: float, prompt: int = 16, **changes: Any) -> Entry:
    return entry(prompt, arrived_s=now, due_s=now - 0.1, **changes)


@pytest.mark.parametrize("orders", [True, False])
def test_a_late_one_that_leaves_its_place_to_others_holds_up_none_of_them(orders: bool) -> None:
    model, running = one_place_left(orders)
    late, soon = late_one(0.2), entry(16, arrived_s=0.2, due_s=1.2)
    assert not model.arrive(late, 0.2).started
    assert model.arrive(soon, 0.2).started
    assert not model.release(0.3).started
    model.ended(running[0])
    assert not model.release(0.4).started
    model.ended(running[1])
    assert model.release(0.5).started == (late,)


@pytest.mark.parametrize("orders", [True, False])
def test_a_late_one_that_has_waited_long_takes_the_place_though_younger_ones_stand_before_it(
    orders: bool,
) -> None:
    model, _ = one_place_left(orders)
    old = late_one(0.2, prompt=64)
    assert not model.arrive(old, 0.2).started
    assert model.next_release_s(0.2) <= 0.2 + LATE_PATIENCE_S
    assert not model.arrive(late_one(9.9), 9.9).started
    assert not model.release(10.0).started
    assert model.release(10.3).started == (old,)


def test_what_is_due_at_no_time_does_not_overtake_late_ones() -> None:
    model, _ = one_place_left()
    assert not model.arrive(late_one(0.2, priority_class="interactive"), 0.2).started
    assert not model.arrive(entry(16, arrived_s=0.3, priority_class="batch"), 0.3).started
    assert model.arrive(entry(16, arrived_s=0.4, due_s=2.0), 0.4).started


@pytest.mark.parametrize("orders", [True, False])
def test_many_late_ones_that_leave_their_places_are_not_all_tried(
    orders: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = one_place_left(orders)
    late = [late_one(0.2) for _ in range(200)]
    assert not any(model.arrive(each, 0.2).started for each in late)
    tried: list[Entry] = []
    fit = model.decode.fit
    monkeypatch.setattr(
        model.decode, "fit", lambda one, *args, **named: (tried.append(one), fit(one, *args, **named))[1]
    )
    assert not model.release(0.3).started
    assert len(tried) == 1


def replaced(one: Entry, needs_decode: bool) -> Entry:
    return replace(one, needs_decode=needs_decode)


def test_late_ones_keep_no_place_among_those_that_can_be_in_time() -> None:
    order, pace = PromptOrder(), PrefillPace(100.0, 0.0, 1e-4, 1e-4)
    lost = [due(2000 - number, now=0.0, number=number + 1) for number in range(3 * TRIAGED)]
    fresh = [due(50, now=100.0, number=1000 + number) for number in range(50)]
    found = list(order.of([*lost, *fresh], pace))
    assert found[:50] == fresh
    by_size = found[50:]
    assert by_size[:TRIAGED] == lost[: -TRIAGED - 1 : -1]
    assert by_size[-1] is lost[0], "the oldest is known, whatever its size"


def test_a_newcomer_that_makes_nobody_late_is_forecast_at_its_own_place() -> None:
    model = one_worker()
    busy(model)
    for _ in range(20):
        model.arrive(due(1000, target_s=60.0), 0.0)
    soon = due(1000, target_s=1.0, ttft_slo_s=1.0)
    assert model.arrive(soon, 0.0).refused is None
    assert soon.predicted_ttft_s == pytest.approx(0.2)


def test_nobody_is_refused_for_being_late_unless_that_is_asked_for() -> None:
    model = one_worker()
    running = busy(model)
    assert all(model.arrive(due(1000), 0.0).refused is None for _ in range(100))
    refused = [model.arrive(due(1000, ttft_slo_s=TARGET_S), 0.0).refused for _ in range(3)]
    assert [one.reason for one in refused if one] == ["WOULD_MISS_SLO"] * 3
    assert len(list(served(model, running))) == 100


def test_late_ones_that_wait_teach_the_forecasts_of_late_ones_only() -> None:
    model = one_worker()
    busy(model)

    def forecasts(now: float) -> tuple[float, float]:
        """Of a prompt that can be in time and of one that cannot, in seconds."""
        found = []
        for target_s in (60.0, 0.05):
            one = due(1000, now, target_s)
            model.arrive(one, now)
            found.append(one.predicted_ttft_s * model._biases[one.late].value)
            model.ended(one)
        return found[0], found[1]

    in_time, late = forecasts(0.0)
    waiting = [due(1000, target_s=0.05) for _ in range(20)]
    for one in waiting:
        model.arrive(one, 0.0)
    assert all(one.late for one in waiting)
    model.prefill.horizon_s = 0.0  # nothing leaves the queue
    model.release(50.0)
    for one in waiting:
        model.ended(one)
    assert forecasts(50.0)[0] == pytest.approx(in_time)
    assert forecasts(50.0)[1] > 1.5 * late


def test_tenants_keep_their_shares_whatever_their_targets() -> None:
    model = one_worker()
    running = busy(model, tenant="c")
    for _ in range(20):
        model.arrive(due(500, tenant="a", target_s=0.1), 0.0)
        model.arrive(due(500, tenant="b", target_s=60.0), 0.0)
    order = [one.tenant for one in served(model, running)]
    assert all(abs(order[:count].count("a") - order[:count].count("b")) <= 2 for count in range(len(order)))


@settings(max_examples=8, deadline=None)
@given(
    long=st.integers(2_000, 6_000),
    shorts=st.lists(st.integers(200, 900), min_size=3, max_size=12),
    load=st.floats(1.2, 2.0),
    orders=st.booleans(),
)
def test_a_long_prompt_never_starves(long: int, shorts: list[int], load: float, orders: bool) -> None:
    """Short prompts that come faster than they are computed, for ever: in virtual time."""
    limits = {"max_queue_s": 86_400.0, "max_queued_requests": 10**6, "max_queued_prompt_tokens": 10**12}
    model = one_worker(orders, **limits)
    running, late = [busy(model)], due(long, target_s=0.1)
    model.arrive(late, 0.0)
    now, next_s, count = 0.0, 0.0, 0
    while not late.started:
        # The worker computes what it was sent, first come, first served.
        one = running.pop(0)
        now += one.uncached_tokens / RATE
        while next_s <= now:
            newcomer = due(shorts[count % len(shorts)], now=next_s)
            if model.arrive(newcomer, next_s).started:
                assert orders, "past those that are late"
                running.append(newcomer)
            next_s += newcomer.uncached_tokens / RATE / load
            count += 1
        model.sent(one, 1, now)
        model.ended(one)
        running += model.release(now).started
        assert now <= 11 * long / RATE + 2.0, "a tenth of the prompt tokens are the oldest's"


def test_an_order_of_a_full_queue_is_made_rarely_and_quickly() -> None:
    order = PromptOrder()
    waiting = [due(10 + number % 700, now=number * 1e-3, number=number + 1) for number in range(1024)]
    began = time.thread_time()  # not the time that other processes take
    for look in range(100):
        assert next(iter(order.of(waiting, PrefillPace(2.0 + look * RENEWED_S / 10, 0.0, 1e-4, 1e-4)))).waits
    each_s = (time.thread_time() - began) / 100
    assert each_s < 2e-3
