"""One prefill worker process: the role, and `serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from engine.build import EngineParts
from engine.host import WorkerHost, WorkerRole
from kv_transfer.transport import TransferEndpoint
from prefill_worker.events import PrefillEvent
from prefill_worker.prefill_service import PrefillService
from prefill_worker.push_listener import PushListener
from splitserve.config import WorkerConfig
from splitserve.v1 import prefill_pb2, registry_pb2
from splitserve.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server

PEER_KEPT_S = 5.0
"""How long a decode pool that nobody names any more stays connected. When a coordinator dies, all its requests
are aborted, and the decode workers, which live on, are still to be told that nobody writes to them now."""


class PrefillRole(WorkerRole[PushListener]):
    """Connects to the decode pools that the coordinators name, and computes prompts."""

    pool = registry_pb2.POOL_PREFILL

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, dict[str, TransferEndpoint]] = {}

    def make_listener(self, parts: EngineParts, epoch: int) -> PushListener:
        """See WorkerRole."""
        return PushListener(parts, self._emit, self._on_peers_changed)

    def add_services(self, server: grpc.aio.Server, worker: WorkerHost[PushListener]) -> Sequence[str]:
        """See WorkerRole."""
        self._worker = worker
        self._service = PrefillService(worker)
        add_PrefillServiceServicer_to_server(self._service, server)
        return [prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name]

    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        """Connects to new decode pools and, a while later, fences those that no coordinator names any more."""
        before = self._wanted()
        self._peers[coordinator] = {peer.agent_id: peer for peer in peers}
        wanted = self._wanted()
        gone = before.keys() - wanted.keys()

        def apply(_core: object, pushes: PushListener) -> None:
            for agent_id in gone:
                pushes.retire(agent_id)
            for agent_id in wanted.keys() - pushes.targets():
                pushes.connect(wanted[agent_id])

        self._worker.engine.post(apply)
        for agent_id in gone:
            self._loop.call_later(PEER_KEPT_S, self._fence, agent_id)

    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        """Nobody writes to a prefill worker."""

    def rejected_handoffs(self) -> int:
        """See WorkerRole."""
        return self._service.rejected_tickets

    def connected_agents(self) -> Sequence[str]:
        """See WorkerRole."""
        return sorted(self._worker.listener.usable)

    def busy(self) -> bool:
        """See WorkerRole."""
        return self._service.busy or self._worker.listener.transfers_in_flight > 0

    def close(self) -> None:
        """See WorkerRole; prefill calls end with their requests."""

    def _wanted(self) -> dict[str, TransferEndpoint]:
        """The decode pools that any coordinator names, by agent id."""
        return {agent: peer for known in self._peers.values() for agent, peer in known.items()}

    def _fence(self, agent_id: str) -> None:
        if agent_id not in self._wanted():
            self._worker.engine.post(lambda _core, pushes: pushes.disconnect(agent_id))

    def _on_peers_changed(self) -> None:
        self._loop.call_soon_threadsafe(self._worker.report_now)

    def _emit(self, events: list[tuple[str, PrefillEvent]]) -> None:
        self._loop.call_soon_threadsafe(self._service.deliver, events)


async def serve(config: WorkerConfig) -> None:
    """Runs a prefill worker until SIGTERM or SIGINT."""
    await WorkerHost(config, PrefillRole()).run()
