"""An InferenceService that plays a script, behind the real error boundary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from splitserve.rpc.server import RpcServer
from splitserve.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

Step = inference_pb2.GenerateResponse | Exception | asyncio.Event
"""A message to send, an error to end with, or an event to wait for."""


def delta(first_position: int, token_ids: Sequence[int], text: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        delta=generation_pb2.OutputDelta(first_position=first_position, token_ids=token_ids, text=text)
    )


def done(
    reason: generation_pb2.FinishReason.ValueType = generation_pb2.FINISH_REASON_STOP,
    completion_tokens: int = 3,
) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        done=inference_pb2.GenerationDone(
            finish_reason=reason,
            usage=inference_pb2.Usage(
                prompt_tokens=7,
                completion_tokens=completion_tokens,
                cached_prompt_tokens=2,
                decode_cached_tokens=1,
            ),
            timings=inference_pb2.PhaseTimings(
                queue_ms=1.5, prefill_ms=20.5, transfer_ms=2.5, ttft_ms=25.0, tpot_ms=8.0, transfer_bytes=4096
            ),
            served_by=inference_pb2.ServedBy(
                prefill_worker="prefill-0", decode_worker="decode-0", transport="nixl", attempts=1
            ),
            request_id="req-1",
            seed=2**63 + 1,
        )
    )


ANSWER: tuple[Step, ...] = (delta(0, [11], "It is "), delta(1, [12, 13], "Paris ✓."), done())


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Plays `script` for every request; remembers `requests`; sets `cancelled` when a client goes away."""

    def __init__(self, script: Sequence[Step] = ANSWER) -> None:
        self.script = script
        self.models = [
            inference_pb2.ModelInfo(name="fake-1b", context_tokens=64, has_chat_template=True, ready=True)
        ]
        self.workers = [
            inference_pb2.WorkerInfo(
                worker_id=f"{pool}-0",
                role=pool,
                address=f"127.0.0.1:{port}",
                model="fake-1b",
                state="ready",
                total_blocks=512,
                free_blocks=500,
                rss_bytes=2**33,
            )
            for pool, port in (("decode", 7001), ("prefill", 7002))
        ]
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.time_left_s: list[float] = []
        self.sent = asyncio.Event()
        """Set before the first wait of the script."""
        self.cancelled = asyncio.Event()
        self.target = ""

    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.time_left_s.append(context.time_remaining() or 0.0)
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.sent.set()
                    await step.wait()
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: object
    ) -> inference_pb2.GetServerInfoResponse:
        return inference_pb2.GetServerInfoResponse(version="0.1.0", workers=self.workers, uptime_seconds=5)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: object
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=self.models)


@asynccontextmanager
async def serving(fake: FakeInference, port: int = 0) -> AsyncIterator[FakeInference]:
    """Serves on loopback; `fake.target` says where."""
    server = RpcServer()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server.grpc_server)
    bound = await server.start("127.0.0.1", port, ["splitserve.v1.InferenceService"])
    fake.target = f"127.0.0.1:{bound}"
    try:
        yield fake
    finally:
        await server.stop(0)
