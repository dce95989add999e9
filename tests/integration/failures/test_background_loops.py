"""What one fault may do to the loops of a coordinator: nothing that lasts."""

from __future__ import annotations

import pytest

from coordinator.health import failure_detector
from tests.support.cluster.fake_cluster import FakeCluster, ask, collect, fake_cluster
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S


async def serves(cluster: FakeCluster) -> None:
    assert (await collect(cluster.client.Generate(ask(max_tokens=3), timeout=PATIENCE_S))).done


async def test_every_loop_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them raises once, at its next turn; the coordinator serves on, and its metrics tell."""
    failed: set[str] = set()

    def failing(owner: object, method: str) -> None:
        inner = getattr(owner, method)

        def raises_once(*args: object, **kwargs: object) -> object:
            if method not in failed:
                failed.add(method)
                raise RuntimeError(f"{method} fails once")
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, method, raises_once)

    monkeypatch.setattr(failure_detector, "is_refused", raising_once(failure_detector.is_refused, failed))
    async with fake_cluster(heartbeat_timeout_s=4.0) as cluster:
        coordinator = cluster.coordinator
        for owner, method in (
            (type(coordinator.clients), "_reconcile"),
            (type(coordinator.breakers), "_tick"),
            (type(coordinator.registry), "expire"),
            (coordinator.loop_lag, "computed_s"),
        ):
            failing(owner, method)
        await cluster.add_prefill("p9")
        await settled(lambda: "p9" in {w.worker_id for w in coordinator.registry.snapshot().workers})
        await cluster.prefills.pop().stop()
        await settled(lambda: len(failed) == 5)
        await settled(lambda: len(coordinator.registry._ended) == 1)
        await cluster.all_ready()
        await serves(cluster)
        counts = {sample.labels["loop"]: sample.value for sample in coordinator.loops.metric().samples}
        assert {name for name, count in counts.items() if count} == {
            "clients",
            "circuit_breakers",
            "expiry",
            "loop_lag",
            "probe",
        }


def raising_once(inner: object, failed: set[str]) -> object:
    async def is_refused(address: str) -> bool:
        if "is_refused" not in failed:
            failed.add("is_refused")
            raise UnicodeError("encoding with 'idna' codec failed (UnicodeError: label empty or too long)")
        return await inner(address)  # type: ignore[operator, no-any-return]

    return is_refused
