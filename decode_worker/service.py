"""One decode worker process: the role, and `serve`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from decode_worker.decode_service import DecodeService
from decode_worker.receive_listener import Outputs, ReceiveListener
from engine.build import EngineParts
from engine.host import WorkerHost, WorkerRole
from kv_transfer.transport import TransferEndpoint
from splitserve.config import WorkerConfig
from splitserve.v1 import decode_pb2, registry_pb2
from splitserve.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server


class DecodeRole(WorkerRole[ReceiveListener]):
    """Takes reservations and decodes what arrives."""

    pool = registry_pb2.POOL_DECODE

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def make_listener(self, parts: EngineParts, epoch: int) -> ReceiveListener:
        """See WorkerRole."""
        return ReceiveListener(parts, epoch, self._emit)

    def add_services(self, server: grpc.aio.Server, worker: WorkerHost[ReceiveListener]) -> Sequence[str]:
        """See WorkerRole."""
        self._worker = worker
        self._service = DecodeService(worker, self._loop)
        add_DecodeServiceServicer_to_server(self._service, server)
        return [decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name]

    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        """Decode workers write to nobody."""

    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        """Shortens the quarantine of what these prefill workers held."""
        now = time.monotonic()
        self._worker.engine.post(lambda _core, receiver: receiver.writers_lost(agent_ids, now))

    def rejected_handoffs(self) -> int:
        """See WorkerRole."""
        return self._worker.listener.rejected_handoffs

    def connected_agents(self) -> Sequence[str]:
        """See WorkerRole."""
        return ()

    def busy(self) -> bool:
        """See WorkerRole."""
        return self._service.reserving > 0 or self._worker.listener.live_requests > 0

    def close(self) -> None:
        """See WorkerRole."""
        self._service.close()

    def _emit(self, outputs: Outputs) -> None:
        self._loop.call_soon_threadsafe(self._service.deliver, outputs)


async def serve(config: WorkerConfig) -> None:
    """Runs a decode worker until SIGTERM or SIGINT."""
    await WorkerHost(config, DecodeRole()).run()
