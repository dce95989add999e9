"""Deadlines of starting replicas, failed starts and the pauses after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.snapshot import DecodeSignals, PrefillSignals, Replica, ReplicaState, Snapshot
from autoscaler.start_watch import MAX_PAUSE_S, StartWatch
from splitserve.roles import POOLS

READY, STARTING, OVERDUE = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.OVERDUE
POLICY = dict.fromkeys(POOLS, PoolPolicy(cold_start_s=10.0, start_deadline_cold_starts=3.0))


class Pools:
    """Both pools over time. Prefill is watched; one decode replica is ready unless said otherwise."""

    def __init__(self) -> None:
        self.watch = StartWatch()
        self.now = 1000.0
        self.there = {"decode-0": Replica("decode-0", READY, 0.0)}
        self.complete = True
        self.cold_start_s: float | None = None

    def has(self, name: str, state: ReplicaState, registered: bool = False) -> None:
        before = self.there.get(name) or Replica(name, state, self.now, created_wall_s=self.now)
        since_s = before.since_s if before.state is state else self.now
        registered = registered or state is READY
        self.there[name] = replace(before, state=state, since_s=since_s, registered=registered)

    def changes(self, name: str, **fields: Any) -> None:
        self.there[name] = replace(self.there[name], **fields)

    def loses(self, name: str) -> None:
        del self.there[name]

    def after(self, seconds: float) -> dict[str, ReplicaState]:
        """The states that are seen after a while."""
        self.now += seconds
        seen = {
            pool: tuple(replica for name, replica in self.there.items() if name.startswith(pool))
            for pool in ("prefill", "decode")
        }
        prefill = PrefillSignals(seen["prefill"], cold_start_s=self.cold_start_s)
        snapshot = Snapshot(self.now, prefill, DecodeSignals(seen["decode"]), complete=self.complete)
        found = self.watch.look(snapshot, POLICY)
        return {replica.name: replica.state for replica in (*found.prefill.replicas, *found.decode.replicas)}

    @property
    def pause_s(self) -> float:
        return self.watch.pause_s("prefill", self.now)


@pytest.fixture
def pools() -> Pools:
    return Pools()


def test_starting_for_ever_is_overdue_after_its_deadline(pools: Pools) -> None:
    pools.has("prefill-0", STARTING)
    assert pools.after(0)["prefill-0"] is STARTING
    assert pools.after(30)["prefill-0"] is STARTING
    assert pools.after(1)["prefill-0"] is OVERDUE
    assert pools.watch.failed_starts == {"prefill": 1, "decode": 0}
    assert pools.after(1)["prefill-0"] is OVERDUE
    assert pools.watch.failed_starts["prefill"] == 1, "counted once"
    pools.has("prefill-0", READY)
    assert pools.after(1)["prefill-0"] is READY, "late, and welcome all the same"


def test_the_longer_of_measured_and_given_cold_start_counts(pools: Pools) -> None:
    pools.cold_start_s = 100.0
    pools.has("prefill-0", STARTING)
    pools.after(0)
    assert pools.after(299)["prefill-0"] is STARTING
    assert pools.after(2)["prefill-0"] is OVERDUE


def test_a_restart_of_the_coordinator_makes_nothing_overdue(pools: Pools) -> None:
    pools.has("prefill-0", READY)
    pools.after(10_000)
    pools.has("prefill-0", STARTING)
    assert pools.after(5)["prefill-0"] is STARTING
    pools.has("prefill-0", READY)
    assert pools.after(40)["prefill-0"] is READY


def test_time_in_which_it_could_not_become_ready_does_not_count(pools: Pools) -> None:
    pools.has("prefill-0", STARTING, registered=True)
    pools.changes("decode-0", state=STARTING)
    for _ in range(10):
        assert pools.after(20)["prefill-0"] is STARTING, "nobody to connect to"
    pools.changes("decode-0", state=READY)
    pools.complete = False
    for _ in range(10):
        assert pools.after(20)["prefill-0"] is STARTING, "a coordinator does not answer"
    pools.complete = True
    assert pools.after(29)["prefill-0"] is STARTING
    assert pools.after(2)["prefill-0"] is OVERDUE


def test_what_never_registers_is_overdue_whatever_the_other_pool_does(pools: Pools) -> None:
    pools.changes("decode-0", state=STARTING)
    pools.has("prefill-0", STARTING)
    pools.after(0)
    assert pools.after(31)["prefill-0"] is OVERDUE


def test_a_crash_loop_is_tried_again_ever_later() -> None:
    pools, pauses = Pools(), []
    for life in range(12):
        pools.has(f"prefill-{life}", STARTING)
        pools.after(1)
        pools.loses(f"prefill-{life}")
        pools.after(1)
        pauses.append(pools.pause_s)
        pools.after(pools.pause_s)
    assert pauses[:5] == [0.0, 2.5, 5.0, 10.0, 20.0]
    assert pauses[-1] == MAX_PAUSE_S
    assert pools.watch.failed_starts["prefill"] == 12
    assert pools.watch.pause_s("decode", pools.now) == 0.0


def test_up_for_a_moment_is_no_success_and_up_for_a_cold_start_is(pools: Pools) -> None:
    for life in range(3):
        pools.has(f"prefill-{life}", READY)
        pools.after(1)
        pools.loses(f"prefill-{life}")
        pools.after(0)
    assert pools.pause_s == 5.0
    pools.has("prefill-9", READY)
    pools.after(0)
    pools.after(11)
    assert pools.pause_s == 0.0
    pools.loses("prefill-9")
    pools.after(1)
    assert pools.watch.failed_starts["prefill"] == 3, "it died, but it had started"


def test_what_was_told_to_end_has_not_failed(pools: Pools) -> None:
    pools.has("prefill-0", STARTING)
    pools.has("prefill-1", STARTING)
    pools.after(1)
    pools.watch.told_to_end(["prefill-0"])
    pools.loses("prefill-0")
    pools.changes("prefill-1", state=ReplicaState.DRAINING)
    pools.after(100)
    pools.loses("prefill-1")
    pools.after(1)
    assert pools.watch.failed_starts["prefill"] == 0


def test_a_placeholder_that_becomes_a_pod_has_not_failed(pools: Pools) -> None:
    pools.has("prefill-pending-0", STARTING)
    pools.changes("prefill-pending-0", placeholder=True)
    pools.after(1)
    pools.loses("prefill-pending-0")
    pools.has("prefill-abc", STARTING)
    pools.after(1)
    assert pools.watch.failed_starts["prefill"] == 0


def test_a_process_that_is_started_again_under_its_name_has_failed_once(pools: Pools) -> None:
    pools.has("prefill-0", STARTING)
    for life in range(5):
        pools.changes("prefill-0", created_wall_s=float(life))
        pools.after(1)
    assert pools.watch.failed_starts["prefill"] == 1
    pools.loses("prefill-0")
    pools.after(1)
    assert pools.watch.failed_starts["prefill"] == 1, "given up by the actuator: the same failure"
    pools.has("prefill-1", STARTING)
    pools.after(0)
    for life in range(20):
        pools.changes("prefill-1", created_wall_s=-float(life))
        seen = pools.after(7)
    assert seen["prefill-1"] is OVERDUE, "its deadline does not begin anew"


def test_a_process_that_had_proven_itself_and_was_started_again_has_a_new_start(pools: Pools) -> None:
    pools.has("prefill-0", READY)
    pools.after(0)
    pools.after(20)
    pools.has("prefill-0", STARTING)
    pools.changes("prefill-0", created_wall_s=5.0)
    assert pools.after(1)["prefill-0"] is STARTING
    assert pools.watch.failed_starts["prefill"] == 0
    pools.loses("prefill-0")
    pools.after(1)
    assert pools.watch.failed_starts["prefill"] == 1


def test_each_failure_gives_the_next_one_more_time(pools: Pools) -> None:
    pools.has("prefill-0", STARTING)
    pools.after(0)
    pools.after(31)
    pools.watch.told_to_end(["prefill-0"])
    pools.loses("prefill-0")
    pools.has("prefill-1", STARTING)
    pools.after(0)
    assert pools.after(59)["prefill-1"] is STARTING
    assert pools.after(2)["prefill-1"] is OVERDUE


def test_a_replica_whose_host_does_not_answer_is_never_overdue(pools: Pools) -> None:
    pools.has("prefill-0", STARTING)
    pools.after(5)
    pools.changes("prefill-0", reachable=False)
    for _ in range(20):
        assert pools.after(10)["prefill-0"] is STARTING
    pools.changes("prefill-0", reachable=True)
    assert pools.after(25)["prefill-0"] is STARTING
    assert pools.after(10)["prefill-0"] is OVERDUE


def test_one_whose_machine_is_taken_away_is_no_failed_start(pools: Pools) -> None:
    pools.has("prefill-0", READY)
    pools.after(1)
    pools.has("prefill-0", ReplicaState.PREEMPTED)
    pools.after(1)
    pools.loses("prefill-0")
    pools.after(1)
    assert pools.watch.failed_starts["prefill"] == 0
    assert pools.pause_s == 0


def test_machines_that_are_taken_away_at_once_are_not_replaced_at_once() -> None:
    pools, pauses = Pools(), []
    for life in range(4):
        pools.has(f"prefill-{life}", STARTING)
        pools.after(1)
        pools.has(f"prefill-{life}", ReplicaState.PREEMPTED, registered=True)
        pools.after(1)
        pauses.append(pools.pause_s)
        pools.after(1)
        pools.loses(f"prefill-{life}")
        pools.after(1)
    assert pauses == [0.0, 2.5, 5.0, 10.0]
    assert pools.watch.failed_starts["prefill"] == 0


def test_one_that_is_first_seen_with_its_notice_counts_too(pools: Pools) -> None:
    pools.after(1)
    for life in range(3):
        pools.has(f"prefill-{life}", ReplicaState.PREEMPTED, registered=True)
        pools.after(1)
        pools.loses(f"prefill-{life}")
        pools.after(1)
    assert pools.pause_s > 0


def test_one_that_a_new_autoscaler_finds_preempted_says_nothing_of_its_start(pools: Pools) -> None:
    for life in range(3):
        pools.has(f"prefill-{life}", ReplicaState.PREEMPTED, registered=True)
    pools.after(1)
    pools.after(1)
    assert pools.pause_s == 0


def test_one_that_starts_again_on_its_machine_after_a_notice_is_watched_again(pools: Pools) -> None:
    pools.has("prefill-0", READY)
    pools.after(1)
    pools.has("prefill-0", ReplicaState.PREEMPTED)
    pools.after(1)
    pools.changes("prefill-0", created_wall_s=pools.now)
    pools.has("prefill-0", STARTING)
    assert pools.after(1)["prefill-0"] is STARTING
    assert pools.after(200)["prefill-0"] is OVERDUE
