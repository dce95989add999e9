"""Load straight on the scripted workers, without a coordinator: the token latency of the harness itself."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import grpc

from bench.front_door.tally import Tally
from splitserve.generation.output_delta import TokenDelta, rows_of
from splitserve.rpc.channel import make_channel
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from splitserve.v1.prefill_pb2_grpc import PrefillServiceStub

TIMEOUT_S = 600
ATTACHMENT = 1
"""Number of the one output stream."""
ACKNOWLEDGE_S = 0.25
"""Time between two acknowledgements, as a coordinator sends them; the worker keeps unacknowledged outputs."""


class Direct:
    """Does a coordinator's calls for a request and reads the tokens from the workers."""

    def __init__(self, tally: Tally, channel: grpc.aio.Channel) -> None:
        self._tally = tally
        self._id = str(uuid.uuid4())
        self._decode, self._prefill = DecodeServiceStub(channel), PrefillServiceStub(channel)
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._received = 0
        """Messages with outputs."""

    async def run(self, streams: int, max_tokens: int) -> None:
        """Keeps `streams` requests in flight until cancelled."""
        opening = decode_pb2.StreamOutputsRequest(coordinator_id=self._id, attachment=ATTACHMENT)
        outputs: Any = self._decode.StreamOutputs(opening)
        await outputs.read()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(outputs))
            group.create_task(self._acknowledge())
            for _ in range(streams):
                group.create_task(self._again_and_again(max_tokens))

    async def _read(self, outputs: Any) -> None:
        while (message := await outputs.read()) is not grpc.aio.EOF:
            rows = list(rows_of(message))
            self._received += bool(rows)
            for name, news in rows:
                delta = news if isinstance(news, TokenDelta) else news.delta
                self._tally.text(delta.text)
                if delta.finish_reason:
                    self._ends.pop(name).set_result(None)

    async def _acknowledge(self) -> None:
        while True:
            await asyncio.sleep(ACKNOWLEDGE_S)
            read = decode_pb2.AcknowledgeOutputsRequest(
                coordinator_id=self._id, attachment=ATTACHMENT, messages=self._received
            )
            await self._decode.AcknowledgeOutputs(read)

    async def _again_and_again(self, max_tokens: int) -> None:
        stop = generation_pb2.StopParams(max_tokens=max_tokens)
        while True:
            name = uuid.uuid4().hex
            end = self._ends[name] = asyncio.get_running_loop().create_future()
            reserve = decode_pb2.ReserveRequest(
                request_id=name,
                coordinator_id=self._id,
                attachment=ATTACHMENT,
                token_ids=[1, 2, 3],
                stop=stop,
            )
            reserve.timeout.seconds = TIMEOUT_S
            ticket = (await self._decode.Reserve(reserve)).ticket
            call: Any = self._prefill.Prefill(
                prefill_pb2.PrefillRequest(request_id=name, token_ids=[1, 2, 3], stop=stop, ticket=ticket)
            )
            async for response in call:
                if response.HasField("first_token"):
                    self._tally.text(response.first_token.delta.text)
            await end
            self._tally.ended(max_tokens)


async def run_direct(tally: Tally, target: str, streams: int, max_tokens: int) -> None:
    """The same load without a coordinator."""
    async with make_channel(target) as channel:
        await Direct(tally, channel).run(streams, max_tokens)
