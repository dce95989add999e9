"""The bounded queue: which requests are refused when it is full, and the predicted work ahead."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission.queue import AdmissionQueue
from coordinator.request.state import Entry
from tests.support.clients.admission_parts import entry


def filled(queue: AdmissionQueue, *entries: Entry) -> list[Entry]:
    for number, one in enumerate(entries, start=1):
        one.number = number
        queue.add(one)
    return list(entries)


def test_a_full_queue_refuses_the_newcomer() -> None:
    queue = AdmissionQueue(2, 10**6)
    filled(queue, entry(), entry())
    assert queue.make_room(entry()) is None
    assert len(queue) == 2


def test_a_higher_class_takes_the_place_of_the_last_of_the_lowest() -> None:
    queue = AdmissionQueue(3, 10**6)
    _, _, last = filled(
        queue, entry(priority_class="standard"), entry(priority_class="batch"), entry(priority_class="batch")
    )
    assert queue.make_room(entry(priority_class="interactive")) == [last]
    assert queue.lengths() == {"interactive": 0, "standard": 1, "batch": 1}


def test_a_lower_class_takes_nobodys_place() -> None:
    queue = AdmissionQueue(1, 10**6)
    filled(queue, entry(priority_class="interactive"))
    assert queue.make_room(entry(priority_class="batch")) is None


def test_the_bound_on_tokens_evicts_as_many_as_needed() -> None:
    queue = AdmissionQueue(100, 1000)
    entries = filled(queue, *(entry(250, priority_class="batch") for _ in range(4)))
    evicted = queue.make_room(entry(600, priority_class="interactive"))
    assert evicted == entries[:0:-1]
    assert queue.prompt_tokens == 250


def test_nobody_is_evicted_in_vain() -> None:
    queue = AdmissionQueue(100, 1000)
    filled(queue, entry(900, priority_class="interactive"), entry(50, priority_class="batch"))
    assert queue.make_room(entry(600, priority_class="standard")) is None
    assert queue.prompt_tokens == 950


def test_the_tenant_holding_most_of_the_queue_yields_to_one_holding_little() -> None:
    queue = AdmissionQueue(10, 10**6)
    entries = filled(queue, *(entry(tenant="flood") for _ in range(10)))
    assert queue.make_room(entry(tenant="small")) == [entries[-1]]
    assert queue.make_room(entry(tenant="small")) == []


def test_a_prompt_beyond_the_bound_waits_alone() -> None:
    queue = AdmissionQueue(10, 100)
    assert queue.make_room(entry(5000)) == []


def test_another_tenants_backlog_counts_only_as_far_as_it_is_served_first() -> None:
    queue = AdmissionQueue(1000, 10**9)
    filled(queue, *(entry(tenant="flood") for _ in range(100)))
    assert queue.ahead_of(entry(tenant="flood")).requests == pytest.approx(100)
    assert queue.ahead_of(entry(tenant="small")).requests == pytest.approx(1)
    assert queue.ahead_of(entry(tenant="heavy", weight=4.0)).requests == pytest.approx(0.25)
    assert queue.ahead_of(entry(tenant="flood", priority=1)).requests == pytest.approx(0)
    urgent = queue.ahead_of(entry(tenant="chat", priority_class="interactive"))
    assert urgent.requests == pytest.approx(0.25)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["interactive", "standard", "batch"]),
            st.integers(-2, 2),
            st.integers(1, 400),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_bounds_hold_and_nothing_is_lost(steps: list[tuple[str, str, int, int, bool]]) -> None:
    queue = AdmissionQueue(8, 1500)
    inside: set[Entry] = set()
    for number, (tenant, name, priority, prompt, take) in enumerate(steps, start=1):
        one = entry(prompt, tenant=tenant, priority_class=name, priority=priority, number=number, weight=1.0)
        evicted = queue.make_room(one)
        if evicted is not None:
            queue.add(one)
            inside = (inside | {one}) - set(evicted)
        if take and inside:
            first = next(queue.offers())
            queue.remove(first)
            inside.remove(first)
        assert set(queue.offers()) == inside
        assert len(queue) == len(inside) <= 8
        assert queue.prompt_tokens == sum(e.prompt_tokens for e in inside) <= 1500
        assert queue.uncached_tokens == pytest.approx(sum(e.uncached_tokens for e in inside))
