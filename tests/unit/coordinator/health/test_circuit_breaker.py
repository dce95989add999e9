"""Circuit breakers: when they open and close, which part is at fault, and what they never eject."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.health.circuit_breakers import BreakerKey, CircuitBreaker, circuit_statuses, failed_part
from coordinator.workers.snapshot import CLOSED_CIRCUIT, Model, PoolSnapshot, Worker
from splitserve.config.coordinator import CircuitBreakerConfig
from splitserve.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SplitserveError,
    TransferError,
    UnavailableError,
)
from splitserve.roles import PoolName

POLICY = CircuitBreakerConfig(consecutive_failures=3, window_s=30, open_s=1, max_open_s=8)


def opened(at: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(POLICY)
    for _ in range(POLICY.consecutive_failures):
        breaker.failed(at, at)
    assert breaker.state == "open"
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = CircuitBreaker(POLICY)
    for ok in (False, False, True, False, False):
        (breaker.succeeded if ok else breaker.failed)(0.0, 0.0)
    assert breaker.state == "closed"
    breaker.failed(0.0, 0.0)
    assert breaker.state == "open"
    assert not breaker.admits


def test_one_probe_decides() -> None:
    breaker = opened()
    breaker.tick(0.5)
    assert breaker.state == "open"
    breaker.tick(1.0)
    assert breaker.admits
    breaker.began("first")
    breaker.began("second")
    assert not breaker.admits
    breaker.release("second")
    assert not breaker.admits, "the probe is still out"
    breaker.release("first")
    assert breaker.admits, "a probe that says nothing leaves room for the next"
    breaker.began("third")
    breaker.responded(1.0, 1.1)
    assert breaker.state == "closed"


def test_the_open_time_doubles_to_a_bound_and_resets_after_recovery() -> None:
    breaker, now, rests = opened(), 0.0, []
    for _ in range(5):
        rests.append(breaker.half_open_s - now)
        now = breaker.half_open_s
        breaker.tick(now)
        breaker.began("probe")
        breaker.failed(now, now)
    assert rests == [1, 2, 4, 8, 8]
    now = breaker.half_open_s
    breaker.tick(now)
    breaker.succeeded(now, now)
    for _ in range(3):
        breaker.failed(now, now + 1)
    assert breaker.half_open_s == now + 1 + 8, "it fell back within the window"
    now = breaker.half_open_s
    breaker.tick(now)
    breaker.succeeded(now, now)
    for _ in range(3):
        breaker.failed(now, now + 31)
    assert breaker.half_open_s == now + 31 + 1


def test_requests_from_before_it_opened_do_not_count() -> None:
    breaker = opened(at=5.0)
    until = breaker.half_open_s
    breaker.succeeded(4.0, 5.1)
    breaker.failed(4.0, 5.1)
    assert (breaker.state, breaker.half_open_s) == ("open", until)
    breaker.tick(until)
    breaker.failed(4.0, until)
    assert breaker.state == "half-open"
    breaker.succeeded(until, until)
    for _ in range(10):
        breaker.failed(4.0, until)
    assert breaker.state == "closed"


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (UnavailableError("x", reason="WORKER_LOST"), "worker"),
        (SplitserveError("x", reason="OUTPUT_GAP"), "worker"),
        (TransferError("x"), "pair"),
        (UnavailableError("x", reason="COMPLETION_LOST"), "pair"),
        (UnavailableError("x", reason="CHECKSUM_MISMATCH"), "pair"),
        (FailedPreconditionError("x", reason="UNKNOWN_PEER"), "pair"),
        (UnavailableError("x", reason="DRAINING"), None),
        (InvalidArgumentError("x"), None),
        (ResourceExhaustedError("x"), None),
        (DeadlineExceededError("x"), None),
        (CancelledByPeerError("x"), None),
        (FailedPreconditionError("x", reason="TICKET_EXPIRED"), None),
    ],
)
def test_the_part_at_fault(error: SplitserveError, part: str | None) -> None:
    assert failed_part(error) == part


class Life(RuleBasedStateMachine):
    """Any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(POLICY)
        self.now = 0.0
        self.running: dict[str, tuple[float, bool]] = {}
        self.number = 0

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.breaker.tick(self.now)

    @rule()
    def begin(self) -> None:
        if self.breaker.admits:
            self.number += 1
            name, probe = str(self.number), self.breaker.state == "half-open"
            self.running[name] = self.now, probe
            self.breaker.began(name)
            assert not probe or not self.breaker.admits

    @rule(how=st.sampled_from(["succeeded", "failed", "cancelled"]), data=st.data())
    def end(self, how: str, data: st.DataObject) -> None:
        if not self.running:
            return
        name = data.draw(st.sampled_from(sorted(self.running)))
        began_s, _ = self.running.pop(name)
        if how == "succeeded":
            self.breaker.succeeded(began_s, self.now)
        elif how == "failed":
            self.breaker.failed(began_s, self.now)
        self.breaker.release(name)

    @invariant()
    def it_rests_at_most_so_long(self) -> None:
        if self.breaker.state == "open":
            assert self.breaker.half_open_s <= self.now + POLICY.max_open_s
            assert not self.breaker.admits

    @invariant()
    def it_is_never_stuck(self) -> None:
        if self.breaker.state == "half-open" and not any(probe for _, probe in self.running.values()):
            assert self.breaker.admits


