"""Recorded windows, replayed with other policies, in processes that may be killed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autoscaler.counterfactuals.recorded_window import RecordedWindow, recorded_window
from autoscaler.counterfactuals.replay import ReplayScore, replay_apart, replayed
from autoscaler.counterfactuals.score_metrics import score_metrics
from autoscaler.counterfactuals.scoring import ScoredPolicy, ShadowScoring
from autoscaler.decisions.attainment import AttainmentModel
from autoscaler.decisions.journal import DecisionJournal
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.reconcile import ReplicaView
from autoscaler.sharing.claims.shares import GPUS
from autoscaler.simulation.outcome import Slo
from autoscaler.snapshot import ReplicaState, Snapshot
from splitserve.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from tests.support.cluster.streams import eventually
from tests.support.scaling.snapshots import Load, snapshot
from tests.support.waiting import PATIENCE_S

POOL = "{{kind: schedule, min_replicas: {count}, max_replicas: {count}, gpus_per_replica: 2}}"
NEVER = """
from autoscaler.policies.recommendation import Recommendation

def decide(memory, snapshot, status):
    if not snapshot.arrivals:
        return Recommendation(1, "empty"), memory
    while True:
        pass
"""


def fixed(folder: Path, name: str, count: int) -> Path:
    path = folder / f"{name}.yaml"
    pool = POOL.format(count=count)
    path.write_text(f"{{prefill: {pool}, decode: {pool}}}")
    return path


def window(**changes: object) -> RecordedWindow:
    """Ten minutes of 10 requests a second: 10,000 prompt tokens a second, for replicas that compute 5000."""
    initial = {"prefill": 3, "decode": 3}
    return recorded_window(snapshot(**changes), 600.0, Slo(2.0, 0.1), initial, 60.0)  # type: ignore[arg-type]


def test_a_window_is_the_traffic_that_was_recorded() -> None:
    found = window()
    trace = found.scenario().trace
    assert (found.length_s, len(trace.requests)) == (600.0, 6000)
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert 599 < trace.duration_s < 600
    assert {(one.prompt_tokens, one.output_tokens) for one in trace.requests} == {(1000, 200)}
    assert found.engine.prompt_s(1000) == pytest.approx(0.2)
    assert RecordedWindow.from_json(found.to_json()) == found
    assert RecordedWindow.from_json(found.to_json()).scenario().trace == trace


def test_cached_tokens_make_a_replica_faster() -> None:
    arrivals = tuple(replace(one, uncached_tokens=one.prompt_tokens // 4) for one in snapshot().arrivals)
    assert window(arrivals=arrivals).engine.prompt_s(1000) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"arrivals": ()}, "no request arrived"),
        ({"load": Load(1000.0)}, "more than 200000 requests"),
        ({"prefill": 0, "decode": 0}, None),
        ({"decode_unmeasured": True}, "not measured"),
    ],
)
def test_what_cannot_be_replayed_is_said(changes: dict[str, object], what: str | None) -> None:
    if changes.pop("decode_unmeasured", False):
        changes["decode"] = 4
        at = snapshot()
        at = replace(at, decode=replace(at.decode, step=None))
    else:
        at = snapshot(**changes)  # type: ignore[arg-type]
    initial = {"prefill": 1, "decode": 1} if what else {"prefill": 0, "decode": 1}
    with pytest.raises(FailedPreconditionError, match=what or "a pool had no replica") as caught:
        recorded_window(at, 600.0, Slo(), initial, 60.0)
    assert caught.value.reason == "NOTHING_RECORDED"


def test_more_replicas_attain_more_and_cost_more(tmp_path: Path) -> None:
    few, many = (replayed(window(), fixed(tmp_path, str(count), count)) for count in (1, 4))
    assert few.requests == many.requests == 6000
    assert few.attainment < 0.2 < 0.99 < many.attainment
    assert few.replica_hours < many.replica_hours
    assert many.gpu_hours == pytest.approx(2 * many.replica_hours)


def test_a_model_that_shares_an_inventory_is_replayed_with_what_others_leave(tmp_path: Path) -> None:
    """Five replicas of each pool are wanted, of two GPUs each."""
    policy, alone = fixed(tmp_path, "five", 5), window(load=Load(1.0))
    shared = replace(alone, limits={GPUS: 12.0})
    assert RecordedWindow.from_json(shared.to_json()) == shared
    assert replayed(alone, policy).gpu_hours == pytest.approx(20 / 6, rel=0.1)
    assert replayed(shared, policy).gpu_hours == pytest.approx(12 / 6, rel=0.1)


@pytest.mark.slow
async def test_a_replay_in_a_process_of_its_own(tmp_path: Path) -> None:
    policy = fixed(tmp_path, "four", 4)
    # At the lowest priority it takes as long as a busy machine wants.
    assert await replay_apart(window(), policy, deadline_s=PATIENCE_S) == replayed(window(), policy)
    with pytest.raises(UnavailableError, match=r"replay of nowhere.yaml: .*nowhere") as caught:
        await replay_apart(window(), tmp_path / "nowhere.yaml")
    assert caught.value.reason == "REPLAY_FAILED"


async def test_a_replay_that_never_ends_is_killed(tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text(NEVER)
    pool = "{kind: custom, function: never.py:decide}"
    policy = tmp_path / "never.yaml"
    policy.write_text(f"{{prefill: {pool}, decode: {{target_ms: 50}}}}")
    others = set(psutil.Process().children())  # of tests before this one
    with pytest.raises(DeadlineExceededError, match=r"never.yaml: not done within 1 s"):
        await replay_apart(window(), policy, deadline_s=1.0)
    for begun in (False, True):
        given_up = asyncio.create_task(replay_apart(window(), policy))
        await asyncio.sleep(0)
        if begun:
            await eventually(lambda: set(psutil.Process().children()) - others, "the replay has begun")
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert not set(psutil.Process().children()) - others


def journal(*at: Snapshot) -> DecisionJournal:
    rules = parse_policy({"prefill": {"target_ms": 700}, "decode": {"kind": "schedule"}})
    found = DecisionJournal(AttainmentModel(rules))
    there = [ReplicaView(f"p-{number}", ReplicaState.READY, 0.0, 0.0) for number in range(2)]
    for one in at:
        pools = {"prefill": there, "decode": there[:1]}
        found.enter(one, ScalingPlan(PoolPlan(2), PoolPlan(1)), pools, (), acted=True)  # type: ignore[arg-type]
    return found


async def test_all_policies_are_scored_on_the_same_window(tmp_path: Path) -> None:
    live = ScoredPolicy("in_force", tmp_path / "policy.yaml")
    broken = ScoredPolicy("shadow", tmp_path / "broken.yaml")
    cheaper = ScoredPolicy("shadow", tmp_path / "policy.yaml")
    asked: list[RecordedWindow] = []

    async def replay(recorded: RecordedWindow, path: Path) -> ReplayScore:
        asked.append(recorded)
        if path == broken.path:
            raise DeadlineExceededError("it never ends")
        return ReplayScore(6000, 0.97, 1.5, 3.0)

    scoring = ShadowScoring(journal(snapshot()), [live, broken, cheaper], 600.0, replay)
    await scoring.score()
    assert asked[0] == asked[1] == asked[2]
    assert (asked[0].slo, asked[0].initial) == (Slo(0.7, Slo().tpot_s), {"prefill": 2, "decode": 1})
    assert [(one["policy"], one["role"]) for one in scoring.document()] == [
        ("policy", "in_force"),
        ("policy", "shadow"),
    ]
    found = {
        (sample.name.removeprefix("splitserve_autoscaler_"), *sample.labels.values()): sample.value
        for metric in score_metrics(scoring)
        for sample in metric.samples
    }
    assert found["replayed_attainment", "policy", "in_force"] == 0.97
    assert found["replayed_replica_hours", "policy", "shadow"] == 1.5
    assert found["replayed_gpu_hours", "policy", "shadow"] == 3.0
    assert found["replay_failures_total", "broken", "shadow"] == 1
    assert found["replay_failures_total", "policy", "in_force"] == 0
    assert ("replayed_attainment", "broken", "shadow") not in found


async def test_nothing_is_replayed_without_shadows_or_traffic() -> None:
    async def replay(recorded: RecordedWindow, path: Path) -> ReplayScore:
        raise AssertionError("nothing to replay")

    none = ShadowScoring(journal(snapshot()), [], 600.0, replay)
    await none.score()
    assert not list(score_metrics(none))
    policies = [ScoredPolicy("shadow", Path("a.yaml"))]
    for kept in (DecisionJournal(), journal(replace(snapshot(), arrivals=()))):
        scoring = ShadowScoring(kept, policies, 600.0, replay)
        await scoring.score()
        assert not scoring.scores


def test_a_policy_with_classes_is_replayed_with_them(tmp_path: Path) -> None:
    """Two units in each pool: a large replica, for which four GPUs are counted."""
    path = tmp_path / "classes.yaml"
    large = "{name: large, price_per_hour: 1, speed: 2, gpus_per_replica: 4}"
    classes = f"[{large}, {{name: small, price_per_hour: 1}}]"
    pool = f"{{kind: schedule, min_replicas: 2, max_replicas: 2, classes: {classes}}}"
    path.write_text(f"prefill: {pool}\ndecode: {pool}\n")
    at = snapshot(load=Load(2.0))
    found = replayed(recorded_window(at, 60.0, Slo(), {"prefill": 2, "decode": 2}, 60.0), path)
    assert found.attainment > 0.9
    assert found.gpu_hours == pytest.approx(4 * found.replica_hours)
    assert found.replica_hours == pytest.approx(2 * 60 / 3600, rel=0.3)
