"""A cluster of real processes with mutual TLS, and one with a cluster token: it works, and strangers are refused."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitserve.client import AsyncClient
from splitserve.client.scaling_client import ScalingClient
from splitserve.errors import (
    FailedPreconditionError,
    PermissionDeniedError,
    SplitserveError,
    UnauthenticatedError,
    UnavailableError,
)
from splitserve.rpc.credentials import ClusterCredentials
from splitserve.rpc.status import error_from_rpc
from splitserve.security.api_keys import key_hash, new_key
from splitserve.security.certificates import write_certificates
from splitserve.security.tls import Role, TlsFiles, files_in
from splitserve.v1 import decode_pb2, prefill_pb2, registry_pb2
from splitserve.v1.calls_pb2_grpc import CallServiceStub
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from splitserve.v1.prefill_pb2_grpc import PrefillServiceStub
from splitserve.v1.registry_pb2_grpc import RegistryServiceStub
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import worker
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(120)

TOKEN = "a-token-for-this-test"
SLOW = ["--simulated-step-s", "0.02"]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("certs")
    write_certificates(folder, ["127.0.0.1"], 30)
    return folder


@pytest.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory, certs: Path) -> AsyncIterator[Cluster]:
    async with running(Cluster(tmp_path_factory.mktemp("logs"), tls=certs)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def closed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    environment = {"SPLITSERVE_CLUSTER_TOKEN": TOKEN}
    async with running(Cluster(tmp_path_factory.mktemp("logs"), environment=environment)) as cluster:
        yield cluster


async def addresses(cluster: Cluster) -> tuple[str, str]:
    """Of the prefill and of the decode worker."""
    async with cluster.client() as client:
        info = await client.server_info()
    return worker(info, "prefill-0").address, worker(info, "decode-0").address


async def error_of(answer: Awaitable[object]) -> SplitserveError:
    """What a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return error_from_rpc(caught.value)


async def errors_at_workers(cluster: Cluster, stranger: ClusterCredentials) -> list[SplitserveError]:
    """What the workers' calls say to a stranger."""
    prefill, decode = await addresses(cluster)
    given: Any = {"timeout": PATIENCE_S, "metadata": stranger.metadata}
    async with stranger.channel(prefill, "worker") as to_prefill, stranger.channel(decode, "worker") as to:
        stub = DecodeServiceStub(to)
        abort = decode_pb2.AbortRequest(request_id="r", coordinator_id="c")
        outputs = decode_pb2.StreamOutputsRequest(coordinator_id="c")
        return [
            await error_of(
                PrefillServiceStub(to_prefill).Prefill(prefill_pb2.PrefillRequest(), **given).read()
            ),
            await error_of(stub.Reserve(decode_pb2.ReserveRequest(), **given)),
            await error_of(stub.Abort(abort, **given)),
            await error_of(stub.StreamOutputs(outputs, **given).read()),
            # Without a message, as the registry's below.
            await error_of(CallServiceStub(to).Carry(**given).read()),
        ]


async def errors_at_registry(target: str, stranger: ClusterCredentials) -> list[SplitserveError]:
    """What the coordinator says to a worker that is none."""
    given: Any = {"timeout": PATIENCE_S, "metadata": stranger.metadata}
    async with stranger.channel(target, "coordinator") as channel:
        stub = RegistryServiceStub(channel)
        return [
            await error_of(stub.Register(registry_pb2.RegisterRequest(worker_id="x"), **given)),
            # Without a message: grpc.aio loses the status where a write meets the end of the call.
            await error_of(stub.Report(**given).read()),
        ]


def part(certs: Path, role: Role) -> ClusterCredentials:
    return ClusterCredentials(files_in(certs, role))


async def serves(cluster: Cluster) -> None:
    async with cluster.client() as client:
        answer = await client.generate("hello", max_tokens=5)
    assert len(answer.token_ids) == 5
    assert answer.served_by.decode_worker
    await cluster.assert_no_leaks()


async def test_tls_from_client_to_workers(secured: Cluster, certs: Path) -> None:
    await serves(secured)
    async with secured.client(tls=TlsFiles(certs / "ca.pem")) as client:
        await client.wait_ready(PATIENCE_S)


async def test_roles_at_the_workers(secured: Cluster, certs: Path) -> None:
    for role in ("worker", "client", "autoscaler"):
        for error in await errors_at_workers(secured, part(certs, role)):
            assert isinstance(error, PermissionDeniedError)
            assert error.reason == "WRONG_ROLE"
    await serves(secured)


