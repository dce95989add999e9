"""What every routing rule must keep, whatever it prefers. A new one of `routers` is tested here by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.routing.trace import routers
from coordinator.routing.router import Pair, RoutingRequest
from coordinator.workers.load import WorkerLoads
from coordinator.workers.snapshot import Model, PoolSnapshot, Worker
from splitserve.roles import PoolName
from tests.support.clients import admission_parts

MODEL = Model("m", "source", context_tokens=100_000, vocabulary_size=100, block_size_tokens=16)
REQUEST = RoutingRequest("m", prompt_tokens=1000, expected_output_tokens=50)

pytestmark = pytest.mark.parametrize("kind", routers())


def worker(name: str, pool: PoolName, number: int, **changed: Any) -> Worker:
    usual: dict[str, Any] = {
        "model": MODEL,
        "agent_id": f"agent-{name}",
        "tokens_per_s": 0,
        "step_ms": 0,
        "total_blocks": 1000,
        "free_blocks": 1000,
        "output_open": pool == "decode",
        "block_bytes": 100_000,
        "prefix_slot": number,
    }
    return admission_parts.worker(name, pool, 8, **(usual | changed))


def prefill(number: int, *peers: int, **changed: Any) -> Worker:
    agents = frozenset(f"agent-d{peer}" for peer in peers)
    return worker(f"p{number}", "prefill", number, connected_agents=agents, **changed)


def decode(number: int, **changed: Any) -> Worker:
    return worker(f"d{number}", "decode", 10 + number, **changed)


def choose(kind: str, *workers: Worker, **changed: Any) -> Pair | None:
    request = dataclasses.replace(REQUEST, **changed)
    return routers()[kind].choose_pair(PoolSnapshot(workers), WorkerLoads.of(workers), request)


def names(pair: Pair | None) -> tuple[str, str | None]:
    assert pair is not None
    return pair.prefill.worker_id, pair.decode.worker_id if pair.decode else None


def test_only_connected_workers_are_paired(kind: str) -> None:
    pools = (prefill(0, 1), prefill(1, 0), decode(0), decode(1))
    for turn in range(8):
        assert names(choose(kind, *pools, turn=turn)) in {("p0", "d1"), ("p1", "d0")}
    assert choose(kind, prefill(0, 1), decode(0)) is None


def test_a_pool_without_workers_gives_no_pair(kind: str) -> None:
    assert choose(kind, prefill(0, 0)) is None
    assert choose(kind, decode(0)) is None


@pytest.mark.parametrize("change", [{"draining": True}, {"reported": False}])
def test_a_worker_that_takes_no_requests_is_never_chosen(kind: str, change: dict[str, bool]) -> None:
    assert choose(kind, prefill(0, 0, **change), decode(0)) is None
    assert choose(kind, prefill(0, 0), decode(0, **change)) is None


def test_decode_needs_its_output_stream(kind: str) -> None:
    assert choose(kind, prefill(0, 0), decode(0, output_open=False)) is None


def test_workers_of_another_model_are_never_chosen(kind: str) -> None:
    assert choose(kind, prefill(0, 0), decode(0), model="other") is None


def test_boots_that_failed_the_request_are_left_out(kind: str) -> None:
    pools = (prefill(0, 0, 1), prefill(1, 0, 1), decode(0), decode(1))
    failed = frozenset({pools[0].key, pools[3].key})
    for turn in range(8):
        assert names(choose(kind, *pools, turn=turn, exclude=failed)) == ("p1", "d0")


def test_an_answer_of_one_token_needs_no_decode_worker(kind: str) -> None:
    assert names(choose(kind, prefill(0), needs_decode=False)) == ("p0", None)


def test_asking_for_candidates_changes_no_choice(kind: str) -> None:
    pools = (prefill(0, 0, 1), prefill(1, 1), prefill(2, 0), decode(0), decode(1), decode(2))
    for turn in range(8):
        pair = choose(kind, *pools, turn=turn, wants_candidates=True)
        assert names(pair) == names(choose(kind, *pools, turn=turn))
        assert pair is not None
        assert all(one.worker_id in {worker.worker_id for worker in pools} for one in pair.candidates)


def test_equal_workers_take_turns(kind: str) -> None:
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
    kind: str, prefills: list[tuple[int, set[int]]], decodes: int, turn: int
) -> None:
    ps = [prefill(number, *peers, waiting_tokens=tokens) for number, (tokens, peers) in enumerate(prefills)]
    ds = [decode(number) for number in range(decodes)]
    pair = choose(kind, *ps, *ds, turn=turn)
    assert (pair is not None) == any(p.reaches(d) for p in ps for d in ds)
    if pair is not None:
        assert pair.decode is not None
        assert pair.prefill.reaches(pair.decode)
        assert names(choose(kind, *ps, *ds, turn=turn)) == names(pair)


def both(number: int, *peers: int, **changed: Any) -> Worker:
    """Of role both. Reaches those of these numbers, and all decode workers."""
    agents = frozenset([f"agent-w{peer}" for peer in peers] + [f"agent-d{each}" for each in range(3)])
    fields = {"role": "both", "output_open": True, "connected_agents": agents} | changed
    return worker(f"w{number}", "decode", 20 + number, **fields)


def test_workers_of_role_both_serve_with_others(kind: str) -> None:
    pair = names(choose(kind, prefill(0), both(0), decode(1)))
    assert pair in (("w0", "d1"), ("w0", "w0"))
    reaching = dataclasses.replace(prefill(0), connected_agents=frozenset({"agent-w0"}))
    assert names(choose(kind, reaching, both(0))) in (("p0", "w0"), ("w0", "w0"))


def test_workers_of_role_both_serve_each_alone(kind: str) -> None:
    assert names(choose(kind, both(0))) == ("w0", "w0")
    assert names(choose(kind, both(0), needs_decode=False)) == ("w0", None)
    found = {names(choose(kind, both(0), both(1), turn=turn)) for turn in range(8)}
    assert found == {("w0", "w0"), ("w1", "w1")}, "without a lane between them"


def test_a_worker_of_role_both_serves_alone_when_the_other_one_has_failed_the_request(kind: str) -> None:
    workers = (both(0, 1), both(1, 0))
    for failed, left in ((workers[0], "w1"), (workers[1], "w0")):
        assert names(choose(kind, *workers, exclude=frozenset({failed.key}))) == (left, left)
    everyone = frozenset(each.key for each in workers)
    assert choose(kind, *workers, exclude=everyone) is None


@pytest.mark.parametrize("change", [{"draining": True}, {"reported": False}, {"output_open": False}])
def test_a_worker_of_role_both_that_takes_no_requests_is_never_chosen(
    kind: str, change: dict[str, bool]
) -> None:
    assert choose(kind, both(0, **change)) is None
    assert names(choose(kind, both(0, 1, **change), both(1, 0))) == ("w1", "w1")


def test_a_change_of_roles_turns_the_pair_around(kind: str) -> None:
    router = routers()[kind]
    workers = (both(0, 1, role="prefill"), both(1, 0, role="decode"))
    loads = WorkerLoads.of(workers)
    turned = (dataclasses.replace(workers[0], role="decode"), dataclasses.replace(workers[1], role="prefill"))
    for each in turned:
        loads.take_role(each)
    for snapshot, expected in ((workers, ("w0", "w1")), (turned, ("w1", "w0")), (workers, ("w0", "w1"))):
        assert names(router.choose_pair(PoolSnapshot(snapshot), loads, REQUEST)) == expected
