"""Admission to a host pair, whose decode worker orders and paces the prompts that it computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.admission.model_admission import ModelAdmission
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolName, Worker
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import admission, entry, finish, load, worker

FIT = registry_pb2.DecodeStepFit(base_ms=10, sequence_ms=10)
"""Four streams are what a target of 50 ms allows."""
TARGETS = {"due_s": 1.0, "tpot_slo_s": 0.05}


def on_host(name: str, pool: PoolName, slots: int = 64, **report: object) -> Worker:
    return replace(worker(name, pool, slots, lent_speedup=1.0, **report), host_id="h", paces_prompts=True)


def host_pair(slots: int = 64, *, hybrid: bool = True, **settings: object) -> ModelAdmission:
    workers = on_host("p0", "prefill"), on_host("d0", "decode", slots, step_fit=FIT)
    model = admission(workers, LoadLedger.of(workers), prefill_horizon_s=0.1, **settings)
    model.hybrid = hybrid
    return model


def test_prompts_with_targets_start_at_once() -> None:
    """Beyond the horizon, late ones and more than steps allow: what waited here would come too late."""
    model = host_pair()
    many = [entry(3000, **TARGETS) for _ in range(20)]
    assert [model.arrive(one, 0.0).started for one in many] == [True] * 20


def test_as_many_as_the_worker_has_slots_and_blocks() -> None:
    model = host_pair(slots=4)
    assert [model.arrive(entry(**TARGETS), 0.0).started for _ in range(5)] == [True] * 4 + [False]
    small = host_pair()
    small._loads.on_report(("d0", 1), load(total_blocks=64, free_blocks=64, lent_speedup=1.0))
    assert [small.arrive(entry(400, **TARGETS), 0.0).started for _ in range(3)] == [True, True, False]


def test_with_pools_kept_apart_they_wait_as_elsewhere() -> None:
    model = host_pair(hybrid=False)
    assert [model.arrive(entry(100, **TARGETS), 0.0).started for _ in range(5)] == [True] * 4 + [False]
    assert model.held_by == "decode"


def test_while_the_prefill_worker_has_a_prompt_they_wait_too() -> None:
    model = host_pair()
    model._loads.on_report(("p0", 1), load(lent_speedup=1.0, waiting_tokens=10))
    assert [model.arrive(entry(900, **TARGETS), 0.0).started for _ in range(2)] == [True, False]
    model._loads.on_report(("p0", 1), load(lent_speedup=1.0))
    assert len(model.release(0.0).started) == 1


@pytest.mark.parametrize("other", [{}, {"tpot_slo_s": 0.05}, {**TARGETS, "ttft_slo_s": 1.0}])
def test_beside_others_all_wait_for_their_turns(other: dict[str, float]) -> None:
    """Those without a target, or refused rather than served late. What the decode worker has of the prompts is none of
    the prefill worker's work."""
    model = host_pair()
    assert all(model.arrive(entry(3000, **TARGETS), 0.0).started for _ in range(20))
    one = entry(900, **other)
    assert model.arrive(one, 0.0).started
    assert not model.arrive(entry(900, **other), 0.0).started
    assert not model.arrive(late := entry(900, **TARGETS), 0.0).started
    assert late.waits
    finish(model, one, 0.1)
    assert len(model.release(0.1).started) == 1, "in turn: the other one of them"


def test_others_that_are_refused_keep_nobody() -> None:
    model = host_pair(max_queued_requests=1)
    held = [entry(900) for _ in range(3)]
    assert [model.arrive(one, 0.0).started for one in held] == [True, False, False]
    assert held[2].number < 0
    for one in held:
        model.ended(one)
    assert all(model.arrive(entry(900, **TARGETS), 0.0).started for _ in range(3))


def test_a_prefill_worker_beside_the_pair_is_sent_what_it_computes() -> None:
    """The router may choose it, and its streams come whatever the decode worker's clock says."""
    workers = (
        on_host("p0", "prefill"),
        on_host("d0", "decode", step_fit=FIT),
        replace(worker("p1", "prefill"), host_id="i", paces_prompts=True),
    )
    loads = LoadLedger.of(workers)
    model = admission(workers, loads)
    model.hybrid = True
    assert loads.decode["d0", 1].has_host
    assert [model.arrive(entry(**TARGETS), 0.0).started for _ in range(5)] == [True] * 4 + [False]


