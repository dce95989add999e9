"""A worker's certificate names its pool, may name its id, and holds its id while the worker lives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from coordinator.service import Coordinator, running_coordinator
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.security import TlsConfig
from splitserve.errors import PermissionDeniedError, SplitserveError, UnavailableError
from splitserve.rpc.credentials import ClusterCredentials
from splitserve.rpc.status import error_from_rpc
from splitserve.security.certificates import worker_files, write_certificates
from splitserve.security.tls import TlsFiles, files_in
from splitserve.v1 import registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceStub
from tests.support.cluster.registrations import registration
from tests.support.engine.word_tokenizer import load_word_tokenizer
from tests.support.waiting import PATIENCE_S

PREFILL, DECODE, BOTH = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE, registry_pb2.ROLE_BOTH
OWN = ["d-1", "d-2", "p-1", "w-1"]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("certs")
    write_certificates(folder, ["127.0.0.1"], 30, workers=OWN)
    return folder


@asynccontextmanager
async def coordinator_of(certs: Path) -> AsyncIterator[Coordinator]:
    # Workers here do not report: only the test ends them.
    config = CoordinatorConfig(
        grpc_port=0, cluster_port=0, http_port=None, tls=TlsConfig(directory=certs), heartbeat_timeout_s=60
    )
    async with running_coordinator(config, load=load_word_tokenizer) as coordinator:
        yield coordinator


class Worker:
    """A worker's connection to the coordinator, with a certificate."""

    def __init__(self, coordinator: Coordinator, files: TlsFiles) -> None:
        self._address = f"127.0.0.1:{coordinator.cluster_port}"
        self._files = files

    async def register(
        self, worker_id: str, role: registry_pb2.Role.ValueType, epoch: int = 1
    ) -> SplitserveError | None:
        request = registration(worker_id, role, f"127.0.0.1:{10_000 + epoch}", epoch=epoch)
        async with ClusterCredentials(self._files).channel(self._address, "coordinator") as channel:
            try:
                await RegistryServiceStub(channel).Register(request, timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                return error_from_rpc(error)
        return None

    async def report(self, worker_id: str, epoch: int = 1) -> SplitserveError | None:
        async def reports() -> AsyncIterator[registry_pb2.ReportRequest]:
            yield registry_pb2.ReportRequest(worker_id=worker_id, epoch=epoch)

        async with ClusterCredentials(self._files).channel(self._address, "coordinator") as channel:
            call = RegistryServiceStub(channel).Report(reports(), timeout=PATIENCE_S)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                return error_from_rpc(error)
        return None


def registered(coordinator: Coordinator) -> dict[str, str]:
    return {worker.worker_id: worker.role for worker in coordinator.registry.snapshot().workers}


async def test_only_a_worker_s_certificate_registers_a_worker(certs: Path) -> None:
    """Of whichever role: it may change."""
    async with coordinator_of(certs) as coordinator:
        for role in ("coordinator", "autoscaler", "admin"):
            error = await Worker(coordinator, files_in(certs, role)).register("w", PREFILL)  # type: ignore[arg-type]
            assert isinstance(error, PermissionDeniedError)
        assert registered(coordinator) == {}
        worker = Worker(coordinator, files_in(certs, "worker"))
        for name, role in (("p", PREFILL), ("d", DECODE), ("w", BOTH)):
            assert await worker.register(name, role) is None
        assert registered(coordinator) == {"d": "decode", "p": "prefill", "w": "both"}


async def test_a_worker_s_own_certificate_registers_its_id_only(certs: Path) -> None:
    async with coordinator_of(certs) as coordinator:
        first = Worker(coordinator, worker_files(certs, "d-1"))
        for worker_id in ("d-2", "d-1x", "d", "p-1"):
            error = await first.register(worker_id, DECODE)
            assert isinstance(error, PermissionDeniedError)
            assert (error.reason, error.field) == ("WRONG_WORKER_ID", "worker_id")
        assert registered(coordinator) == {}
        assert await first.register("d-1", DECODE) is None


async def test_a_live_id_is_not_taken_over(certs: Path) -> None:
    async with coordinator_of(certs) as coordinator:
        owner = Worker(coordinator, worker_files(certs, "d-1"))
        others = [files_in(certs, "worker"), worker_files(certs, "p-1")]
        assert await owner.register("d-1", DECODE) is None
        for files in others:
            thief = Worker(coordinator, files)
            for pool, epoch in ((DECODE, 2), (DECODE, 1), (PREFILL, 2)):
                error = await thief.register("d-1", pool, epoch)
                assert isinstance(error, PermissionDeniedError | UnavailableError)
            error = await thief.report("d-1")
            assert isinstance(error, PermissionDeniedError)
            assert registered(coordinator) == {"d-1": "decode"}
        assert coordinator.registry.snapshot().workers[0].epoch == 1
        # Its own later boot replaces it at once.
        assert await owner.register("d-1", DECODE, 2) is None
        assert coordinator.registry.snapshot().workers[0].epoch == 2
        # Once it is gone, another certificate of a worker may have the id, such as a renewed one.
        coordinator.registry.drop(("d-1", 2), "test")
        assert await Worker(coordinator, files_in(certs, "worker")).register("d-1", DECODE, 3) is None


async def test_a_renewed_certificate_gets_its_id_back(certs: Path, tmp_path: Path) -> None:
    """Its earlier boot is still registered: the refusal is one that workers retry."""
    async with coordinator_of(certs) as coordinator:
        assert await Worker(coordinator, worker_files(certs, "d-2")).register("d-2", DECODE) is None
        for name in ("ca.pem", "ca-key.pem"):
            (tmp_path / name).write_bytes((certs / name).read_bytes())
        write_certificates(tmp_path, [], 30, workers=["d-2"])
        renewed = Worker(coordinator, worker_files(tmp_path, "d-2"))
        error = await renewed.register("d-2", DECODE, 2)
        assert isinstance(error, UnavailableError)
        assert error.reason == "WORKER_ID_TAKEN"
        coordinator.registry.drop(("d-2", 1), "silent")
        assert await renewed.register("d-2", DECODE, 2) is None
