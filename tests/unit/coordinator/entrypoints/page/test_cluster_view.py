"""The cluster as JSON: bounded, with what came from workers as data only."""

from __future__ import annotations

from dataclasses import replace

from coordinator.entrypoints.openai.bodies import compact_json
from coordinator.entrypoints.page.cluster_view import (
    MAX_FLOWS,
    MAX_WORKERS,
    flows_view,
    models_view,
    scaling_view,
    workers_view,
)
from coordinator.telemetry.record_keeper import KvFlow
from coordinator.telemetry.request_stats import ModelStats
from coordinator.telemetry.scaling_service import WorkerStates
from coordinator.telemetry.scaling_timeline import ScalingTimeline
from coordinator.workers.registration import checked_worker
from coordinator.workers.rotation import NO_PLAN, RotationPlan
from coordinator.workers.snapshot import PoolSnapshot
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.cluster.registrations import registration
from tests.support.latency import latency as latency_of

DECODE = checked_worker(registration("d0", registry_pb2.ROLE_DECODE))
SNAPSHOT_BYTES = 400_000


def test_a_worker_is_a_row_with_its_last_report() -> None:
    load = registry_pb2.WorkerLoad(
        running_requests=3, total_blocks=10, free_blocks=4, latency=latency_of(step_ms=2.5)
    )
    snapshot, states = PoolSnapshot((replace(DECODE, load=load),)), WorkerStates()
    states.update(snapshot, 5.0)
    view = workers_view(snapshot, states, 8.0)
    (row,) = view["rows"]
    shown = dict(zip(view["columns"], row, strict=True))
    assert (shown["id"], shown["role"], shown["state"], shown["state_s"]) == ("d0", "decode", "starting", 3.0)
    assert (shown["running"], shown["total_blocks"], shown["free_blocks"], shown["step_ms"]) == (
        3,
        10,
        4,
        2.5,
    )


def test_a_worker_that_came_since_the_last_look_at_states_is_starting() -> None:
    view = workers_view(PoolSnapshot((DECODE,)), WorkerStates(), 8.0)
    assert view["rows"][0][view["columns"].index("state")] == "starting"


def test_many_workers_and_pairs_are_cut_and_counted() -> None:
    many = tuple(replace(DECODE, worker_id=f"d{number:06}") for number in range(MAX_WORKERS + 5))
    view = workers_view(PoolSnapshot(many), WorkerStates(), 0.0)
    assert (view["count"], len(view["rows"])) == (MAX_WORKERS + 5, MAX_WORKERS)
    assert len(compact_json(view)) < SNAPSHOT_BYTES
    flows = [KvFlow(f"p{number}", "d", 10, 1000) for number in range(MAX_FLOWS + 5)]
    shown = flows_view(flows)
    assert len(shown) == MAX_FLOWS
    assert shown[0] == ["p0", "d", 2.0, 200]


def test_a_model_shows_its_stages_and_hits() -> None:
    stats = ModelStats(looked_up_tokens=100, hit_tokens={"prefill": 25, "decode": 0})
    (view,) = models_view({"words": stats}, {})
    assert (view["model"], view["hits"]) == ("words", {"prefill": 0.25, "decode": 0.0})
    assert set(view["stages"]) == {"admitting", "reserving", "prefilling", "decoding"}


def test_the_latest_decision_comes_first_and_an_expired_plan_is_said() -> None:
    timeline = ScalingTimeline()
    for desired in (1, 2):
        decision = scaling_pb2.PoolDecision(pool=registry_pb2.POOL_DECODE, desired=desired, reason="why")
        timeline.add(scaling_pb2.ApplyPlanRequest(decisions=[decision]), float(desired))
    view = scaling_view(timeline, RotationPlan(expires_s=30.0), 10.0)
    assert (view["in_force"], view["expires_in_s"]) == (True, 20.0)
    assert [entry["desired"] for entry in view["entries"]] == [2, 1]
    assert [entry["desired"] for entry in view["latest"]] == [2]
    assert scaling_view(timeline, NO_PLAN, 10.0)["in_force"] is False
