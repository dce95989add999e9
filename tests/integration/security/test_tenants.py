"""Tenants at a running coordinator: keys, quotas with hints that work, bounds, models, admin, reload (case 22)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from coordinator.telemetry.tenant_metrics import tenant_metrics
from splitserve.errors import (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SplitserveError,
    UnauthenticatedError,
)
from splitserve.rpc.status import error_from_rpc
from splitserve.security.api_keys import key_hash, key_metadata, new_key
from splitserve.v1 import generation_pb2, inference_pb2, routes_pb2, scaling_pb2
from splitserve.v1.routes_pb2_grpc import RoutesServiceStub
from splitserve.v1.scaling_pb2_grpc import ScalingServiceStub
from tests.support.cluster.fake_cluster import (
    Collected,
    FakeCluster,
    ask,
    collect,
    fake_cluster,
    finish,
    read,
)
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

KEYS = {name: new_key() for name in ("alice", "bob", "root")}
MODEL = "words"


def write(folder: Path, **tenants: dict[str, Any]) -> Path:
    path = folder / "tenants.yaml"
    listed = [{"name": name, "key_hashes": [key_hash(KEYS[name])], **rest} for name, rest in tenants.items()]
    path.write_text(yaml.safe_dump({"tenants": listed}))
    return path


@asynccontextmanager
async def tenants_cluster(folder: Path, **tenants: dict[str, Any]) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(tenants=write(folder, **tenants)) as cluster:
        yield cluster


async def answer(
    cluster: FakeCluster, name: str, request: inference_pb2.GenerateRequest | None = None
) -> Collected:
    call = cluster.client.Generate(request or ask(), timeout=PATIENCE_S, metadata=key_metadata(KEYS[name]))
    return await collect(call)


async def refused(
    cluster: FakeCluster,
    name: str | None,
    request: inference_pb2.GenerateRequest | None = None,
    metadata: Any = None,
) -> SplitserveError:
    metadata = metadata if name is None else key_metadata(KEYS[name])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(cluster.client.Generate(request or ask(), timeout=PATIENCE_S, metadata=metadata))
    return error_from_rpc(caught.value)


async def until_refused(cluster: FakeCluster, name: str) -> tuple[SplitserveError, int]:
    """Asks until it is refused, and how many were served before: none, unless the machine stood still meanwhile."""
    served = 0
    while True:
        try:
            await answer(cluster, name)
        except grpc.aio.AioRpcError as caught:
            return error_from_rpc(caught), served
        served += 1


async def test_no_key_and_wrong_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = new_key()
    garbage: list[tuple[tuple[str, str | bytes], ...]] = [
        (("authorization", f"Bearer {wrong}"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Basic {wrong}"),),
        (("x-api-key", wrong),),
        (("x-api-key", ""),),
        (("authorization-bin", b"\x00\xff"), ("x-api-key-bin", KEYS["alice"].encode())),
        (("x-api-key", "k" * 5000),),
    ]
    async with tenants_cluster(tmp_path, alice={}) as cluster:
        assert isinstance(await refused(cluster, None), UnauthenticatedError)
        for metadata in garbage:
            error = await refused(cluster, None, metadata=metadata)
            assert isinstance(error, UnauthenticatedError), metadata
            assert wrong not in error.message
        # gRPC itself takes no metadata of that size.
        error = await refused(cluster, None, metadata=(("x-api-key", "k" * 2**20),))
        assert isinstance(error, ResourceExhaustedError | UnauthenticatedError)
        for key in (("authorization", f"bearer {KEYS['alice']}"), ("x-api-key", KEYS["alice"])):
            assert (await collect(cluster.client.Generate(ask(), timeout=PATIENCE_S, metadata=(key,)))).done
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.client.ListModels(inference_pb2.ListModelsRequest(), timeout=PATIENCE_S)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        metrics = str(cluster.coordinator.metrics())
    for text in (metrics, caplog.text, *(str(record.__dict__) for record in caplog.records)):
        assert wrong not in text
        assert KEYS["alice"] not in text


@pytest.mark.slow
async def test_who_waits_as_told_is_served(tmp_path: Path) -> None:
    limits = {"requests_per_second": 0.4, "burst_seconds": 2.5}
    async with tenants_cluster(tmp_path, alice=limits, bob={}) as cluster:
        began_s = time.monotonic()
        await answer(cluster, "alice")
        served = 4
        for _ in range(3):
            error, more = await until_refused(cluster, "alice")
            served += more
            assert isinstance(error, ResourceExhaustedError)
            assert (error.reason, error.field) == ("TENANT_QUOTA", "requests_per_second")
            assert error.retry_after_s is not None
            assert 0 < error.retry_after_s <= 2.5
            await answer(cluster, "bob")
            await asyncio.sleep(error.retry_after_s)
            await answer(cluster, "alice")
        tenants = cluster.coordinator.access.tenants
        assert tenants is not None
        samples = {
            (sample.labels["tenant"], sample.labels["outcome"]): sample.value
            for family in tenant_metrics(tenants)
            for sample in family.samples
            if "outcome" in sample.labels
        }
        assert samples["alice", "refused"] == 3
        assert samples["alice", "completed"] == served <= 2 + 0.4 * (time.monotonic() - began_s)
        assert samples["bob", "completed"] == 3
        # What a quota keeps out is no demand that an autoscaler should follow.
        assert cluster.coordinator.stats.of(MODEL).requests == served + 3


async def test_output_is_charged_while_it_is_sent(tmp_path: Path) -> None:
    limits = {"output_tokens_per_second": 4, "burst_seconds": 1}
    async with tenants_cluster(tmp_path, alice=limits) as cluster:
        await answer(cluster, "alice", ask(max_tokens=20))
        error = await refused(cluster, "alice")
        assert error.field == "output_tokens_per_second"
        assert error.retry_after_s is not None
        assert 1 < error.retry_after_s <= 4
        await asyncio.sleep(error.retry_after_s)
        await answer(cluster, "alice", ask(max_tokens=1))


async def test_bounds_and_their_default(tmp_path: Path) -> None:
    async with tenants_cluster(tmp_path, alice={"max_prompt_tokens": 4, "max_output_tokens": 5}) as cluster:
        error = await refused(cluster, "alice", ask(max_tokens=6))
        assert isinstance(error, InvalidArgumentError)
        assert error.field == "stop.max_tokens"
        assert "at most 5" in error.message
        error = await refused(cluster, "alice", ask(max_tokens=5, text="w1 w2 w3 w4 w5"))
        assert isinstance(error, InvalidArgumentError)
        assert error.field == "prompt.text"
        open_end = inference_pb2.GenerateRequest(text="w1 w2", stop=generation_pb2.StopParams())
        assert len((await answer(cluster, "alice", open_end)).token_ids) == 5


async def test_other_models_do_not_exist(tmp_path: Path) -> None:
    async with tenants_cluster(tmp_path, alice={"models": ["mine-*"]}, bob={"models": ["wor*"]}) as cluster:
        hidden = await refused(cluster, "alice", ask(model=MODEL))
        absent = await refused(cluster, "bob", ask(model="other"))
        assert isinstance(hidden, NotFoundError)
        assert isinstance(absent, NotFoundError)
        assert hidden.message.replace(MODEL, "other") == absent.message
        assert (hidden.reason, hidden.field) == (absent.reason, absent.field)
        assert isinstance(await refused(cluster, "alice", ask()), NotFoundError)
        assert (await answer(cluster, "bob", ask(model=MODEL))).done
        names = {}
        for name in ("alice", "bob"):
            response = await cluster.client.ListModels(
                inference_pb2.ListModelsRequest(), timeout=PATIENCE_S, metadata=key_metadata(KEYS[name])
            )
            names[name] = [model.name for model in response.models]
        assert names == {"alice": [], "bob": [MODEL]}


async def test_the_cluster_is_for_admins(tmp_path: Path) -> None:
    async with (
        tenants_cluster(tmp_path, alice={}, root={"admin": True}) as cluster,
        grpc.aio.insecure_channel(cluster.address) as channel,
    ):
        scaling, routes = ScalingServiceStub(channel), RoutesServiceStub(channel)
        for name, code in (
            ("alice", grpc.StatusCode.PERMISSION_DENIED),
            (None, grpc.StatusCode.UNAUTHENTICATED),
        ):
            metadata = key_metadata(KEYS[name] if name else None)
            for call in (
                cluster.client.GetServerInfo(inference_pb2.GetServerInfoRequest(), metadata=metadata),
                scaling.GetSignals(scaling_pb2.GetSignalsRequest(), metadata=metadata),
                scaling.ApplyPlan(scaling_pb2.ApplyPlanRequest(), metadata=metadata),
                scaling.ReportEnded(scaling_pb2.ReportEndedRequest(), metadata=metadata),
                routes.GetRoutes(routes_pb2.GetRoutesRequest(), metadata=metadata),
                routes.SetRoutes(routes_pb2.SetRoutesRequest(), metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() == code
        assert PermissionDeniedError.code == grpc.StatusCode.PERMISSION_DENIED
        metadata = key_metadata(KEYS["root"])
        await cluster.client.GetServerInfo(inference_pb2.GetServerInfoRequest(), metadata=metadata)
        await scaling.GetSignals(scaling_pb2.GetSignalsRequest(), metadata=metadata)
        await routes.SetRoutes(routes_pb2.SetRoutesRequest(), metadata=metadata)


async def test_a_reload_drops_no_stream(tmp_path: Path) -> None:
    async with tenants_cluster(tmp_path, alice={}, bob={}) as cluster:
        cluster.decodes[0].pause_at = 3
        call = cluster.client.Generate(ask(), timeout=PATIENCE_S, metadata=key_metadata(KEYS["alice"]))
        held = Collected()
        await read(call, held, 3)
        write(tmp_path, bob={})
        os.kill(os.getpid(), signal.SIGHUP)
        tenants = cluster.coordinator.access.authenticator
        await settled(lambda: not _knows(tenants, "alice"))
        (tmp_path / "tenants.yaml").write_text("tenants: nothing")
        os.kill(os.getpid(), signal.SIGHUP)
        assert isinstance(await refused(cluster, "alice"), UnauthenticatedError)
        cluster.decodes[0].pause_at = None
        cluster.decodes[0].let_go()
        assert (await finish(call, held)).done
        await answer(cluster, "bob")
        # Without a signal the file is looked at, too.
        write(tmp_path, alice={})
        await settled(lambda: _knows(tenants, "alice"))


def _knows(tenants: Any, name: str) -> bool:
    try:
        return bool(tenants.caller(KEYS[name]))
    except UnauthenticatedError:
        return False
