"""Requests straight to workers over gRPC, in place of a coordinator: each test says who does what."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from splitserve.errors import SplitserveError
from splitserve.generation.output_delta import News, TokenDelta, rows_of
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc, failure_error
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from splitserve.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.support.roles.scripted_registry import Member, ScriptedRegistry
from tests.support.waiting import PATIENCE_S

MAX_TOKENS = 12


class DirectWorker:
    """Both services of one worker, and what its output stream has brought."""

    def __init__(self, member: Member, channel: grpc.aio.Channel, coordinator_id: str) -> None:
        self.agent_id = member.agent_id
        self.coordinator_id = coordinator_id
        self.prefill: Any = PrefillServiceStub(channel)
        self.decode: Any = DecodeServiceStub(channel)
        self._outputs: dict[str, asyncio.Queue[News | SplitserveError]] = {}
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        """Reads the output stream until the worker, or the test, ends."""
        call = self.decode.StreamOutputs(
            decode_pb2.StreamOutputsRequest(coordinator_id=self.coordinator_id, attachment=1)
        )
        try:
            async for response in call:
                if not self._opened.done():
                    self._opened.set_result(None)
                for name, news in rows_of(response):
                    self._of(name).put_nowait(news)
        except grpc.aio.AioRpcError as error:
            for queue in self._outputs.values():
                queue.put_nowait(error_from_rpc(error))

    async def opened(self) -> None:
        """Waits until the output stream is open."""
        await asyncio.wait_for(asyncio.shield(self._opened), PATIENCE_S)

    async def reserve(
        self,
        name: str,
        prompt: Sequence[int],
        writer: str = "",
        local: int = 0,
        *,
        salt: bytes = b"",
        **stop: Any,
    ) -> kv_transfer_pb2.KvTicket | None:
        """The ticket; None: the prompt is computed here. Raises SplitserveError."""
        request = decode_pb2.ReserveRequest(
            request_id=name,
            coordinator_id=self.coordinator_id,
            attachment=1,
            token_ids=prompt,
            sampling=generation_pb2.SamplingParams(temperature=0.0),
            stop=generation_pb2.StopParams(**({"max_tokens": MAX_TOKENS, "ignore_eos": True} | stop)),
            writer_agent_id=writer,
            local_prefill_tokens=local,
            cache_salt=salt,
        )
        request.timeout.FromSeconds(300)
        try:
            response = await self.decode.Reserve(request, timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return response.ticket if response.HasField("ticket") else None

    async def compute(
        self,
        name: str,
        prompt: Sequence[int],
        ticket: kv_transfer_pb2.KvTicket | None,
        *,
        salt: bytes = b"",
        **stop: Any,
    ) -> list[int]:
        """Computes a prompt and hands it off; its first token. Raises SplitserveError."""
        request = prefill_pb2.PrefillRequest(
            request_id=name,
            token_ids=prompt,
            ticket=ticket,
            cache_salt=salt,
            sampling=generation_pb2.SamplingParams(temperature=0.0),
            stop=generation_pb2.StopParams(**({"max_tokens": MAX_TOKENS, "ignore_eos": True} | stop)),
        )
        request.timeout.FromSeconds(300)
        tokens: list[int] = []
        try:
            async for response in self.prefill.Prefill(request, timeout=PATIENCE_S):
                tokens += response.first_token.delta.token_ids
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return tokens

    async def rest(self, name: str) -> list[int]:
        """The tokens of the output stream until the last one. Raises the failure that ends the request."""
        tokens: list[int] = []
        while True:
            output = await asyncio.wait_for(self._of(name).get(), PATIENCE_S)
            if isinstance(output, SplitserveError):
                raise output
            if not isinstance(output, TokenDelta) and output.HasField("failure"):
                raise failure_error(output.failure.reason, output.failure.message)
            delta = output if isinstance(output, TokenDelta) else output.delta
            tokens += delta.token_ids
            if delta.finish_reason:
                return tokens

    async def abort(self, name: str, *, no_writer: bool = False) -> bool:
        request = decode_pb2.AbortRequest(
            request_id=name, coordinator_id=self.coordinator_id, no_writer=no_writer
        )
        return bool((await self.decode.Abort(request, timeout=PATIENCE_S)).aborted)

    async def local(self, name: str, prompt: Sequence[int], **stop: Any) -> list[int]:
        """An answer that this worker gives alone."""
        assert await self.reserve(name, prompt, local=len(prompt), **stop) is None
        return await self.rest(name)

    def _of(self, name: str) -> asyncio.Queue[News | SplitserveError]:
        return self._outputs.setdefault(name, asyncio.Queue())


async def hand_off(
    sender: DirectWorker, receiver: DirectWorker, name: str, prompt: Sequence[int], **stop: Any
) -> list[int]:
    """An answer whose prompt the one computes and the other goes on with. Raises SplitserveError."""
    ticket = await receiver.reserve(name, prompt, sender.agent_id, **stop)
    assert ticket is not None
    first, rest = await asyncio.gather(
        sender.compute(name, prompt, ticket, **stop), receiver.rest(name), return_exceptions=True
    )
    for outcome in (first, rest):
        if isinstance(outcome, BaseException):
            raise outcome
    return [*first, *rest]


@asynccontextmanager
async def direct_workers(registry: ScriptedRegistry, *names: str) -> AsyncIterator[list[DirectWorker]]:
    """Connections to these workers, with an output stream open at each."""
    coordinator_id = str(uuid.uuid4())
    async with AsyncExitStack() as stack:
        workers, listeners = [], []
        for name in names:
            member = registry.members[name]
            channel = await stack.enter_async_context(make_channel(member.registration.address))
            workers.append(DirectWorker(member, channel, coordinator_id))
            listeners.append(asyncio.create_task(workers[-1].listen()))
        try:
            for worker in workers:
                await worker.opened()
            yield workers
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)
