"""A prefill and a decode worker that have their host to themselves: the pair computes as one machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.request.caller import RequestTargets
from coordinator.routing.local_prefill import NO_LIMIT
from coordinator.workers.catalog import Model
from coordinator.workers.load import Flight
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.snapshot import Worker
from engine.pacing.lending import MIN_LENT_TOKENS
from splitserve.v1 import registry_pb2
from tests.unit.coordinator.routing.test_prompt_placement import (
    D0,
    D1,
    FULL_STEPS,
    LENDS,
    LENT,
    THIRD,
    Bench,
    Clock,
    clock,
    worker,
)

__all__ = ["clock"]
Break = Callable[[Worker, Worker], tuple[Worker, ...]]


def test_the_decode_worker_computes_all_prompts(clock: Clock) -> None:
    """Short ones and late ones, whatever waits there and however many streams there are: its clock keeps these."""
    many = replace(worker("d0", "decode", lent_speedup=1.0, streams=7, step_fit=FULL_STEPS), host_id="h")
    for decode in (LENDS, many):
        bench = Bench(clock, LENT, decode)
        for _ in range(3):
            assert bench.pair_of(MIN_LENT_TOKENS - 1).local_tokens == NO_LIMIT
            assert bench.pair_of(5000).local_tokens == NO_LIMIT
            bench.queue(decode, 900)


def test_it_does_before_anything_is_measured(clock: Clock) -> None:
    """Nobody else would measure it."""
    pair = replace(worker("p0", "prefill", fit=False, lent_speedup=1.0), host_id="h")
    decode = replace(worker("d0", "decode", fit=False, lent_speedup=1.0), host_id="h")
    assert Bench(clock, pair, decode).pair_of(100).local_tokens == NO_LIMIT
    assert Bench(clock, replace(pair, host_id="i"), decode).pair_of(100).local_tokens is None


@pytest.mark.parametrize(
    "apart",
    [
        lambda p, d: (p, replace(d, host_id="i")),
        lambda p, d: (replace(p, host_id=""), replace(d, host_id="")),
        lambda p, d: (p, replace(d, model=Model("other", "m", 100_000, 100))),
        lambda p, d: (p, d, THIRD),
        lambda p, d: (replace(p, load=worker("p0", "prefill").load), d),
    ],
    ids=["hosts", "unknown hosts", "models", "a third worker", "own cores only"],
)
def test_others_are_no_host_pair(clock: Clock, apart: Break) -> None:
    bench = Bench(clock, *apart(LENT, LENDS))
    assert not bench.loads.decode[LENDS.key].has_host


def neutral(worker: Worker, **report: object) -> Worker:
    load = registry_pb2.WorkerLoad()
    load.CopyFrom(worker.load)
    load.MergeFrom(registry_pb2.WorkerLoad(**report))  # type: ignore[arg-type]
    return replace(worker, load=load, neutral=True, output_open=True)


def test_two_neutral_workers_are_one_too_by_where_they_lean(clock: Clock) -> None:
    first, second = neutral(LENT), neutral(LENDS)
    bench = Bench(clock, first, second)
    pair = bench.pair_of(100)
    assert (pair.prefill, pair.decode, pair.local_tokens) == (first, second, NO_LIMIT)
    bench.loads.lean(first.key, "decode")
    assert not any(load.has_host for load in bench.loads.decode.values())
    bench.loads.lean(second.key, "prefill")
    assert bench.loads.decode[first.key].has_host
    assert not bench.loads.decode[second.key].has_host


def test_streams_of_the_neutral_worker_that_leans_to_prefill_need_its_cores(clock: Clock) -> None:
    bench = Bench(clock, neutral(LENT), neutral(LENDS))
    bench.loads.count_stream(LENT.key, 100)
    assert not bench.pair_of(100).local_tokens
    bench.loads.on_report(LENT.key, neutral(LENT).load)
    assert bench.pair_of(100).local_tokens == NO_LIMIT
    bench.loads.on_report(LENT.key, neutral(LENT, running_requests=1, streams=1).load)
    assert not bench.pair_of(100).local_tokens


def test_while_the_prefill_worker_has_a_prompt_it_needs_its_cores(clock: Clock) -> None:
    bench = Bench(clock, LENT, LENDS)
    expected = bench.loads.expect(LENT.key, 100)
    assert expected is not None
    bench.queue(LENT, 100)
    assert not bench.pair_of(100).local_tokens
    expected.withdraw()
    assert bench.pair_of(100).local_tokens == NO_LIMIT
    bench.loads.on_report(LENT.key, worker("p0", "prefill", lent_speedup=1.0, waiting_tokens=5).load)
    assert not bench.pair_of(5000).local_tokens


def test_streams_without_a_target_do_not_keep_it_from_that(clock: Clock) -> None:
    """They are not held up by more than others are; nobody has to rest for the pair."""
    bench = Bench(clock, LENT, LENDS)
    bench.loads.decode[LENDS.key].add_flight(
        Flight(prompt_tokens=10, uncached_tokens=10, expected_output=10, max_output=10)
    )
    assert bench.pair_of(100).local_tokens == NO_LIMIT


def test_nobody_is_promised_a_pace_by_a_prompt_without_one(clock: Clock) -> None:
    bench = Bench(clock, LENT, replace(LENDS, load=worker("d0", "decode", lent_speedup=1.0).load))
    bench.queue(LENDS, 3000)
    assert not bench.pair(bench.request(100, RequestTargets(1.0, None))).local_tokens


def test_what_the_prefill_worker_has_in_its_cache_is_not_computed_anew(clock: Clock) -> None:
    bench, hits = Bench(clock, replace(LENT, prefix_slot=0), LENDS), PrefixHits.of({0: 20})
    assert not bench.pair_of(400, cached=320, hits=hits).local_tokens
    assert bench.pair_of(400, cached=16, hits=PrefixHits.of({0: 1})).local_tokens == NO_LIMIT


def test_of_two_host_pairs_the_one_that_is_ready_first_computes(clock: Clock) -> None:
    second = replace(worker("p1", "prefill", lent_speedup=1.0), host_id="i")
    beside = replace(LENDS, worker_id="d1", agent_id=D1.agent_id, host_id="i")
    bench = Bench(clock, LENT, LENDS, beside, second)
    assert bench.pair_of(100).decode == LENDS
    bench.queue(LENDS, 300)
    assert bench.pair_of(100).decode == beside


def test_a_prefill_worker_of_no_host_pair_computes_prompts(clock: Clock) -> None:
    """It has nothing else to do."""
    alone = replace(worker("p0", "prefill"), host_id="j")
    bench = Bench(clock, alone, LENDS, replace(LENT, worker_id="p1", agent_id="agent-p1"))
    assert bench.loads.decode[LENDS.key].has_host
    assert not bench.pair_of(100).local_tokens
    assert not Bench(clock, alone, D0).pair_of(100).local_tokens


def test_beside_a_decode_worker_of_no_pair_prompts_go_where_the_other_rules_send_them(clock: Clock) -> None:
    """Otherwise the pair would get all of them, and the other one's streams too."""
    beside = replace(worker("d1", "decode"), host_id="i")
    bench = Bench(clock, LENT, LENDS, beside)
    assert bench.loads.decode[LENDS.key].has_host
    assert not bench.pair_of(100).local_tokens
