"""A boot has ended when its replica was on a complete list and is on it no more; nothing less is told."""

from __future__ import annotations

from collections.abc import Sequence

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.signals.observer import MAX_ENDED, EndedReplicas, Observer
from tests.support.scaling.signal_sources import Clock, FakeSource, worker


def test_only_what_was_listed_can_end() -> None:
    ended = EndedReplicas()
    assert ended.look(["p1"], [("p1", 7), ("stranger", 3)]) == ()
    assert ended.look(["p1"], [("p1", 7)]) == ()
    assert ended.look([], []) == (("p1", 7),)
    assert ended.look([], [("stranger", 3)]) == (("p1", 7),), (
        "told again, as a coordinator may have missed it"
    )


def test_a_replica_that_runs_again_is_not_named() -> None:
    ended = EndedReplicas()
    ended.look(["p1"], [("p1", 7)])
    assert ended.look(["p1"], [("p1", 8)]) == ()
    assert ended.look([], []) == (("p1", 7), ("p1", 8))
    assert ended.look(["p1"], [("p1", 9)]) == (("p1", 7), ("p1", 8))


def test_a_boot_seen_just_before_the_list_counts() -> None:
    ended = EndedReplicas()
    ended.look(["p1"], [])
    assert ended.look([], [("p1", 7)]) == (("p1", 7),)
    assert ended.look([], [("p1", 8)]) == (("p1", 7),), "what came after is nothing that the list knew"


def test_memory_is_bounded() -> None:
    ended = EndedReplicas()
    for number in range(2 * MAX_ENDED):
        ended.look([f"p{number}"], [(f"p{number}", 1)])
    assert len(ended.look([], [])) == MAX_ENDED


async def test_the_observer_tells() -> None:
    told: list[Sequence[tuple[str, int]]] = []
    listed = [ActualReplica("p1", "prefill", False, 0.0)]

    async def replicas() -> Sequence[ActualReplica]:
        return listed

    async def on_ended(boots: Sequence[tuple[str, int]]) -> None:
        told.append(boots)

    clock = Clock()
    source = FakeSource("one:1", clock)
    source.workers = [worker("p1", epoch=7)]
    observer = Observer([source], replicas, clock=clock, on_ended=on_ended)
    await observer.observe()
    listed.clear()
    assert told == []
    await observer.observe()
    assert told == [(("p1", 7),)]
