"""Classes of replicas in snapshots: as workers report them, and as the actuator knows them."""

from __future__ import annotations

import time

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.signals.observer import Observer
from autoscaler.snapshot import StepTimeModel
from splitserve.v1 import registry_pb2
from tests.support.scaling.signal_sources import Clock, FakeSource, worker


async def test_figures_are_kept_by_class() -> None:
    clock = Clock()
    source = FakeSource("c1", clock)
    rate = "prefill_tokens_per_second"
    fit = registry_pb2.DecodeStepFit(base_ms=20, sequence_ms=1)
    source.workers = [
        worker("p0", load={rate: 1000.0}, replica_class="small"),
        worker("p1", load={rate: 1200.0}, replica_class="small"),
        worker("p2", load={rate: 4000.0}, replica_class="big"),
        worker("p3", load={rate: 900.0}),
        # Neither of these is a part of what a replica of its class does: one starts, one leaves.
        worker("p5", load={rate: 1.0}, replica_class="big", state="starting"),
        worker("p6", load={rate: 1.0}, replica_class="big", preempted_in_seconds=20.0),
        worker("d0", load={"step_fit": fit}, replica_class="big", kv_capacity_tokens=5000),
    ]

    async def listed() -> list[ActualReplica]:
        ordered = ActualReplica("p4", "prefill", False, time.time(), replica_class="big")
        return [ordered, ActualReplica("p0", "prefill", False, 0.0)]

    seen = await Observer([source], listed, clock=clock).observe()
    rates = {name: (one.replicas, one.tokens_per_s) for name, one in seen.prefill.classes.items()}
    assert rates == {"": (1, 900.0), "big": (1, 4000.0), "small": (2, 1100.0)}
    big = seen.decode.classes["big"]
    assert (big.step, big.kv_capacity_tokens, big.max_running_requests) == (
        StepTimeModel(0.02, 0.001, 0.0),
        5000,
        64,
    )
    kinds = {one.name: one.replica_class for one in seen.prefill.replicas}
    assert kinds == {
        "p0": "small",
        "p1": "small",
        "p2": "big",
        "p3": "",
        "p4": "big",
        "p5": "big",
        "p6": "big",
    }


async def test_neutral_workers_stand_in_for_a_pool_without_any() -> None:
    """Else nothing would be known of that pool, which had to stay as it is."""
    clock = Clock()
    source = FakeSource("c1", clock)
    load = {"prefill_tokens_per_second": 1000.0}
    source.workers = [
        worker("d0", load=load, replica_class="big", neutral=True),
        worker("d1", load={"prefill_tokens_per_second": 9.0}, replica_class="small"),
    ]

    async def listed() -> list[ActualReplica]:
        return []

    seen = await Observer([source], listed, clock=clock).observe()
    assert {name: one.tokens_per_s for name, one in seen.prefill.classes.items()} == {"big": 1000.0}
    assert set(seen.decode.classes) == {"big", "small"}
