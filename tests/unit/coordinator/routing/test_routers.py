"""Routing: the least predicted wait, over complete pairs only."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.router import Pair, RoutingRequest, no_pair
from coordinator.workers.load import WorkerLoads
from coordinator.workers.snapshot import Model, PoolSnapshot, Worker
from splitserve.roles import PoolName
from splitserve.v1 import registry_pb2
from tests.support.latency import latency as latency_of

MODEL = Model("m", "source", context_tokens=4096, vocabulary_size=100)
REQUEST = RoutingRequest("m", prompt_tokens=100)


def worker(name: str, pool: PoolName, *, peers: tuple[str, ...] = (), **changed: Any) -> Worker:
    load_fields = registry_pb2.WorkerLoad.DESCRIPTOR.fields_by_name
    load = {key: changed.pop(key) for key in list(changed) if key in load_fields}
    measured = latency_of(changed.pop("tokens_per_s", 0), changed.pop("step_ms", 0))
    made = Worker(
        worker_id=name,
        epoch=1,
        role=pool,
        address="h:1",
        model=MODEL,
        agent_id=f"agent-{name}",
        transport="nixl",
        block_size_tokens=16,
        max_running_requests=8,
        load=registry_pb2.WorkerLoad(
            **({"total_blocks": 100, "free_blocks": 100, "latency": measured} | load)
        ),
        reported=True,
        output_open=pool == "decode",
        connected_agents=frozenset(f"agent-{peer}" for peer in peers),
    )
    return dataclasses.replace(made, **changed)


def prefill(name: str, *peers: str, **changed: Any) -> Worker:
    return worker(name, "prefill", peers=peers, **changed)


def decode(name: str, **changed: Any) -> Worker:
    return worker(name, "decode", **changed)


def choose(*workers: Worker, **changed: Any) -> Pair | None:
    request = dataclasses.replace(REQUEST, **changed)
    return PrefixRouter().choose_pair(PoolSnapshot(workers), WorkerLoads.of(workers), request, now=0.0)


def chosen(*workers: Worker, **changed: Any) -> tuple[str, str | None]:
    pair = choose(*workers, **changed)
    assert pair is not None
    return pair.prefill.worker_id, pair.decode.worker_id if pair.decode else None


def test_the_shorter_queue_wins() -> None:
    workers = prefill("p0", "d0", waiting_tokens=5000), prefill("p1", "d0", waiting_tokens=10), decode("d0")
    assert chosen(*workers) == ("p1", "d0")


def test_a_faster_worker_may_have_the_longer_queue() -> None:
    slow = prefill("p0", "d0", waiting_tokens=1000, tokens_per_s=500)
    fast = prefill("p1", "d0", waiting_tokens=3000, tokens_per_s=9000)
    assert chosen(slow, fast, decode("d0")) == ("p1", "d0")


def test_what_was_sent_since_the_last_report_counts() -> None:
    workers = prefill("p0", "d0"), prefill("p1", "d0"), decode("d0")
    loads = WorkerLoads.of(workers)
    loads.count_prompt(("p0", 1), 500)
    pair = PrefixRouter().choose_pair(PoolSnapshot(workers), loads, REQUEST, 0.0)
    assert pair is not None
    assert pair.prefill.worker_id == "p1"


def test_an_unmeasured_worker_counts_as_average() -> None:
    fresh = prefill("p0", "d0")
    measured = prefill("p1", "d0", tokens_per_s=50_000, waiting_tokens=100)
    assert chosen(fresh, measured, decode("d0")) == ("p0", "d0")


def test_a_full_decode_worker_is_avoided() -> None:
    full = decode("d0", free_blocks=2, referenced_blocks=98, running_requests=2)
    busy = decode("d1", running_requests=6)
    assert chosen(prefill("p0", "d0", "d1"), full, busy) == ("p0", "d1")


def test_the_emptier_batch_wins_while_there_is_room() -> None:
    assert chosen(prefill("p0", "d0", "d1"), decode("d0", running_requests=5), decode("d1")) == ("p0", "d1")


def test_only_connected_pairs() -> None:
    workers = prefill("p0", "d0", waiting_tokens=9000), prefill("p1"), decode("d0"), decode("d1")
    assert chosen(*workers) == ("p0", "d0")
    assert choose(prefill("p1"), decode("d0")) is None


@pytest.mark.parametrize("change", [{"draining": True}, {"reported": False}])
def test_workers_that_do_not_accept_are_never_chosen(change: dict[str, bool]) -> None:
    assert choose(prefill("p0", "d0", **change), decode("d0")) is None
    assert choose(prefill("p0", "d0"), decode("d0", **change)) is None


def test_decode_needs_its_output_stream() -> None:
    assert choose(prefill("p0", "d0"), decode("d0", output_open=False)) is None


def test_other_models_are_ignored() -> None:
    assert choose(prefill("p0", "d0"), decode("d0"), model="other") is None


def test_excluded_boots_are_left_out() -> None:
    workers = prefill("p0", "d0", "d1"), decode("d0"), decode("d1")
    assert chosen(*workers, exclude=frozenset({("d0", 1)})) == ("p0", "d1")
    assert chosen(*workers, exclude=frozenset({("d0", 2)}), turn=0) == ("p0", "d0")
    assert choose(*workers, exclude=frozenset({("p0", 1)})) is None


def test_one_token_needs_no_decode_worker() -> None:
    assert chosen(prefill("p0"), needs_decode=False) == ("p0", None)


def test_equals_take_turns_and_the_choice_is_deterministic() -> None:
    workers = [prefill(f"p{n}", "d0", "d1", "d2") for n in range(3)] + [decode(f"d{n}") for n in range(3)]
    picks = [chosen(*workers, turn=turn) for turn in range(9)]
    assert picks == [chosen(*workers, turn=turn) for turn in range(9)]
    assert set(Counter(p for p, _ in picks).values()) == {3}
    assert set(Counter(d for _, d in picks).values()) == {3}


def test_what_is_missing_is_named() -> None:
    cases: list[tuple[tuple[Worker, ...], str]] = [
        ((), "no prefill and no decode"),
        ((prefill("p0"),), "no decode worker"),
        ((decode("d0"),), "no prefill worker"),
        ((prefill("p0"), decode("d0")), "is connected"),
    ]
    for workers, expected in cases:
        error = no_pair(PoolSnapshot(workers), REQUEST, 1.0)
        assert expected in error.message
        assert (error.reason, error.retry_after_s) == ("NO_WORKER", 1.0)


def test_a_refused_lane_is_named() -> None:
    problem = "0.30 GB/s over tcp, at least 1 GB/s expected"
    lane = registry_pb2.LaneReport(agent_id="agent-d0", problem=problem, refused=True)
    snapshot = PoolSnapshot((decode("d0"), prefill("p0", lanes=(lane,))))
    error = no_pair(snapshot, REQUEST, 1.0)
    assert error.reason == "SLOW_LANE"
    assert f"p0 to d0: {problem}" in error.message