TestLife = Life.TestCase


def worker(pool: PoolName, number: int, reached: frozenset[str] = frozenset(), model: str = "m") -> Worker:
    name = f"{pool}-{model}-{number}"
    return Worker(
        name, 1, pool, "a:1", Model(model, "t", 64, 99), f"agent-{name}", "nixl", 16, 64,
        reported=True, output_open=True, connected_agents=reached,
    )  # fmt: skip


def cluster(prefill: int, decode: int) -> PoolSnapshot:
    decodes = [worker("decode", number) for number in range(decode)]
    agents = frozenset(peer.agent_id for peer in decodes)
    return PoolSnapshot((*decodes, *(worker("prefill", number, agents) for number in range(prefill))))


def applied(snapshot: PoolSnapshot, shut: list[BreakerKey]) -> PoolSnapshot:
    circuits = circuit_statuses(snapshot, {key: opened() for key in shut})
    return PoolSnapshot(
        tuple(replace(w, circuit=circuits.get(w.key, CLOSED_CIRCUIT)) for w in snapshot.workers)
    )


def names(snapshot: PoolSnapshot, pool: PoolName) -> list[str]:
    return [w.worker_id for w in snapshot.accepting("m", pool)]


def test_open_workers_are_ejected_but_never_the_last() -> None:
    snapshot = cluster(2, 2)
    p0, p1 = (w.key for w in snapshot.accepting("m", "prefill"))
    d0, d1 = (w.key for w in snapshot.accepting("m", "decode"))
    one = applied(snapshot, [(p0,)])
    assert (names(one, "prefill"), names(one, "decode")) == ([p1[0]], [d0[0], d1[0]])
    both = applied(snapshot, [(p0,), (p1,), (d0,)])
    assert (names(both, "prefill"), names(both, "decode")) == ([p0[0], p1[0]], [d1[0]])
    assert {w.circuit.state for w in both.workers if w.role == "prefill"} == {"open"}


def test_a_broken_lane_ejects_the_pair_alone() -> None:
    snapshot = cluster(2, 2)
    p0, p1 = snapshot.accepting("m", "prefill")
    d0, d1 = snapshot.accepting("m", "decode")
    cut = applied(snapshot, [(p0.key, d1.key)])
    p0, p1 = cut.accepting("m", "prefill")
    assert [p0.reaches(d0), p0.reaches(d1), p1.reaches(d0), p1.reaches(d1)] == [True, False, True, True]
    assert p0.circuit.state == "closed"
    assert dict(p0.circuit.pairs) == {d1.agent_id: "open"}
    alone = applied(cluster(1, 1), [(p0.key, d0.key)])
    assert alone.ready_models() == {"m"}


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(["p", "d", "pair"]))),
)
def test_what_could_be_served_still_can_be(
    prefill: int, decode: int, shut: list[tuple[int, int, str]]
) -> None:
    snapshot = cluster(prefill, decode)
    prefills, decodes = snapshot.accepting("m", "prefill"), snapshot.accepting("m", "decode")
    places: list[BreakerKey] = []
    for p, d, kind in shut:
        at_p, at_d = prefills[p % prefill].key, decodes[d % decode].key
        places.append({"p": (at_p,), "d": (at_d,), "pair": (at_p, at_d)}[kind])
    assert applied(snapshot, places).ready_models() == {"m"}
