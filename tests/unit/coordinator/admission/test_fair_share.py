"""Fair shares: the bound between two backlogged tenants, weights, idling, work conservation, classes."""

from __future__ import annotations

from collections import defaultdict, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission.queue import CLASS_WEIGHTS, OUTPUT_TOKEN_COST, AdmissionQueue
from coordinator.request.state import Entry
from tests.support.clients.admission_parts import entry

LONGEST_PROMPT, LONGEST_OUTPUT = 500, 60


class Served:
    """Serves a queue on `slots` slots, one output token per step each, and counts the service of each tenant."""

    def __init__(self, slots: int) -> None:
        self.queue = AdmissionQueue(10**6, 10**9)
        self.service: dict[str, float] = defaultdict(float)
        self.by_class: dict[str, float] = defaultdict(float)
        self._slots, self._numbers = slots, 0
        self._running: deque[tuple[Entry, int]] = deque()

    def arrive(self, one: Entry) -> None:
        self._numbers += 1
        one.number = self._numbers
        self.queue.add(one)

    def step(self) -> None:
        while len(self._running) < self._slots and len(self.queue):
            one = next(self.queue.offers())
            self.queue.remove(one)
            self._count(one, one.prompt_tokens)
            self._running.append((one, int(one.expected_output)))
        for _ in range(len(self._running)):
            one, left = self._running.popleft()
            self._count(one, OUTPUT_TOKEN_COST)
            if left > 1:
                self._running.append((one, left - 1))

    @property
    def idle(self) -> bool:
        return len(self._running) < self._slots and not len(self.queue)

    def _count(self, one: Entry, cost: float) -> None:
        self.queue.charge(one, cost)
        self.service[one.tenant] += cost
        self.by_class[one.priority_class] += cost


requests = st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_OUTPUT))


@settings(max_examples=60, deadline=None)
@given(
    first=st.lists(requests, min_size=3, max_size=10),
    second=st.lists(requests, min_size=3, max_size=10),
    slots=st.integers(1, 8),
    weights=st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.5, 1.0, 3.0])),
    steps=st.integers(50, 300),
)
def test_two_that_always_wait_are_served_alike(
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    slots: int,
    weights: tuple[float, float],
    steps: int,
) -> None:
    served = Served(slots)
    # Theorem 4.4 of the VTC paper, in service for its weight.
    most_running = slots * LONGEST_OUTPUT * OUTPUT_TOKEN_COST
    bound = 2 * max(LONGEST_PROMPT, most_running) / min(weights)
    for step in range(steps):
        for name, kinds, weight in (("a", first, weights[0]), ("b", second, weights[1])):
            for extra in range(slots + 1):  # both always have more in the queue
                prompt, output = kinds[(step + extra) % len(kinds)]
                served.arrive(entry(prompt, output, tenant=name, weight=weight))
        served.step()
        assert abs(served.service["a"] / weights[0] - served.service["b"] / weights[1]) <= bound


def test_idling_earns_no_credit() -> None:
    served = Served(2)
    for _ in range(200):
        served.arrive(entry(100, 10, tenant="busy"))
    for _ in range(100):
        served.step()
    before = served.service["busy"]
    for _ in range(200):
        served.arrive(entry(100, 10, tenant="late"))
    for _ in range(100):
        served.step()
    gained = served.service["busy"] - before
    assert served.service["late"] < 1.3 * gained
    assert gained < 1.3 * served.service["late"]


def test_unused_shares_go_to_others() -> None:
    served = Served(4)
    served.arrive(entry(10, 5, tenant="small", weight=100.0))
    for _ in range(50):
        served.arrive(entry(10, 5, tenant="large"))
    steps = 0
    while len(served.queue):
        assert not served.idle
        served.step()
        steps += 1
    assert steps <= 51 * 5 / 4 + 5


@settings(max_examples=25, deadline=None)
@given(slots=st.integers(1, 6), prompt=st.integers(1, 200), output=st.integers(1, 20))
def test_no_class_starves_and_shares_are_kept(slots: int, prompt: int, output: int) -> None:
    served = Served(slots)
    for _ in range(400):
        for name in CLASS_WEIGHTS:
            for _ in range(slots + 1):
                served.arrive(entry(prompt, output, priority_class=name, tenant=name))
        served.step()
    whole = prompt + output * OUTPUT_TOKEN_COST
    bound = 2 * max(prompt, slots * output * OUTPUT_TOKEN_COST) + 2 * whole
    for one, weight in CLASS_WEIGHTS.items():
        for other, other_weight in CLASS_WEIGHTS.items():
            apart = abs(served.by_class[one] / weight - served.by_class[other] / other_weight)
            assert apart <= bound / min(weight, other_weight)
    assert served.by_class["batch"] > 0 or served.by_class["interactive"] < 16 * bound


def test_an_urgent_request_does_not_wait_behind_a_flood() -> None:
    served = Served(1)
    for _ in range(100):
        served.arrive(entry(100, 5, priority_class="batch", tenant="flood"))
    for _ in range(20):
        served.step()
    urgent = entry(10, 2, priority_class="interactive", tenant="chat")
    served.arrive(urgent)
    assert next(served.queue.offers()) is urgent


def test_priority_orders_one_tenants_requests() -> None:
    served = Served(1)
    low, high, equal = (entry(priority=priority) for priority in (0, 5, 5))
    for one in (low, high, equal):
        served.arrive(one)
    assert list(served.queue.offers()) == [high, equal, low]