def test_a_prompt_without_a_target_comes_to_the_streams_that_there_are() -> None:
    """Prompts that wait at the decode worker are no streams: its clock keeps them back."""
    model = host_pair()
    waiting = [entry(**TARGETS) for _ in range(20)]
    assert all(model.arrive(one, 0.0).started for one in waiting)
    for one in waiting[:3]:
        model.sent(one, 1, 0.1)
    first = entry()
    assert model.arrive(first, 0.1).started
    model.sent(first, 1, 0.2)
    assert not model.arrive(entry(), 0.2).started
    assert model.held_by == "decode"


def test_a_request_that_is_routed_there_is_no_work_of_the_prefill_worker() -> None:
    model = host_pair()
    one = entry(3000, **TARGETS)
    assert model.arrive(one, 0.0).started
    model.routed(one, ("p0", 1), ("d0", 1), 0.0)
    assert model.prefill.backlog_s(0.0) == 0
    assert model.decode.workers["d0", 1].requests == 1
    model.sent(one, 1, 0.5)
    model.routed(one, ("p0", 1), ("d0", 1), 0.6)  # another attempt computes it again
    assert model.prefill.backlog_s(0.6) > 0
    model.ended(one)
    assert model.prefill.backlog_s(0.7) == 0
    assert model.decode.workers["d0", 1].requests == 0


def test_its_prompts_are_forecast_by_what_the_decode_worker_measures() -> None:
    """The prefill worker computes none."""
    workers = (
        on_host("p0", "prefill", prefill_tokens_per_second=0),
        on_host("d0", "decode", prefill_tokens_per_second=1000),
    )
    model = admission(workers, LoadLedger.of(workers))
    assert model.prefill.rate == 1000


def test_beside_a_decode_worker_that_is_of_no_pair_they_wait_as_elsewhere() -> None:
    """Who decodes is then the router's choice, and the prefill worker computes."""
    workers = (
        on_host("p0", "prefill"),
        on_host("d0", "decode", step_fit=FIT),
        replace(worker("d1", "decode"), host_id="i"),
    )
    model = admission(workers, LoadLedger.of(workers), prefill_horizon_s=0.1)
    model.hybrid = True
    assert [model.arrive(entry(900, **TARGETS), 0.0).started for _ in range(3)] == [True, False, False]


def test_a_pair_whose_decode_worker_takes_nobody_new_is_none() -> None:
    workers = (
        on_host("p0", "prefill"),
        on_host("d0", "decode", step_fit=FIT),
        replace(worker("d1", "decode"), host_id="i"),
    )
    loads = LoadLedger.of(workers)
    model = admission(workers[:1] + workers[2:], loads, prefill_horizon_s=0.1)
    model.hybrid = True
    assert loads.decode["d0", 1].has_host
    assert [model.arrive(entry(900, **TARGETS), 0.0).started for _ in range(3)] == [True, False, False]


def test_answers_of_one_token_are_the_prefill_workers_work() -> None:
    model = host_pair()
    some = [entry(900, needs_decode=False, **TARGETS) for _ in range(3)]
    assert [model.arrive(one, 0.0).started for one in some] == [True, False, False]
    assert model.prefill.backlog_s(0.0) > 0


def test_requests_of_several_tenants_wait_for_their_turns() -> None:
    model = host_pair()
    first = [entry(3000, tenant="a", **TARGETS) for _ in range(3)]
    assert all(model.arrive(one, 0.0).started for one in first)
    assert model.arrive(entry(900, tenant="b", **TARGETS), 0.0).started, "the prefill worker is idle"
    assert not model.arrive(entry(900, tenant="b", **TARGETS), 0.0).started
    assert not model.arrive(entry(900, tenant="a", **TARGETS), 0.0).started


def test_a_client_that_reads_slowly_keeps_nobody() -> None:
    """Workers have nothing of its request any more."""
    model = host_pair()
    other = entry(900)
    assert model.arrive(other, 0.0).started
    late = [entry(900, **TARGETS) for _ in range(3)]
    assert [model.arrive(one, 0.0).started for one in late] == [False] * 3
    model.sent(other, 1, 0.1)
    model.decoded(other)
    assert len(model.release(0.1).started) == 3


def test_another_attempt_elsewhere_is_the_prefill_workers_work() -> None:
    model = host_pair()
    one = entry(900, **TARGETS)
    assert model.arrive(one, 0.0).started
    assert model.prefill.backlog_s(0.0) == 0
    model.routed(one, ("p0", 1), ("gone", 1), 0.1)
    assert model.prefill.backlog_s(0.1) > 0
    model.ended(one)
    assert model.prefill.backlog_s(0.1) == 0
