"""Policies beside the one in force: what they see, what is told of them, and that nothing comes of it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from autoscaler.control_loop import LoopSettings
from autoscaler.decide import make_decide
from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.policy_in_force import PolicyFile, PolicyInForce, shadows_of
from autoscaler.shadows.shadow import DECIDE_S, ShadowPolicy, Shadows
from autoscaler.shadows.shadow_metrics import shadow_metrics
from autoscaler.signals.observer import Observer
from autoscaler.snapshot import DecodeSignals, PrefillSignals, Replica, ReplicaState, Snapshot
from splitserve.errors import ConfigError
from tests.support.waiting import PATIENCE_S

LIVE = ScalingPlan(PoolPlan(1), PoolPlan(1))


def snapshot(now_s: float, prefill: int = 1, decode: int = 1) -> Snapshot:
    def there(pool: str, count: int) -> tuple[Replica, ...]:
        return tuple(Replica(f"{pool}-{number}", ReplicaState.READY, 0.0) for number in range(count))

    signals = PrefillSignals(there("p", prefill)), DecodeSignals(there("d", decode))
    return Snapshot(now_s, *signals, acting=True)


def values(shadows: Shadows) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in shadow_metrics(shadows)
        for sample in metric.samples
    }


def test_each_decides_with_a_memory_of_its_own_and_as_in_a_dry_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[str, Memory, bool]] = []

    def policy(name: str, wanted: int) -> ShadowPolicy:
        def decide(memory: Memory, at: Snapshot) -> tuple[ScalingPlan, Memory]:
            seen.append((name, memory, at.acting))
            plan = ScalingPlan(PoolPlan(wanted, 1, "more", "broke" if wanted > 4 else ""), PoolPlan(2), True)
            return plan, (memory or 0) + 1

        return ShadowPolicy(name, decide)

    shadows = Shadows([policy("a", 3), policy("b", 5)])
    assert values(shadows)[("splitserve_autoscaler_shadow_errors_total", "a")] == 0
    with caplog.at_level(logging.INFO):
        for now_s in (0.0, 5.0):
            shadows.look(snapshot(now_s), LIVE)
            assert all(one.settled(PATIENCE_S) for one in shadows.policies)
    assert sorted(seen[:2]) == [("a", None, False), ("b", None, False)]
    assert sorted(seen[2:]) == [("a", 1, False), ("b", 1, False)]
    told = values(shadows)
    assert told[("splitserve_autoscaler_shadow_desired_replicas", "a", "prefill")] == 3
    assert told[("splitserve_autoscaler_shadow_desired_replicas", "b", "decode")] == 2
    assert told[("splitserve_autoscaler_shadow_desired_standby", "b", "prefill")] == 1
    assert told[("splitserve_autoscaler_shadow_lending", "a")] == 1
    assert told[("splitserve_autoscaler_shadow_errors_total", "b")] == 2
    assert not list(shadow_metrics(Shadows()))
    # Both pools of both, once: what has not changed is for debugging.
    assert len(caplog.records) == 4


def test_a_shadow_decides_from_the_replicas_that_are_there() -> None:
    rules = parse_policy({"prefill": {"target_ms": 500, "max_replicas": 9}, "decode": {"target_ms": 50}})
    shadow = ShadowPolicy("slo", make_decide(rules))
    for now_s in range(0, 60, 5):
        shadow.look(snapshot(float(now_s), prefill=4), LIVE)
        assert shadow.settled(PATIENCE_S)
        assert shadow.plan is not None
        assert 1 <= shadow.plan.prefill.desired <= 4


def test_files(tmp_path: Path) -> None:
    def written(name: str, text: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    live = written("live", "{prefill: {target_ms: 500}, decode: {target_ms: 50}}")
    other = written("other", "{prefill: {target_ms: 500, slo: {history_s: 7200}}, decode: {target_ms: 50}}")
    shadows = shadows_of([live, other])
    assert [one.name for one in shadows.policies] == ["live", "other"]
    assert shadows.history_s == 7200
    assert shadows_of([]) == Shadows()
    in_force = PolicyInForce(PolicyFile(live), Observer([]), LoopSettings(), shadows)
    assert in_force.history_s == 7200
    assert PolicyInForce(PolicyFile(live), Observer([]), LoopSettings()).history_s < 7200
    with pytest.raises(ConfigError, match="two policies are named 'live'"):
        shadows_of([live, live])
    with pytest.raises(ConfigError, match="at most 8"):
        Shadows([ShadowPolicy(str(number), lambda memory, _: (LIVE, memory)) for number in range(9)])
    with pytest.raises(ConfigError, match="target_ms"):
        shadows_of([written("wrong", "{prefill: {target_ms: -1}, decode: {target_ms: 50}}")])


def test_one_that_never_returns_delays_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    began, may_end, now_s = threading.Event(), threading.Event(), [0.0]

    def stuck(memory: Memory, at: Snapshot) -> tuple[ScalingPlan, Memory]:
        began.set()
        may_end.wait()
        return LIVE, memory

    shadow = ShadowPolicy("stuck", stuck, clock=lambda: now_s[0])
    beside = ShadowPolicy("beside", lambda memory, _: (LIVE, (memory or 0) + 1))
    shadows = Shadows([shadow, beside])
    for at_s in (0.0, DECIDE_S, DECIDE_S + 1, DECIDE_S + 2):
        now_s[0] = at_s
        shadows.look(snapshot(at_s), LIVE)
        assert began.wait(PATIENCE_S)
        assert beside.settled(PATIENCE_S)
    assert (shadow.overdue, shadow.errors, shadow.plan) == (True, 1, None)
    assert (beside.plan, beside.errors) == (LIVE, 0)
    assert [record.getMessage() for record in caplog.records].count("shadow.overdue") == 1
    assert values(shadows)[("splitserve_autoscaler_shadow_overdue", "stuck")] == 1
    may_end.set()
    assert shadow.settled(PATIENCE_S)
    shadow.look(snapshot(20.0), LIVE)
    assert shadow.settled(PATIENCE_S)
    assert (shadow.overdue, shadow.plan, shadow.errors) == (False, LIVE, 1)


def test_one_that_raises_is_counted_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    def broken(memory: Memory, at: Snapshot) -> tuple[ScalingPlan, Memory]:
        raise ConfigError("no statsmodels")

    shadow = ShadowPolicy("broken", broken)
    for now_s in (0.0, 5.0):
        shadow.look(snapshot(now_s), LIVE)
        assert shadow.settled(PATIENCE_S)
    assert (shadow.errors, shadow.plan) == (2, None)
    assert [record.getMessage() for record in caplog.records] == ["shadow.failed"] * 2
