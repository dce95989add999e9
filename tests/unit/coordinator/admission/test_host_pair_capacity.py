"""Admission to a host pair, whose decode worker orders and paces the prompts that it computes."""

from __future__ import annotations

from dataclasses import replace

from coordinator.admission.model_admission import ModelAdmission
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolName, Worker
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import admission, entry, load, worker

FIT = registry_pb2.DecodeStepFit(base_ms=10, sequence_ms=10)
"""Four streams are what a target of 50 ms allows."""
TARGETS = {"due_s": 1.0, "tpot_slo_s": 0.05}


def on_host(name: str, pool: PoolName, slots: int = 64, **report: object) -> Worker:
    return replace(worker(name, pool, slots, lent_speedup=1.0, **report), host_id="h", paces_prompts=True)


def host_pair(slots: int = 64, *, hybrid: bool = True, **settings: object) -> ModelAdmission:
    workers = on_host("p0", "prefill"), on_host("d0", "decode", slots, step_fit=FIT)
    model = admission(workers, LoadLedger.of(workers), prefill_horizon_s=0.1, **settings)
    model.decode.hybrid = hybrid
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


def test_who_is_refused_rather_than_served_late_waits_where_it_is_forecast() -> None:
    model = host_pair()
    refusing = {**TARGETS, "ttft_slo_s": 1.0}
    assert [model.arrive(entry(900, **refusing), 0.0).started for _ in range(2)] == [True, False]


def test_a_prompt_without_a_target_is_beside_the_streams_that_there_are() -> None:
    """Prompts that wait at the decode worker are no streams: its clock keeps them back."""
    model = host_pair()
    waiting = [entry(**TARGETS) for _ in range(20)]
    assert all(model.arrive(one, 0.0).started for one in waiting)
    assert model.arrive(entry(), 0.0).started
    for one in waiting[:4]:
        model.sent(one, 1, 0.1)
    assert not model.arrive(entry(), 0.1).started
    assert model.held_by == "decode"
