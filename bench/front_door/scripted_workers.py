"""Pairs of scripted prefill and decode workers, in one process: `python -m bench.front_door.scripted_workers`.

They speak the real protocols to every coordinator named. A prompt's first token comes at once, the handoff with it;
from then on each step gives every live request one token, all outputs of one coordinator in one message, as the real
decode worker does. A token's text is a space and six hexadecimal digits: the microseconds of CLOCK_MONOTONIC at
which it was made, modulo 2^24, so that a receiver on this machine knows its age.

Between the steps and the coordinators stand the real decode worker's `OutputStreams`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvloop
from typing_extensions import override

from bench.option_values import positive_number, positive_whole
from decode_worker.output_streams import OutputStreams, Row
from kv_transfer.layout import KvLayout
from splitserve.client.registry_client import RegistryClient
from splitserve.generation.output_delta import News, TokenDelta
from splitserve.rpc.carried_calls import CarriedCalls, decode_methods, prefill_methods
from splitserve.rpc.server import RpcServer
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2, registry_pb2
from splitserve.v1.calls_pb2_grpc import add_CallServiceServicer_to_server
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from splitserve.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server

HOST = "127.0.0.1"
HEARTBEAT_S = 0.5
TOKEN_ID = 300
CLOCK_MASK = 0xFFFFFF
ADMIT_MS = 0.5
LEASE_S = 30
BLOCKS = 1 << 20
BLOCK_TOKENS = 16
STEP_TOKENS = 8192
RUNNING = 65536
CONTEXT_TOKENS = 8192
FINGERPRINT = "ab" * 32


def stamp() -> str:
    """Text of a token, with the current time stamp."""
    return f" {time.monotonic_ns() // 1000 & CLOCK_MASK:06x}"


@dataclass(slots=True)
class _Live:
    request_id: str
    position: int
    end: int
    fresh: bool = True


class ScriptedDecode(DecodeServiceServicer):
    """Decode steps at a fixed pace while requests are live."""

    def __init__(self, step_s: float, epoch: int, agent_id: str) -> None:
        self._step_s, self._epoch, self.agent_id = step_s, epoch, agent_id
        self._streams = OutputStreams(self._forget, LEASE_S)
        self._decoding: dict[str, dict[int, _Live]] = {}
        """The live requests by their number, for each coordinator."""
        self._reserved: dict[int, tuple[str, _Live]] = {}
        self._numbers = itertools.count(1)
        self._work = asyncio.Event()

    @property
    def live(self) -> int:
        """Requests reserved or decoding."""
        return len(self._reserved) + sum(len(live) for live in self._decoding.values())

    @override
    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        number = next(self._numbers)
        live = _Live(request.request_id, request.prior_output_tokens + 1, request.stop.max_tokens)
        self._reserved[number] = request.coordinator_id, live
        ticket = kv_transfer_pb2.KvTicket(
            decode_agent_id=self.agent_id,
            epoch=self._epoch,
            reservation=number,
            block_indices=[1],
            total_bytes=16,
        )
        ticket.time_to_live.CopyFrom(request.timeout)
        return decode_pb2.ReserveResponse(ticket=ticket)

    @override
    async def Abort(self, request: decode_pb2.AbortRequest, context: Any) -> decode_pb2.AbortResponse:
        for number in [n for n, (_, e) in self._reserved.items() if e.request_id == request.request_id]:
            del self._reserved[number]
        for decoding in self._decoding.values():
            for number in [n for n, e in decoding.items() if e.request_id == request.request_id]:
                del decoding[number]
        return decode_pb2.AbortResponse(aborted=True)

    @override
    async def StreamOutputs(
        self, request: decode_pb2.StreamOutputsRequest, context: Any
    ) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        stream = self._streams.open(request.coordinator_id, request.attachment)
        first = decode_pb2.StreamOutputsResponse(epoch=self._epoch)
        first.lease.FromSeconds(LEASE_S)
        positions = {attached.request_id: attached.next_position for attached in request.requests}
        live = {entry.request_id for entry in self._decoding.get(request.coordinator_id, {}).values()}
        try:
            yield first
            yield decode_pb2.StreamOutputsResponse(lost_request_ids=stream.rewind(positions, live))
            async for message in stream.messages():
                yield message
        finally:
            self._streams.release(stream)

    @override
    async def AcknowledgeOutputs(
        self, request: decode_pb2.AcknowledgeOutputsRequest, context: Any
    ) -> decode_pb2.AcknowledgeOutputsResponse:
        self._streams.acknowledge(request.coordinator_id, request.attachment, request.messages)
        return decode_pb2.AcknowledgeOutputsResponse()

    def complete(self, number: int) -> None:
        """The KV has arrived."""
        if (entry := self._reserved.pop(number, None)) is not None:
            coordinator_id, live = entry
            admitted = decode_pb2.SequenceOutput(request_id=live.request_id, admitted=True)
            self._streams.deliver({coordinator_id: [(live.request_id, admitted)]})
            self._decoding.setdefault(coordinator_id, {})[number] = live
            self._work.set()

    def _forget(self, coordinator_id: str) -> None:
        self._decoding.pop(coordinator_id, None)

    async def run(self) -> None:
        """Makes steps until cancelled."""
        due_s = time.monotonic()
        while True:
            await self._work.wait()
            due_s = max(due_s + self._step_s, time.monotonic())
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            for coordinator_id, decoding in list(self._decoding.items()):
                self._step(coordinator_id, decoding)
            if not any(self._decoding.values()):
                self._work.clear()

    def _step(self, coordinator_id: str, decoding: dict[int, _Live]) -> None:
        rows: list[Row] = []
        text = stamp()
        for number, live in list(decoding.items()):
            delta = TokenDelta(live.position, [TOKEN_ID], text)
            live.position += 1
            if live.position >= live.end:
                delta.finish_reason = generation_pb2.FINISH_REASON_LENGTH
                del decoding[number]
            news: News = delta
            if live.fresh:
                live.fresh = False
                news = decode_pb2.SequenceOutput(
                    request_id=live.request_id, delta=delta.to_proto(), admit_ms=ADMIT_MS
                )
            rows.append((live.request_id, news))
        self._streams.deliver({coordinator_id: rows})


class ScriptedPrefill(PrefillServiceServicer):
    """Answers with the first token and completes the handoff at once."""

    def __init__(self, decodes: Mapping[str, ScriptedDecode]) -> None:
        self._decodes = decodes

    @override
    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        await context.send_initial_metadata(())
        first = prefill_pb2.PrefillResponse()
        delta = first.first_token.delta
        delta.first_position, delta.text = request.prior_output_tokens, stamp()
        delta.token_ids.append(TOKEN_ID)
        if request.stop.max_tokens <= request.prior_output_tokens + 1:
            delta.finish_reason = generation_pb2.FINISH_REASON_LENGTH
            yield first
            return
        yield first
        self._decodes[request.ticket.decode_agent_id].complete(request.ticket.reservation)
        yield prefill_pb2.PrefillResponse(handoff=prefill_pb2.HandoffDone(written_bytes=16, descriptors=1))


async def serve(
    coordinators: list[str], step_s: float, tokenizer: str, vocabulary: int, pairs: int = 1
) -> None:
    """Serves all pairs until cancelled, each at an address of its own, of which the first is printed."""
    epoch = uuid.uuid4().int & (2**63 - 1) | 1
    decodes = {
        name: ScriptedDecode(step_s, epoch, name) for name in (str(uuid.uuid4()) for _ in range(pairs))
    }
    addresses = []
    servers = []
    for decode in decodes.values():
        server = RpcServer()
        add_DecodeServiceServicer_to_server(decode, server.grpc_server)
        prefill = ScriptedPrefill(decodes)
        add_PrefillServiceServicer_to_server(prefill, server.grpc_server)
        calls = CarriedCalls({**decode_methods(decode), **prefill_methods(prefill)}, server.open_rpcs)
        add_CallServiceServicer_to_server(calls, server.grpc_server)
        addresses.append(f"{HOST}:{await server.start(HOST, 0, [])}")
        servers.append(server)
    print(addresses[0], flush=True)
    gc.freeze()
    async with asyncio.TaskGroup() as group:
        for number, (decode, address) in enumerate(zip(decodes.values(), addresses, strict=True)):
            group.create_task(decode.run())
            for coordinator in coordinators:
                for role in (registry_pb2.ROLE_DECODE, registry_pb2.ROLE_PREFILL):
                    name = registry_pb2.Role.Name(role).removeprefix("ROLE_").lower()
                    request = registration(f"{name}-{number}", role, address, epoch, tokenizer, vocabulary)
                    if role == registry_pb2.ROLE_DECODE:
                        request.endpoint.agent_id = decode.agent_id
                    group.create_task(_membership(coordinator, request, decode))


async def _membership(
    coordinator: str, request: registry_pb2.RegisterRequest, decode: ScriptedDecode
) -> None:
    peers: list[str] = []

    def on_peers(_coordinator: str, endpoints: list[kv_transfer_pb2.TransferEndpoint]) -> None:
        peers[:] = [endpoint.agent_id for endpoint in endpoints]
        client.report_now()

    def report() -> registry_pb2.ReportRequest:
        load = registry_pb2.WorkerLoad(total_blocks=BLOCKS, free_blocks=BLOCKS, running_requests=decode.live)
        return registry_pb2.ReportRequest(
            worker_id=request.worker_id, epoch=request.epoch, load=load, connected_agent_ids=peers
        )

    client = RegistryClient(coordinator, request, report=report, on_peers=on_peers, heartbeat_s=HEARTBEAT_S)
    await client.run()


def registration(
    worker_id: str,
    role: registry_pb2.Role.ValueType,
    address: str,
    epoch: int,
    tokenizer: str,
    vocabulary: int,
) -> registry_pb2.RegisterRequest:
    """A worker with more KV than any load here needs. `tokenizer` is also the model's name."""
    layout = KvLayout(FINGERPRINT, "uint8", BLOCK_TOKENS, 1, 1, 8)
    return registry_pb2.RegisterRequest(
        worker_id=worker_id,
        epoch=epoch,
        role=role,
        address=address,
        model=registry_pb2.ServedModel(
            name=tokenizer,
            tokenizer_source=tokenizer,
            context_tokens=CONTEXT_TOKENS,
            vocabulary_size=vocabulary,
        ),
        endpoint=kv_transfer_pb2.TransferEndpoint(
            agent_id=str(uuid.uuid4()),
            transport="nixl",
            metadata=b"scripted",
            base_address=4096,
            block_bytes=layout.block_bytes,
            num_blocks=BLOCKS,
            memory_kind="DRAM",
            layout=layout.to_proto(),
        ),
        max_step_tokens=STEP_TOKENS,
        max_running_requests=RUNNING,
    )


def main() -> None:
    """Prints the address of both workers, then serves until a signal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coordinator", action="append", default=[], help="host:port; may be repeated")
    parser.add_argument("--step-ms", type=positive_number, default=15.0)
    parser.add_argument("--tokenizer", default="simulated")
    parser.add_argument("--vocabulary", type=positive_whole, default=257)
    parser.add_argument(
        "--pairs", type=positive_whole, default=1, help="prefill workers, and as many decode workers"
    )
    args = parser.parse_args()
    uvloop.run(serve(args.coordinator, args.step_ms / 1e3, args.tokenizer, args.vocabulary, args.pairs))


if __name__ == "__main__":
    main()
