"""The prefill worker process: its role, and `serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import grpc

from engine.worker.build import EngineParts
from engine.worker.process import WorkerProcess
from engine.worker.role import WorkerHost, WorkerRole
from kv_transfer.transports.transport import TransferEndpoint
from prefill_worker.kv_producer import KvProducer
from prefill_worker.prefill_service import PrefillService
from splitserve.config.worker import WorkerConfig
from splitserve.rpc.carried_calls import CarriedMethod, prefill_methods
from splitserve.v1 import prefill_pb2, registry_pb2
from splitserve.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server

PEER_KEPT_S = 5.0
"""Seconds that a decode worker stays connected after no coordinator names it any more. When a coordinator dies, all its
requests are aborted, and the decode workers, which live on, must still be told that their writers are done."""


class PrefillRole(WorkerRole[KvProducer]):
    """Connects to the workers that the coordinators name, and computes prompts."""

    certificate = "prefill"
    pool = registry_pb2.POOL_PREFILL

    def __init__(self, worker: WorkerHost[KvProducer], *, prefixes_only: bool = False) -> None:
        """`prefixes_only`: see PrefillService."""
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self._service = PrefillService(worker, self._loop, prefixes_only=prefixes_only)
        self._peers: dict[str, dict[str, TransferEndpoint]] = {}

    def make_connector(self, parts: EngineParts, epoch: int, on_idle: Callable[[], None]) -> KvProducer:
        """See WorkerRole."""
        return KvProducer(
            parts, self._service.deliver, on_idle, self._on_peers_changed, spans=self._worker.spans
        )

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        """See WorkerRole."""
        add_PrefillServiceServicer_to_server(self._service, server)
        return [prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name]

    def carried_methods(self) -> Mapping[str, CarriedMethod]:
        """See WorkerRole."""
        return prefill_methods(self._service)

    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        """Connects to new workers; fences those that no coordinator names any more, after PEER_KEPT_S."""
        before = self._wanted()
        self._peers[coordinator] = {peer.agent_id: peer for peer in peers}
        wanted = self._wanted()
        gone = before.keys() - wanted.keys()

        def apply(_core: object, producer: KvProducer) -> None:
            for agent_id in gone:
                producer.retire(agent_id)
            for agent_id in wanted.keys() - producer.targets():
                producer.connect(wanted[agent_id])

        self._worker.engine.post(apply)
        for agent_id in gone:
            self._loop.call_later(PEER_KEPT_S, self._fence, agent_id)

    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        """Does nothing: nobody writes to a prefill worker."""

    def busy(self) -> bool:
        """See WorkerRole."""
        return self._service.busy or self._worker.connector.status.in_progress > 0

    def close(self) -> None:
        """Does nothing: prefill calls end with their requests."""

    def _wanted(self) -> dict[str, TransferEndpoint]:
        """The workers that any coordinator names, by agent id."""
        return {agent: peer for known in self._peers.values() for agent, peer in known.items()}

    def _fence(self, agent_id: str) -> None:
        if agent_id not in self._wanted():
            self._worker.engine.post(lambda _core, producer: producer.disconnect(agent_id))

    def _on_peers_changed(self) -> None:
        self._loop.call_soon_threadsafe(self._worker.report_now)


async def serve(config: WorkerConfig) -> None:
    """Runs a prefill worker until SIGTERM or SIGINT."""
    await WorkerProcess(config, PrefillRole).run()
