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
        """Connects to new decode pools and fences those that no coordinator names any more."""
        self._peers[coordinator] = {peer.agent_id: peer for peer in peers}
        wanted = {agent: peer for known in self._peers.values() for agent, peer in known.items()}

        def apply(_core: object, pushes: PushListener) -> None:
            # Gone ones first: a restarted worker comes back at the same address under a new agent id.
            for agent_id in pushes.connected() - wanted.keys():
                pushes.disconnect(agent_id)
            for agent_id in wanted.keys() - pushes.connected():
                pushes.connect(wanted[agent_id])

        self._worker.engine.post(apply)

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

    def _on_peers_changed(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._worker.report_now())

    def _emit(self, events: list[tuple[str, PrefillEvent]]) -> None:
        self._loop.call_soon_threadsafe(self._service.deliver, events)


async def serve(config: WorkerConfig) -> None:
    """Runs a prefill worker until SIGTERM or SIGINT."""
    await WorkerHost(config, PrefillRole()).run()
