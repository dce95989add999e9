"""One prefill and one decode worker without an engine, in one process: `python -m bench.front.scripted_workers`.

They speak the real protocols to every coordinator named. A prompt's first token comes at once, the handoff with it;
from then on each step gives every live request one token, all outputs of one coordinator in one message, as the real
decode worker does. A token's text is a space and six hexadecimal digits: the microseconds of CLOCK_MONOTONIC at
which it was made, modulo 2^24, so that whoever receives it on this machine knows how old it is.

Between the steps and the coordinators stands the real decode worker's `OutputStream`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvloop

from bench.front.registration import BLOCKS, registration
from decode_worker.output_streams import OutputStream
from splitserve.registry_client import RegistryClient
from splitserve.rpc import make_server
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2, registry_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from splitserve.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server

HOST = "127.0.0.1"
HEARTBEAT_S = 0.5
TOKEN_ID = 300
CLOCK_MASK = 0xFFFFFF
ADMIT_MS = 0.5


def stamp() -> str:
    """The text of a token made now."""
    return f" {time.monotonic_ns() // 1000 & CLOCK_MASK:06x}"


@dataclass(slots=True)
class _Live:
    request_id: str
    position: int
    end: int
    fresh: bool = True


@dataclass(slots=True)
class _Stream:
    """What goes to one coordinator."""

    outputs: OutputStream = field(default_factory=OutputStream)
    live: dict[int, _Live] = field(default_factory=dict)


class Decode(DecodeServiceServicer):
    """Steps at a fixed pace while anything is live."""

    def __init__(self, step_s: float, epoch: int) -> None:
        self._step_s, self._epoch = step_s, epoch
        self._streams: dict[str, _Stream] = {}
        self._reserved: dict[int, tuple[_Stream, _Live]] = {}
        self._numbers = itertools.count(1)
        self._work = asyncio.Event()

    @property
    def live(self) -> int:
        """Requests reserved or decoding."""
        return len(self._reserved) + sum(len(stream.live) for stream in self._streams.values())

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        """See DecodeService.Reserve in the proto."""
        number = next(self._numbers)
        live = _Live(request.request_id, request.prior_output_tokens + 1, request.stop.max_tokens)
        self._reserved[number] = self._streams[request.coordinator_id], live
        ticket = kv_transfer_pb2.KvTicket(
            decode_agent_id="decode", epoch=self._epoch, reservation=number, block_indices=[1], total_bytes=16
        )
        ticket.time_to_live.CopyFrom(request.timeout)
        return decode_pb2.ReserveResponse(ticket=ticket)

    async def Abort(self, request: decode_pb2.AbortRequest, context: Any) -> decode_pb2.AbortResponse:
        """See DecodeService.Abort in the proto."""
        for number in [n for n, (_, e) in self._reserved.items() if e.request_id == request.request_id]:
            del self._reserved[number]
        for stream in self._streams.values():
            for number in [n for n, e in stream.live.items() if e.request_id == request.request_id]:
                del stream.live[number]
        return decode_pb2.AbortResponse(aborted=True)

    async def StreamOutputs(
        self, request: decode_pb2.StreamOutputsRequest, context: Any
    ) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        """See DecodeService.StreamOutputs in the proto."""
        stream = self._streams[request.coordinator_id] = _Stream()
        try:
            yield decode_pb2.StreamOutputsResponse(epoch=self._epoch)
            async for outputs in stream.outputs.batches():
                yield decode_pb2.StreamOutputsResponse(outputs=outputs)
        finally:
            del self._streams[request.coordinator_id]

    def complete(self, number: int) -> None:
        """The KV has arrived."""
        if (entry := self._reserved.pop(number, None)) is not None:
            stream, live = entry
            stream.live[number] = live
            self._work.set()

    async def run(self) -> None:
        """Makes steps until cancelled."""
        due_s = time.monotonic()
        while True:
            await self._work.wait()
            due_s = max(due_s + self._step_s, time.monotonic())
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            for stream in list(self._streams.values()):
                self._step(stream)
            if not any(stream.live for stream in self._streams.values()):
                self._work.clear()

    def _step(self, stream: _Stream) -> None:
        made, text = [], stamp()
        for number, live in list(stream.live.items()):
            output = decode_pb2.SequenceOutput(request_id=live.request_id)
            output.delta.first_position = live.position
            output.delta.token_ids.append(TOKEN_ID)
            output.delta.text = text
            if live.fresh:
                output.admit_ms, live.fresh = ADMIT_MS, False
            live.position += 1
            if live.position >= live.end:
                output.delta.finish_reason = generation_pb2.FINISH_REASON_LENGTH
                del stream.live[number]
            made.append(output)
        stream.outputs.put(made)


class Prefill(PrefillServiceServicer):
    """The first token and the handoff, at once."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """See PrefillService.Prefill in the proto."""
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
        self._decode.complete(request.ticket.reservation)
        yield prefill_pb2.PrefillResponse(handoff=prefill_pb2.HandoffDone(written_bytes=16, descriptors=1))


async def serve(coordinators: list[str], step_s: float, tokenizer: str, vocabulary: int) -> None:
    """Serves both workers until cancelled."""
    epoch = uuid.uuid4().int & (2**63 - 1) | 1
    decode = Decode(step_s, epoch)
    server = make_server()
    add_DecodeServiceServicer_to_server(decode, server.grpc_server)
    add_PrefillServiceServicer_to_server(Prefill(decode), server.grpc_server)
    address = f"{HOST}:{await server.start(HOST, 0, [])}"
    print(address, flush=True)
    gc.freeze()
    async with asyncio.TaskGroup() as group:
        group.create_task(decode.run())
        for coordinator in coordinators:
            for pool in (registry_pb2.POOL_DECODE, registry_pb2.POOL_PREFILL):
                name = registry_pb2.Pool.Name(pool).removeprefix("POOL_").lower() + "-0"
                request = registration(name, pool, address, epoch, tokenizer, vocabulary)
                group.create_task(_membership(coordinator, request, decode))


async def _membership(coordinator: str, request: registry_pb2.RegisterRequest, decode: Decode) -> None:
    peers: list[str] = []

    def on_peers(_coordinator: str, endpoints: list[kv_transfer_pb2.TransferEndpoint]) -> None:
        peers[:] = [endpoint.agent_id for endpoint in endpoints]
        client.poke()

    def report() -> registry_pb2.ReportRequest:
        load = registry_pb2.WorkerLoad(total_blocks=BLOCKS, free_blocks=BLOCKS, running_requests=decode.live)
        return registry_pb2.ReportRequest(
            worker_id=request.worker_id, epoch=request.epoch, load=load, connected_agent_ids=peers
        )

    client = RegistryClient(coordinator, request, report=report, on_peers=on_peers, heartbeat_s=HEARTBEAT_S)
    await client.run()


def main() -> None:
    """Prints the address of both workers, then serves until a signal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coordinator", action="append", default=[], help="host:port; may be repeated")
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--tokenizer", default="simulated")
    parser.add_argument("--vocabulary", type=int, default=257)
    args = parser.parse_args()
    uvloop.run(serve(args.coordinator, args.step_ms / 1e3, args.tokenizer, args.vocabulary))


if __name__ == "__main__":
    main()