async def test_certificates_that_workers_do_not_take(secured: Cluster, certs: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    write_certificates(foreign, [], 30)
    old = tmp_path / "old"
    shutil.copytree(certs, old)
    write_certificates(old, [], 1, force=True, now=datetime.now(UTC) - timedelta(days=2))
    own = files_in(foreign, "coordinator")
    for stranger in (
        ClusterCredentials(),
        ClusterCredentials(TlsFiles(certs / "ca.pem")),
        ClusterCredentials(TlsFiles(certs / "ca.pem", own.certificate, own.key)),
        ClusterCredentials(files_in(old, "coordinator")),
        ClusterCredentials(own),
    ):
        for error in await errors_at_workers(secured, stranger):
            assert isinstance(error, UnavailableError)
    await serves(secured)


async def test_roles_at_the_coordinator(secured: Cluster, certs: Path) -> None:
    for error in await errors_at_registry(secured.parts_target, part(certs, "client")):
        assert isinstance(error, PermissionDeniedError)
    # Where clients call, nobody shows a certificate, so nobody is a worker there.
    for error in await errors_at_registry(secured.target, part(certs, "worker")):
        assert isinstance(error, PermissionDeniedError)
        assert "no certificate of a role" in error.message
    for role in ("autoscaler", "admin"):
        async with ScalingClient(
            secured.parts_target, security=part(certs, role), timeout_s=PATIENCE_S
        ) as scaling:  # type: ignore[arg-type]
            assert (await scaling.signals()).models
    async with ScalingClient(
        secured.parts_target, security=part(certs, "worker"), timeout_s=PATIENCE_S
    ) as scaling:
        with pytest.raises(PermissionDeniedError):
            await scaling.apply_plan(standby=["prefill-0"])
    async with ScalingClient(
        secured.target, security=part(certs, "autoscaler"), timeout_s=PATIENCE_S
    ) as scaling:
        assert (await scaling.signals()).models
        with pytest.raises(PermissionDeniedError):
            await scaling.apply_plan(standby=["prefill-0"])


async def test_an_autoscaler_with_its_certificate(secured: Cluster, certs: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("{interval_s: 0.2, prefill: {target_ms: 500}, decode: {target_ms: 50}}")
    options = ["--policy", str(policy), "--coordinator", secured.parts_target, "--tls", str(certs)]
    autoscaler = ServiceProcess("autoscaler", ["autoscaler", *options], tmp_path)
    autoscaler.start()
    try:
        decided = await asyncio.to_thread(autoscaler.wait_event, "scaling.decided")
        assert decided["replicas"] == {"ready": 1}
    finally:
        assert autoscaler.terminate() == 0


async def test_clients_that_trust_nobody_or_another_authority(
    secured: Cluster, certs: Path, tmp_path: Path
) -> None:
    write_certificates(tmp_path, [], 30)
    for files in (None, TlsFiles(), TlsFiles(tmp_path / "ca.pem")):
        async with AsyncClient(secured.target, tls=files) as client:
            with pytest.raises(UnavailableError) as caught:
                await client.models()
        assert caught.value.reason == ("TLS_FAILED" if files else "UNREACHABLE")
    # A worker's address with a worker's certificate is no coordinator to a client.
    prefill, _ = await addresses(secured)
    async with AsyncClient(prefill, tls=files_in(certs, "client")) as client:
        with pytest.raises((UnavailableError, FailedPreconditionError)):
            await client.models()


async def test_a_worker_with_a_foreign_certificate_stays_out(
    secured: Cluster, certs: Path, tmp_path: Path
) -> None:
    """A client's certificate makes nobody a worker; an expired one is not even tried."""
    swapped = tmp_path / "swapped"
    shutil.copytree(certs, swapped)
    for suffix in (".pem", "-key.pem"):
        shutil.copy(certs / f"client{suffix}", swapped / f"worker{suffix}")
    arguments = ["decode-worker", "--worker-id", "odd", "--coordinator", secured.parts_target]
    arguments += ["--model", "simulated", "--engine", "simulated", "--tls", str(swapped)]
    odd = ServiceProcess("odd", arguments, tmp_path)
    odd.start()
    assert await asyncio.to_thread(odd.process.wait, PATIENCE_S) != 0
    assert "only worker may call this" in odd.log_tail()
    assert "Traceback" not in odd.log_tail()
    write_certificates(swapped, [], 1, force=True, now=datetime.now(UTC) - timedelta(days=2))
    odd.start()
    assert await asyncio.to_thread(odd.process.wait, PATIENCE_S) != 0
    assert "expired on" in odd.log_tail()


async def test_a_killed_worker_is_proved_dead_under_tls(certs: Path, log_dir: Path) -> None:
    cluster = Cluster(log_dir, tls=certs, prefill=2, worker_options=SLOW)
    async with running(cluster):
        address, _ = await addresses(cluster)
        cluster.members["prefill-0"].kill()
        ended = await asyncio.to_thread(cluster.members["coordinator"].wait_event, "worker.ended")
        assert ended["worker_id"] == "prefill-0"
        async with cluster.client() as client:
            assert len((await client.generate("hello", max_tokens=3)).token_ids) == 3
        assert address


async def test_a_cluster_token_keeps_strangers_out(closed: Cluster) -> None:
    await serves(closed)
    for stranger in (ClusterCredentials(), ClusterCredentials(token="not-the-token-of-it")):
        for error in await errors_at_workers(closed, stranger):
            assert isinstance(error, UnauthenticatedError)
            assert error.reason == "CLUSTER_TOKEN"
        for error in await errors_at_registry(closed.target, stranger):
            assert isinstance(error, UnauthenticatedError)
        async with ScalingClient(closed.target, security=stranger, timeout_s=PATIENCE_S) as scaling:
            with pytest.raises(UnauthenticatedError):
                await scaling.apply_plan(standby=["prefill-0"])
    async with ScalingClient(closed.target, timeout_s=PATIENCE_S) as anybody:
        assert (await anybody.signals()).models
    async with ScalingClient(
        closed.target, security=ClusterCredentials(token=TOKEN), timeout_s=PATIENCE_S
    ) as scaling:
        assert (await scaling.signals()).models
    for member in closed.members.values():
        assert TOKEN not in member.log_path.read_text()
    await serves(closed)


async def test_a_worker_without_the_token_ends_with_one_line(closed: Cluster, tmp_path: Path) -> None:
    arguments = ["decode-worker", "--worker-id", "odd", "--coordinator", closed.target]
    arguments += ["--model", "simulated", "--engine", "simulated"]
    odd = ServiceProcess("odd", arguments, tmp_path)
    odd.start()
    assert await asyncio.to_thread(odd.process.wait, PATIENCE_S) != 0
    assert "no or a wrong cluster token" in odd.log_tail()
    assert "Traceback" not in odd.log_tail()


async def test_up_with_tls_and_tenants(certs: Path, tmp_path: Path) -> None:
    """One command: its own probe gets through, clients need a key, workers are closed by a token of their own."""
    key = new_key()
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f'tenants: [{{name: ops, admin: true, key_hashes: ["{key_hash(key)}"]}}]')
    command = ["up", "--engine", "simulated", "--grpc-port", "0", "--http-port", "0"]
    command += ["--tls", str(certs), "--tenants", str(tenants)]
    supervisor = ServiceProcess("up", command, tmp_path)
    supervisor.start()
    try:
        line = await asyncio.to_thread(_ready_line, supervisor)
        assert f"--tls {certs}" in line
        target = line.split()[3]
        authority = TlsFiles(certs / "ca.pem")
        async with AsyncClient(target, tls=authority, api_key=key) as client:
            assert len((await client.generate("hello", max_tokens=3)).token_ids) == 3
            prefill = worker(await client.server_info(), "prefill-0").address
        async with AsyncClient(target, tls=authority) as client:
            with pytest.raises(UnauthenticatedError):
                await client.models()
        async with part(certs, "coordinator").channel(prefill, "worker") as channel:
            call = PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest(), timeout=PATIENCE_S)
            assert (await error_of(call.read())).reason == "CLUSTER_TOKEN"
    finally:
        assert supervisor.terminate() == 0
    assert key not in supervisor.log_path.read_text()


def _ready_line(supervisor: ServiceProcess) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and supervisor.process.poll() is None:
        for line in supervisor.log_path.read_text().splitlines():
            if line.startswith("splitserve ready on "):
                return line
        time.sleep(0.05)
    raise AssertionError(supervisor.log_tail())
