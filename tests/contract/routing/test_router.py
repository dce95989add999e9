"""What every routing rule must keep, whatever it prefers. A new value of `Routing` is tested here by itself."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.pair_selector import make_router
from coordinator.routing.router import Pair, RoutingRequest
from coordinator.workers.catalog import Model
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker
from splitserve.config.coordinator import Routing
from splitserve.v1 import registry_pb2

KINDS: tuple[Routing, ...] = get_args(Routing)
MODEL = Model("m", "source", context_tokens=100_000, vocabulary_size=100, block_sizes=(16,))
REQUEST = RoutingRequest("m", prompt_tokens=1000, expected_output_tokens=50)

pytestmark = pytest.mark.parametrize("kind", KINDS)


def worker(name: str, pool: PoolName, number: int, **changed: Any) -> Worker:
    load = registry_pb2.WorkerLoad(
        total_blocks=1000, free_blocks=1000, waiting_tokens=changed.pop("waiting_tokens", 0)
    )
    made = Worker(
        worker_id=name,
        epoch=1,
        pool=pool,
        address="h:1",
        model=MODEL,
        agent_id=f"agent-{name}",
        transport="memory",
        block_size_tokens=16,
        max_running_requests=8,
        load=load,
        reported=True,
        output_open=pool == "decode",
        block_bytes=100_000,
        prefix_slot=number,
    )
    return dataclasses.replace(made, **changed)


def prefill(number: int, *peers: int, **changed: Any) -> Worker:
    agents = frozenset(f"agent-d{peer}" for peer in peers)
    return worker(f"p{number}", "prefill", number, connected_agents=agents, **changed)


def decode(number: int, **changed: Any) -> Worker:
    return worker(f"d{number}", "decode", 10 + number, **changed)


def choose(kind: Routing, *workers: Worker, **changed: Any) -> Pair | None:
    request = dataclasses.replace(REQUEST, **changed)
    return make_router(kind).choose_pair(PoolSnapshot(workers), LoadLedger.of(workers), request, now=0.0)


def names(pair: Pair | None) -> tuple[str, str | None]:
    assert pair is not None
    return pair.prefill.worker_id, pair.decode.worker_id if pair.decode else None


def test_only_connected_workers_are_paired(kind: Routing) -> None:
    pools = (prefill(0, 1), prefill(1, 0), decode(0), decode(1))
    for turn in range(8):
        assert names(choose(kind, *pools, turn=turn)) in {("p0", "d1"), ("p1", "d0")}
    assert choose(kind, prefill(0, 1), decode(0)) is None


def test_a_pool_without_workers_gives_no_pair(kind: Routing) -> None:
    assert choose(kind, prefill(0, 0)) is None
    assert choose(kind, decode(0)) is None


@pytest.mark.parametrize("change", [{"draining": True}, {"reported": False}])
def test_a_worker_that_takes_no_requests_is_never_chosen(kind: Routing, change: dict[str, bool]) -> None:
    assert choose(kind, prefill(0, 0, **change), decode(0)) is None
    assert choose(kind, prefill(0, 0), decode(0, **change)) is None


def test_decode_needs_its_output_stream(kind: Routing) -> None:
    assert choose(kind, prefill(0, 0), decode(0, output_open=False)) is None


def test_workers_of_another_model_are_never_chosen(kind: Routing) -> None:
    assert choose(kind, prefill(0, 0), decode(0), model="other") is None


def test_boots_that_failed_the_request_are_left_out(kind: Routing) -> None:
    pools = (prefill(0, 0, 1), prefill(1, 0, 1), decode(0), decode(1))
    failed = frozenset({pools[0].key, pools[3].key})
    for turn in range(8):
        assert names(choose(kind, *pools, turn=turn, exclude=failed)) == ("p1", "d0")


def test_an_answer_of_one_token_needs_no_decode_worker(kind: Routing) -> None:
    assert names(choose(kind, prefill(0), needs_decode=False)) == ("p0", None)


def test_asking_for_candidates_changes_no_choice(kind: Routing) -> None:
    pools = (prefill(0, 0, 1), prefill(1, 1), prefill(2, 0), decode(0), decode(1), decode(2))
    for turn in range(8):
        pair = choose(kind, *pools, turn=turn, wants_candidates=True)
        assert names(pair) == names(choose(kind, *pools, turn=turn))
        assert pair is not None
        assert all(one.worker_id in {worker.worker_id for worker in pools} for one in pair.candidates)


def test_equal_workers_take_turns(kind: Routing) -> None:
    pools = (prefill(0, 0, 1), prefill(1, 0, 1), decode(0), decode(1))
    pairs = [names(choose(kind, *pools, turn=turn)) for turn in range(8)]
    assert {pair[0] for pair in pairs} == {"p0", "p1"}
    assert {pair[1] for pair in pairs} == {"d0", "d1"}


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sets(st.integers(0, 2))), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 7),
)
def test_there_is_a_pair_exactly_where_two_workers_are_connected(
    kind: Routing, prefills: list[tuple[int, set[int]]], decodes: int, turn: int
) -> None:
    ps = [prefill(number, *peers, waiting_tokens=tokens) for number, (tokens, peers) in enumerate(prefills)]
    ds = [decode(number) for number in range(decodes)]
    pair = choose(kind, *ps, *ds, turn=turn)
    assert (pair is not None) == any(p.reaches(d) for p in ps for d in ds)
    if pair is not None:
        assert pair.decode is not None
        assert pair.prefill.reaches(pair.decode)
        assert names(choose(kind, *ps, *ds, turn=turn)) == names(pair)


def neutral(number: int, pool: PoolName, *peers: int, **changed: Any) -> Worker:
    """Reaches the neutral workers of these numbers, and all decode workers."""
    agents = frozenset([f"agent-w{peer}" for peer in peers] + [f"agent-d{each}" for each in range(3)])
    fields = {"neutral": True, "output_open": True, "connected_agents": agents} | changed
    return worker(f"w{number}", pool, 20 + number, **fields)


def test_neutral_workers_are_paired_by_where_they_lean(kind: Routing) -> None:
    workers = (neutral(0, "prefill", 1, 2), neutral(1, "decode", 0, 2), neutral(2, "prefill", 0, 1))
    for turn in range(8):
        prefill_name, decode_name = names(choose(kind, *workers, turn=turn))
        assert prefill_name in ("w0", "w2")
        assert decode_name == "w1"


def test_neutral_and_pinned_workers_serve_together(kind: Routing) -> None:
    assert names(choose(kind, prefill(0), neutral(0, "prefill"), decode(1))) == ("w0", "d1")
    reaching = dataclasses.replace(prefill(0), connected_agents=frozenset({"agent-w0"}))
    assert names(choose(kind, reaching, neutral(0, "decode"))) == ("p0", "w0")


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_neutral_workers_that_all_lean_to_one_side_serve_each_alone(kind: Routing, pool: PoolName) -> None:
    assert names(choose(kind, neutral(0, pool))) == ("w0", "w0")
    found = {names(choose(kind, neutral(0, pool, 1), neutral(1, pool, 0), turn=turn)) for turn in range(8)}
    assert found == {("w0", "w0"), ("w1", "w1")}
    assert names(choose(kind, neutral(0, pool), needs_decode=False)) == ("w0", None)


def test_neutral_workers_without_a_lane_serve_each_alone(kind: Routing) -> None:
    pair = choose(kind, neutral(0, "prefill"), neutral(1, "decode"))
    assert pair is not None
    assert pair.is_own


def test_a_neutral_worker_serves_alone_when_the_other_one_has_failed_the_request(kind: Routing) -> None:
    workers = (neutral(0, "prefill", 1), neutral(1, "decode", 0))
    for failed, left in ((workers[0], "w1"), (workers[1], "w0")):
        assert names(choose(kind, *workers, exclude=frozenset({failed.key}))) == (left, left)
    everyone = frozenset(each.key for each in workers)
    assert choose(kind, *workers, exclude=everyone) is None


@pytest.mark.parametrize("change", [{"draining": True}, {"reported": False}, {"output_open": False}])
def test_a_neutral_worker_that_takes_no_requests_is_never_chosen(
    kind: Routing, change: dict[str, bool]
) -> None:
    assert choose(kind, neutral(0, "prefill", **change)) is None
    assert names(choose(kind, neutral(0, "prefill", 1, **change), neutral(1, "decode", 0))) == ("w1", "w1")


def test_a_change_of_leaning_turns_the_pair_around(kind: Routing) -> None:
    router = make_router(kind)
    workers = (neutral(0, "prefill", 1), neutral(1, "decode", 0))
    loads = LoadLedger.of(workers)
    turned = tuple(
        dataclasses.replace(each, pool="decode" if each.pool == "prefill" else "prefill") for each in workers
    )
    for snapshot, expected in ((workers, ("w0", "w1")), (turned, ("w1", "w0")), (workers, ("w0", "w1"))):
        assert names(router.choose_pair(PoolSnapshot(snapshot), loads, REQUEST, now=0.0)) == expected
