"""A stranger with a real NIXL agent and real gRPC stubs, who tries what honest peers never do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from engine.runner.simulated_runner import EOS_TOKEN_ID, VOCABULARY_SIZE, SimulatedRunner
from kv_transfer.handoff.messages import KvTicket
from kv_transfer.transports.nixl.transport import NixlTransport
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.client.registry_client import RegistryClient
from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError
from splitserve.generation.output_delta import output_of, rows_of
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2, registry_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from splitserve.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.support.waiting import PATIENCE_S

COORDINATOR_ID = "forger"
NUM_BLOCKS = 64
POLL_S = 0.005


class Forger:
    """Its agent is connected to a decode worker's pool; its coordinator has an output stream open there."""

    def __init__(
        self, transport: NixlTransport, endpoint: TransferEndpoint, target: TransferEndpoint
    ) -> None:
        self.agent_id = endpoint.agent_id
        self.target = target
        self.outputs: list[decode_pb2.SequenceOutput] = []
        self._transport = transport
        self._count = 0
        transport.connect(target)

    async def reserve(self, decode: DecodeServiceStub, prompt: list[int], writer: str = "") -> KvTicket:
        """A genuine ticket for this prompt, bound to `writer`."""
        self._count += 1
        request = decode_pb2.ReserveRequest(
            request_id=f"r{self._count}",
            coordinator_id=COORDINATOR_ID,
            attachment=1,
            token_ids=prompt,
            stop=generation_pb2.StopParams(max_tokens=4),
            writer_agent_id=writer,
        )
        request.timeout.FromSeconds(300)
        response = await decode.Reserve(request, timeout=PATIENCE_S)
        return KvTicket.from_proto(response.ticket, 0.0)

    async def send(self, notification: bytes) -> None:
        """Sends a notification without bytes, and lets NIXL carry it."""
        self._transport.notify(self.target.agent_id, notification)
        await self._settle()

    async def write(self, ticket: KvTicket, notification: bytes) -> None:
        """Writes this agent's blocks (zeros) into the ticket's, and completes."""
        blocks = ticket.block_indices
        handle = self._transport.write(self.target.agent_id, range(len(blocks)), blocks, notification)
        async with asyncio.timeout(PATIENCE_S):
            while all(done.handle != handle for done in self._transport.poll().writes):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    def tokens_of(self, request_id: str) -> list[int]:
        """What the decode worker has said about a request."""
        return [t for o in self.outputs if o.request_id == request_id for t in o.delta.token_ids]

    async def _settle(self) -> None:
        for _ in range(10):
            self._transport.poll()
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def forger(coordinator: str, decode_address: str, engine: EngineConfig) -> AsyncIterator[Forger]:
    """Learns the decode pool's endpoint as prefill workers do: by registering."""
    runner, transport = SimulatedRunner(engine), NixlTransport()
    endpoint = transport.register_memory(runner.pool_memory)
    peers: asyncio.Future[list[kv_transfer_pb2.TransferEndpoint]] = asyncio.get_running_loop().create_future()
    registry = RegistryClient(
        coordinator,
        _registration(endpoint),
        report=lambda: registry_pb2.ReportRequest(worker_id="forger", epoch=1),
        on_peers=lambda _, found: None if peers.done() or not found else peers.set_result(found),
        heartbeat_s=0.2,
    )
    async with make_channel(decode_address) as channel, asyncio.TaskGroup() as group:
        member = group.create_task(registry.run())
        found = await asyncio.wait_for(peers, PATIENCE_S)
        one = Forger(transport, endpoint, TransferEndpoint.from_proto(found[0]))
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        listener = group.create_task(_listen(DecodeServiceStub(channel), one.outputs, opened))
        await asyncio.wait_for(opened, PATIENCE_S)
        try:
            yield one
        finally:
            member.cancel()
            listener.cancel()
            transport.close()


async def _listen(
    decode: Any, outputs: list[decode_pb2.SequenceOutput], opened: asyncio.Future[None]
) -> None:
    call = decode.StreamOutputs(decode_pb2.StreamOutputsRequest(coordinator_id=COORDINATOR_ID, attachment=1))
    async for response in call:
        if not opened.done():
            opened.set_result(None)
        outputs += [output_of(*row) for row in rows_of(response)]


def _registration(endpoint: TransferEndpoint) -> registry_pb2.RegisterRequest:
    return registry_pb2.RegisterRequest(
        worker_id="forger",
        epoch=1,
        role=registry_pb2.ROLE_PREFILL,
        address="127.0.0.1:1",
        model=registry_pb2.ServedModel(
            name="simulated",
            tokenizer_source="simulated",
            context_tokens=1024,
            vocabulary_size=VOCABULARY_SIZE,
            eos_token_ids=[EOS_TOKEN_ID],
        ),
        endpoint=endpoint.to_proto(),
        max_step_tokens=64,
        max_running_requests=4,
    )


async def use_ticket(
    address: str, ticket: KvTicket, prompt: list[int]
) -> tuple[list[prefill_pb2.PrefillResponse], SplitserveError | None]:
    """What a prefill worker answers to this ticket, and the error that ended the call."""
    request = prefill_pb2.PrefillRequest(
        request_id="forged",
        token_ids=prompt,
        ticket=ticket.to_proto(0.0),
        stop=generation_pb2.StopParams(max_tokens=4),
    )
    request.timeout.FromSeconds(30)
    responses: list[prefill_pb2.PrefillResponse] = []
    async with make_channel(address) as channel:
        try:
            async for response in PrefillServiceStub(channel).Prefill(request, timeout=PATIENCE_S):
                responses.append(response)
        except grpc.aio.AioRpcError as error:
            return responses, error_from_rpc(error)
    return responses, None
