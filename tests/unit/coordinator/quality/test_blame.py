"""Who is to blame for wrong answers, when it is isolated and when it comes back, and what is never isolated."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.quality.blame import NOBODY, Blame, Standing, blame, isolations
from coordinator.quality.target import Target, targets_of, targets_of_round
from coordinator.workers.catalog import Model
from coordinator.workers.snapshot import Isolation, PoolName, PoolSnapshot, Worker, WorkerKey

MODEL = Model("m", "source", context_tokens=4096, vocabulary_size=100)


def worker(name: str, pool: PoolName, peers: int = 0) -> Worker:
    return Worker(
        worker_id=name,
        epoch=1,
        pool=pool,
        address="h:1",
        model=MODEL,
        agent_id=f"agent-{name}",
        transport="memory",
        block_size_tokens=16,
        max_running_requests=8,
        reported=True,
        output_open=pool == "decode",
        connected_agents=frozenset(f"agent-d{number}" for number in range(peers)),
    )


def cluster(prefill: int, decode: int) -> PoolSnapshot:
    prefills = [worker(f"p{n}", "prefill", decode) for n in range(prefill)]
    return PoolSnapshot((*(worker(f"d{n}", "decode") for n in range(decode)), *prefills))


def key(name: str) -> WorkerKey:
    return name, 1


def failing(snapshot: PoolSnapshot, *bad: str) -> dict[Target, bool]:
    """Targets, and whether they fail: with "p0" its pairs, with "d0" that worker alone and its pairs, with "p0-d1" one
    pair."""
    names = {
        target: (f"{target.prefill_name}-{target.decode[0]}", target.prefill_name, target.decode[0])
        for target in targets_of(snapshot, "m")
    }
    return {target: bool(set(bad) & set(names[target])) for target in names}


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ((), NOBODY),
        (("p1",), Blame(prefills=(key("p1"),))),
        (("d1",), Blame(decodes=(key("d1"),))),
        (("p0-d1",), Blame(pairs=(Target(key("p0"), key("d1")),))),
        (("p1", "d0"), Blame(prefills=(key("p1"),), decodes=(key("d0"),))),
        (("p1", "p0-d1"), Blame(prefills=(key("p1"),), pairs=(Target(key("p0"), key("d1")),))),
        # Right alone, wrong with whatever is sent to it.
        (("p0-d2", "p1-d2", "p2-d2"), Blame(decodes=(key("d2"),))),
    ],
)
def test_who_is_to_blame(bad: tuple[str, ...], expected: Blame) -> None:
    assert blame(failing(cluster(3, 3), *bad)) == expected


def test_with_one_decode_worker_it_is_the_pair() -> None:
    assert blame(failing(cluster(2, 1), "p1")) == Blame(pairs=(Target(key("p1"), key("d0")),))


def test_the_whole_worker_and_single_pairs_are_isolated() -> None:
    snapshot = cluster(2, 2)
    found = blame(failing(snapshot, "p1"))
    assert isolations(snapshot, found) == {key("p1"): Isolation(worker=True)}
    found = blame(failing(snapshot, "p1-d0"))
    assert isolations(snapshot, found) == {key("p1"): Isolation(agents=frozenset({"agent-d0"}))}


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sets(st.sampled_from([f"p{n}" for n in range(3)] + [f"d{n}" for n in range(3)])),
    st.sets(st.sampled_from([f"p{p}-d{d}" for p, d in itertools.product(range(3), repeat=2)])),
)
def test_a_complete_pair_always_remains(
    prefill: int, decode: int, workers: set[str], pairs: set[str]
) -> None:
    snapshot = cluster(prefill, decode)
    isolated = isolations(snapshot, blame(failing(snapshot, *workers, *pairs)))
    left = PoolSnapshot(
        tuple(
            dataclasses.replace(worker, isolation=isolated.get(worker.key, worker.isolation))
            for worker in snapshot.workers
        )
    )
    assert left.ready_models() == {"m"}


def test_the_only_pair_is_never_isolated() -> None:
    snapshot = cluster(1, 1)
    assert blame(failing(snapshot, "p0")) == Blame(pairs=(Target(key("p0"), key("d0")),))
    assert isolations(snapshot, blame(failing(snapshot, "p0"))) == {}


def test_a_worker_is_spared_once_it_is_the_last() -> None:
    found = blame(failing(cluster(2, 1), "p1"))
    assert isolations(cluster(2, 1), found)
    only = PoolSnapshot(tuple(w for w in cluster(2, 1).workers if w.worker_id != "p0"))
    assert isolations(only, found) == {}


def test_two_failures_in_a_row_condemn_and_clean_rounds_acquit() -> None:
    standing = Standing().after(failed=True, clean_rounds=3)
    assert standing.suspect
    assert not standing.condemned
    assert not standing.after(failed=False, clean_rounds=3).suspect
    standing = standing.after(failed=True, clean_rounds=3)
    assert standing.condemned
    for clean in (1, 2):
        standing = standing.after(failed=False, clean_rounds=3)
        assert standing.condemned, clean
    again = standing.after(failed=True, clean_rounds=3)
    assert (again.condemned, again.clean) == (True, 0), "counting begins again"
    assert standing.after(failed=False, clean_rounds=3) == Standing(0, 3)


def test_rounds_take_turns_and_suspects_come_first() -> None:
    targets = targets_of(cluster(4, 4), "m")
    assert len(targets) == 4 + 16
    suspects, seen = targets[-1:], set()
    for turn in range(0, 60, 6):
        chosen = targets_of_round(targets, suspects, turn, 6)
        assert len(chosen) == len(set(chosen)) == 6
        assert chosen[0] == suspects[0]
        seen |= set(chosen)
    assert seen == set(targets)
    assert targets_of_round(targets, targets, 0, 100) == targets
    many = targets_of_round(targets, targets, 19, 6)
    assert many[:3] == targets[:3]
    assert set(many[3:]) == {targets[19], targets[3], targets[4]}


def test_pairs_are_ordered_so_that_a_few_see_every_worker() -> None:
    pairs = [target for target in targets_of(cluster(5, 3), "m") if target.prefill is not None]
    assert {target.prefill for target in pairs[:5]} == {key(f"p{n}") for n in range(5)}
    assert {target.decode for target in pairs[:3]} == {key(f"d{n}") for n in range(3)}
    assert len(set(pairs)) == 15


def test_isolated_workers_are_asked_all_the_same_and_others_are_not() -> None:
    snapshot = cluster(2, 2)
    changed = [
        dataclasses.replace(worker, isolation=Isolation(worker=True)) if worker.worker_id == "p0" else worker
        for worker in snapshot.workers
    ]
    assert targets_of(PoolSnapshot(tuple(changed)), "m") == targets_of(snapshot, "m")
    draining = tuple(dataclasses.replace(w, draining=w.worker_id == "d0") for w in snapshot.workers)
    names = {name for target in targets_of(PoolSnapshot(draining), "m") for name, _ in target.workers}
    assert names == {"p0", "p1", "d1"}
    assert targets_of(snapshot, "another") == []
