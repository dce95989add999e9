"""A worker's role that is made of the roles of both pools: one engine, both services."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import grpc

from decode_worker.kv_consumer import KvConsumer
from decode_worker.service import DecodeRole
from engine.worker.build import EngineParts
from engine.worker.process import WorkerProcess
from engine.worker.role import WorkerRole
from kv_transfer.transports.transport import TransferEndpoint
from neutral_worker.neutral_connector import NeutralConnector
from neutral_worker.worker_part import WorkerPart
from prefill_worker.kv_producer import KvProducer
from prefill_worker.service import PrefillRole
from splitserve.rpc.carried_calls import CarriedMethod
from splitserve.v1 import registry_pb2

PREFILL, DECODE = registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE


class ComposedRole(WorkerRole[NeutralConnector]):
    """Sends KV and takes it. What of requests it serves is up to who extends it."""

    def __init__(
        self, worker: WorkerProcess[NeutralConnector], only: registry_pb2.Pool.ValueType | None = None
    ) -> None:
        """`only`: the pool whose requests it serves; the other pool's service is for prefixes alone. None: both."""
        self._worker = worker
        sends: WorkerPart[NeutralConnector, KvProducer] = WorkerPart(worker, lambda whole: whole.producer)
        receives: WorkerPart[NeutralConnector, KvConsumer] = WorkerPart(worker, lambda whole: whole.consumer)
        self._prefill = PrefillRole(sends, prefixes_only=only == DECODE)
        self._decode = DecodeRole(receives, prefixes_only=only == PREFILL)

    def make_connector(self, parts: EngineParts, epoch: int, on_idle: Callable[[], None]) -> NeutralConnector:
        """See WorkerRole."""
        producer = self._prefill.make_connector(parts, epoch, on_idle)
        consumer = self._decode.make_connector(parts, epoch, on_idle, producer.polls)
        return NeutralConnector(parts, producer, consumer, on_idle)

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        """See WorkerRole."""
        return [*self._prefill.add_services(server), *self._decode.add_services(server)]

    def carried_methods(self) -> Mapping[str, CarriedMethod]:
        """See WorkerRole."""
        return {**self._prefill.carried_methods(), **self._decode.carried_methods()}

    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        """See PrefillRole. A worker is no peer of itself."""
        own = self._worker.connector.endpoint.agent_id
        self._prefill.on_peers(coordinator, [peer for peer in peers if peer.agent_id != own])

    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        """See DecodeRole."""
        self._decode.on_ended_writers(agent_ids)

    def busy(self) -> bool:
        """See WorkerRole."""
        return self._prefill.busy() or self._decode.busy()

    def close(self) -> None:
        """See WorkerRole."""
        self._prefill.close()
        self._decode.close()
