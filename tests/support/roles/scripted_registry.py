"""A coordinator's registry that does what a test says: peers, ended writers, roles. It routes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from splitserve.rpc.server import RpcServer
from splitserve.v1 import registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceServicer, add_RegistryServiceServicer_to_server
from tests.support.cluster.real_cluster import COUNTS
from tests.support.waiting import PATIENCE_S

POLL_S = 0.01


@dataclass(eq=False)
class Member:
    """One boot of a worker."""

    registration: registry_pb2.RegisterRequest
    report: registry_pb2.ReportRequest = field(default_factory=registry_pb2.ReportRequest)
    roles: list[tuple[float, int]] = field(default_factory=list)
    """The roles that it has reported, whenever that has changed, with the time on `time.monotonic`."""
    said: asyncio.Queue[registry_pb2.ReportResponse | None] = field(default_factory=asyncio.Queue)

    @property
    def agent_id(self) -> str:
        return self.registration.endpoint.agent_id


class ScriptedRegistry(RegistryServiceServicer):
    """Workers register here. All are peers of each other."""

    def __init__(self, *, own_peers: bool = False) -> None:
        """`own_peers`: tells each worker of itself, too, which no coordinator should."""
        self.members: dict[str, Member] = {}
        self.ended: list[str] = []
        self.watch: Callable[[], None] = lambda: None
        """Called while it waits; raises if there is nothing to wait for any more."""
        self._own_peers = own_peers
        self._server = RpcServer()
        add_RegistryServiceServicer_to_server(self, self._server.grpc_server)

    async def start(self) -> str:
        """Returns its address."""
        return f"127.0.0.1:{await self._server.start('127.0.0.1', 0, [])}"

    async def stop(self) -> None:
        for member in self.members.values():
            member.said.put_nowait(None)
        await self._server.stop()

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Any
    ) -> registry_pb2.RegisterResponse:
        before = self.members.get(request.worker_id)
        if before is not None and before.registration.epoch != request.epoch:
            before.said.put_nowait(None)
        self.members[request.worker_id] = Member(request)
        return registry_pb2.RegisterResponse(coordinator_id="scripted")

    async def Report(  # type: ignore[override]
        self, requests: AsyncIterator[registry_pb2.ReportRequest], context: Any
    ) -> AsyncIterator[registry_pb2.ReportResponse]:
        first = await anext(requests)
        member = self.members[first.worker_id]
        self._take(member, first)
        reading = asyncio.create_task(self._read(member, requests))
        self.tell_peers()
        try:
            while (response := await member.said.get()) is not None:
                yield response
        finally:
            reading.cancel()

    def tell_peers(self) -> None:
        """Sends each worker its peers, and all that have ended."""
        for member in self.members.values():
            self.tell(member)

    def tell(self, member: Member, role: int = 0) -> None:
        """Sends one worker its peers, and a role to take, of whatever value."""
        peers = [
            other.registration.endpoint
            for other in self.members.values()
            if other is not member or self._own_peers
        ]
        response = registry_pb2.ReportResponse(peers=peers, ended_agent_ids=self.ended)
        response.role = role  # type: ignore[assignment]
        member.said.put_nowait(response)

    def lost(self, worker_id: str) -> None:
        """A worker's process has ended for certain."""
        member = self.members.pop(worker_id)
        member.said.put_nowait(None)
        self.ended.append(member.agent_id)
        self.tell_peers()

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Waits until what is known here meets a condition."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.watch()
            reports = {name: str(member.report) for name, member in self.members.items()}
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}\n{reports}"
            await asyncio.sleep(POLL_S)

    async def until_connected(self, count: int) -> None:
        """Waits until so many workers are there, and each can write to each other one."""

        def connected() -> bool:
            agents = {member.agent_id for member in self.members.values()}
            return len(agents) == count and all(
                set(member.report.connected_agent_ids) == agents - {member.agent_id}
                for member in self.members.values()
            )

        await self.until(connected, "all are connected")

    def held(self) -> dict[str, int]:
        """Everything that should be zero in the last reports and is not."""
        loads = {name: member.report.load for name, member in self.members.items()}
        held = {
            f"{name}.{count}": getattr(load, count)
            for name, load in loads.items()
            for count in COUNTS
            if getattr(load, count)
        }
        held |= {
            f"{name}.missing_free_blocks": load.total_blocks - load.free_blocks
            for name, load in loads.items()
            if load.total_blocks != load.free_blocks
        }
        return held

    async def assert_no_leaks(self) -> None:
        """The leak oracle: within a while every count of blocks, calls and sequences is back at zero."""
        await self.until(lambda: not self.held(), "nothing is held")

    async def _read(self, member: Member, requests: AsyncIterator[registry_pb2.ReportRequest]) -> None:
        async for request in requests:
            self._take(member, request)

    def _take(self, member: Member, report: registry_pb2.ReportRequest) -> None:
        member.report = report
        if not member.roles or member.roles[-1][1] != report.role:
            member.roles.append((time.monotonic(), report.role))


@asynccontextmanager
async def scripted_registry(*, own_peers: bool = False) -> AsyncIterator[tuple[ScriptedRegistry, str]]:
    """A registry and its address."""
    registry = ScriptedRegistry(own_peers=own_peers)
    address = await registry.start()
    try:
        yield registry, address
    finally:
        await registry.stop()
