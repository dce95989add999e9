"""What one peer or one fault may do to the loops of a coordinator: nothing that lasts."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from coordinator.health import failure_detector
from splitserve.errors import InvalidArgumentError
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceStub
from tests.support.cluster.fake_cluster import FakeCluster, ask, collect, fake_cluster
from tests.support.cluster.registrations import registration
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S


async def serves(cluster: FakeCluster) -> None:
    assert (await collect(cluster.client.Generate(ask(max_tokens=3), timeout=PATIENCE_S))).done


@pytest.mark.parametrize("address", ["a..b:1", "host:0", "-:1", "999.0.0.1:1", "[::x]:1", "ü:1", "a/b:1"])
async def test_a_worker_with_an_address_that_is_none_is_refused(address: str) -> None:
    async with fake_cluster() as cluster, make_channel(cluster.address) as channel:
        request = registration("odd", registry_pb2.ROLE_PREFILL, address)
        try:
            await RegistryServiceStub(channel).Register(request, timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as caught:
            error = error_from_rpc(caught)
            assert isinstance(error, InvalidArgumentError)
            assert error.field == "address"
        # Where it was let in, it leaves now.
        for worker in cluster.coordinator.registry.snapshot().workers:
            if worker.worker_id == "odd":
                cluster.coordinator.registry.drop(worker.key, "test")
        await asyncio.sleep(0.2)
        await serves(cluster)
        assert "odd" not in {w.worker_id for w in cluster.coordinator.registry.snapshot().workers}


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
