"""The decode worker process: its role, and `serve`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import grpc

from decode_worker.decode_service import DecodeService
from decode_worker.kv_consumer import KvConsumer
from engine.worker.build import EngineParts
from engine.worker.process import WorkerProcess
from engine.worker.role import WorkerHost, WorkerRole
from kv_transfer.transports.poll_dealer import PollDealer
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.config.worker import WorkerConfig
from splitserve.rpc.carried_calls import CarriedMethod, decode_methods
from splitserve.v1 import decode_pb2, registry_pb2
from splitserve.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server


class DecodeRole(WorkerRole[KvConsumer]):
    """Takes reservations, and decodes the sequences whose KV arrives."""

    certificate = "decode"
    pool = registry_pb2.POOL_DECODE

    def __init__(self, worker: WorkerHost[KvConsumer], *, prefixes_only: bool = False) -> None:
        """`prefixes_only`: see DecodeService."""
        self._worker = worker
        self._service = DecodeService(worker, asyncio.get_running_loop(), prefixes_only=prefixes_only)

    def make_connector(
        self,
        parts: EngineParts,
        epoch: int,
        on_idle: Callable[[], None],
        polls: PollDealer | None = None,
    ) -> KvConsumer:
        """See WorkerRole. `polls`: of a connector that polls for this one, too."""
        return KvConsumer(parts, epoch, self._service.deliver, on_idle, self._worker.spans, polls)

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        """See WorkerRole."""
        add_DecodeServiceServicer_to_server(self._service, server)
        return [decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name]

    def carried_methods(self) -> Mapping[str, CarriedMethod]:
        """See WorkerRole."""
        return decode_methods(self._service)

    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        """Does nothing: decode workers write to nobody."""

    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        """Shortens the quarantine of blocks that these prefill workers were writing."""
        now = time.monotonic()
        self._worker.engine.post(lambda _core, consumer: consumer.writers_lost(agent_ids, now))

    def busy(self) -> bool:
        """See WorkerRole."""
        return self._service.reserving > 0 or self._worker.connector.status.in_progress > 0

    def close(self) -> None:
        """See WorkerRole."""
        self._service.close()


async def serve(config: WorkerConfig) -> None:
    """Runs a decode worker until SIGTERM or SIGINT."""
    await WorkerProcess(config, DecodeRole).run()
