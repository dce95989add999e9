"""A worker between two coordinators' registries, all in this process: who lets it sleep and who wakes it, and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.workers.registry import Registry
from coordinator.workers.registry_service import RegistryService
from coordinator.workers.rotation import checked_plan
from coordinator.workers.snapshot import Worker
from decode_worker.service import DecodeRole
from engine.worker.process import WorkerProcess
from splitserve.config.worker import WorkerConfig
from splitserve.rpc.server import make_server
from splitserve.security.certificates import write_certificates
from splitserve.security.server_tls import ServerTls
from splitserve.security.tls import files_in
from splitserve.v1 import scaling_pb2
from splitserve.v1.registry_pb2_grpc import add_RegistryServiceServicer_to_server
from tests.support.cluster.streams import eventually
from tests.support.waiting import LEAST_TIMEOUT_S

TURNS = 6
ALL = {"standby_worker_ids": ["d"], "sleeping_worker_ids": ["d"]}

pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)


class Side:
    """A coordinator's registry behind its service. It can be ended and begun anew at the same port."""

    def __init__(self, name: str, certs: Path | None = None) -> None:
        self.name, self.port = name, 0
        self._tls = None if certs is None else ServerTls(files_in(certs, "coordinator"))

    async def begin(self) -> None:
        async def load_tokenizer(_source: str) -> None:
            return

        self.registry, self.server = Registry(60.0), make_server()
        service = RegistryService(self.registry, self.name, load_tokenizer, mutual=self._tls is not None)
        add_RegistryServiceServicer_to_server(service, self.server.grpc_server)
        self.port = await self.server.start("127.0.0.1", self.port, [], tls=self._tls, mutual=True)

    def plan(self, **lists: list[str]) -> None:
        request = scaling_pb2.ApplyPlanRequest(**lists)
        request.valid_for.FromSeconds(3600)
        self.registry.apply_plan(checked_plan(request, asyncio.get_running_loop().time(), self.registry.plan))

    @property
    def worker(self) -> Worker | None:
        return next((each for each in self.registry.snapshot().workers if each.reported), None)

    async def until(self, *, sleeping: bool, in_rotation: bool) -> None:
        def is_so() -> bool:
            seen = self.worker
            return seen is not None and (seen.sleeping, seen.in_rotation) == (sleeping, in_rotation)

        await eventually(is_so, f"at {self.name} sleeping: {sleeping}, in rotation: {in_rotation}")


@asynccontextmanager
async def worker_of(*sides: Side, certs: Path | None = None) -> AsyncIterator[WorkerProcess[Any]]:
    settings: dict[str, Any] = {
        "worker_id": "d",
        "model": "simulated",
        "engine": {"kind": "simulated", "num_blocks": 256},
        "coordinators": [f"127.0.0.1:{side.port}" for side in sides],
        "heartbeat_s": 0.1,
        "tls": None if certs is None else {"directory": certs},
    }
    worker, stop = WorkerProcess(WorkerConfig(**settings), DecodeRole), asyncio.Event()
    running = asyncio.create_task(worker._run(stop))
    try:
        yield worker
    finally:
        stop.set()
        await running
        for side in sides:
            await side.server.stop(0)


async def test_it_sleeps_and_wakes_as_often_as_it_is_told_also_as_a_coordinator_goes() -> None:
    a, b = Side("a"), Side("b")
    for side in (a, b):
        await side.begin()
    async with worker_of(a, b) as worker:
        boots = {worker.epoch}
        for turn in range(TURNS):
            for side in (a, b):
                await side.until(sleeping=False, in_rotation=True)
            a.plan(**ALL)
            await a.until(sleeping=False, in_rotation=False)
            b.plan(**ALL)
            for side in (a, b):
                await side.until(sleeping=True, in_rotation=False)
            b.plan(active_worker_ids=["d"])
            await b.until(sleeping=False, in_rotation=True)
            await a.until(sleeping=False, in_rotation=False)
            boots.add(worker.epoch)
            if turn % 2:
                await b.server.stop(0)
                await a.until(sleeping=True, in_rotation=False)
                await b.begin()
                await b.until(sleeping=False, in_rotation=True)
            a.plan(active_worker_ids=["d"])
        assert len(boots) > TURNS


async def test_one_whose_certificate_is_renewed_wakes_at_once(tmp_path: Path) -> None:
    """The coordinator refuses another certificate while the boot before is registered: here for a minute."""
    write_certificates(tmp_path, ["127.0.0.1"], 30)
    side = Side("a", tmp_path)
    await side.begin()
    async with worker_of(side, certs=tmp_path) as worker:
        for _ in range(2):
            await side.until(sleeping=False, in_rotation=True)
            side.plan(**ALL)
            await side.until(sleeping=True, in_rotation=False)
            write_certificates(tmp_path, ["127.0.0.1"], 30, force=True)
            (files,) = worker._files.files
            await files.reload_in_thread()
            began_s = time.monotonic()
            side.plan(active_worker_ids=["d"])
            await side.until(sleeping=False, in_rotation=True)
            assert time.monotonic() - began_s < side.registry.heartbeat_timeout_s / 2
