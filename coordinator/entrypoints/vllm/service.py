"""VllmEngine: vLLM's gRPC contract, on top of InferenceApi. It has no field for a model: a request goes to the only one
that its caller may use."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer, add_VllmEngineServicer_to_server
from typing_extensions import override

from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.inference_service import begin_trace
from coordinator.entrypoints.vllm.messages import ABORTED, VllmResponses, naming_fields, read_request
from coordinator.request.inference_request import Caller
from coordinator.request.sending import WaitingOutput
from coordinator.tenants.access_control import AccessControl
from splitserve import __version__
from splitserve.errors import NotFoundError
from splitserve.models.hf_tokenizer import tokenizer_files
from splitserve.rpc.server import write_whole
from splitserve.v1 import inference_pb2

CHUNK_BYTES = 64 * 2**10
Key = tuple[str, str]
"""A caller's tenant and the id that it gave a request."""


def add_vllm_engine(api: InferenceApi, access: AccessControl, server: Any) -> str:
    """Registers the servicer on a gRPC server; returns the service's full name."""
    add_VllmEngineServicer_to_server(VllmService(api, access), server)
    return str(pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name)


@dataclass(eq=False)
class VllmService(VllmEngineServicer):
    """The servicer. Embeddings, profiles, flushes of the cache and KV events are UNIMPLEMENTED."""

    api: InferenceApi
    access: AccessControl
    _running: dict[Key, set[asyncio.Timeout]] = field(default_factory=dict)
    """The requests in progress that `Abort` can name."""
    _packing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @override
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        caller = self.access.caller(context)
        generate = await self.api.parser.run(request.ByteSize(), read_request, request)
        trace = await begin_trace(self.api, context, "text_completion")
        responses = VllmResponses(request)

        async def send(response: inference_pb2.GenerateResponse) -> None:
            if response.HasField("done"):
                complete = await self.api.parser.run(responses.size, responses.complete, response.done)
                await write_whole(context, complete)
                return
            chunk = responses.chunk(response.delta, response.started.prompt_tokens)
            if chunk is not None:
                await write_whole(context, chunk)

        with naming_fields(), self._abortable((caller.tenant, request.request_id)) as limit:
            try:
                async with limit:
                    left_s = context.time_remaining()
                    await self.api.generate(generate, caller, WaitingOutput(send), left_s, trace)
            except TimeoutError:
                if not limit.expired():
                    raise
                await context.write(ABORTED)

    @override
    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Ends requests of the caller's tenant; ids without a request are ignored."""
        tenant, now = self.access.caller(context).tenant, asyncio.get_running_loop().time()
        for request_id in request.request_ids:
            for limit in self._running.get((tenant, request_id), ()):
                with suppress(RuntimeError):  # it ends already
                    limit.reschedule(now)
        return pb.AbortResponse()

    @override
    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """Needs no credentials, like any health check."""
        ready = self.api.is_ready
        return pb.HealthCheckResponse(
            healthy=ready, message="ready" if ready else "no model has ready workers"
        )

    @override
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        caller = self.access.caller(context)
        name = self._model_name(caller)
        for model in await self.api.models(caller):
            if model.name == name:
                return pb.GetModelInfoResponse(
                    model_path=name,
                    served_model_name=name,
                    is_generation=True,
                    max_context_length=model.context_tokens,
                    max_req_input_len=model.context_tokens,
                    vocab_size=model.vocabulary_size,
                )
        raise _no_model()

    @override
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        self.access.require_reader(context)
        return pb.GetServerInfoResponse(
            active_requests=self.api.running,
            is_paused=self.api.draining,
            uptime_seconds=self.api.uptime_s,
            server_type="splitserve",
            data_parallel_size=1,
        )

    @override
    async def GetLoads(self, request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        """The sums over all workers as one rank. Used tokens are those of KV blocks that are not free."""
        self.access.require_reader(context)
        workers = self.api.registry.snapshot().workers
        total = sum(worker.load.total_blocks * worker.block_size_tokens for worker in workers)
        used = total - sum(worker.load.free_blocks * worker.block_size_tokens for worker in workers)
        running = sum(worker.load.running_requests for worker in workers)
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=max(0, self.api.running - running),
            num_total_reqs=self.api.running,
            num_used_tokens=used,
            max_total_num_tokens=total,
            token_usage=used / total if total else 0.0,
            max_running_requests=self.api.max_running_requests,
        )
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[load])

    @override
    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Any) -> None:
        """The tokenizer's files as a zip archive, one archive at a time."""
        caller = self.access.caller(context)
        name = self._model_name(caller)
        sources = {one.name: one.models[0].tokenizer_source for one in self.api.routes.nameable(caller)}
        if name not in sources:
            raise _no_model()
        async with self._packing:
            archive, digest = await asyncio.to_thread(_packed, sources[name])
        for start in range(0, len(archive), CHUNK_BYTES):
            data = archive[start : start + CHUNK_BYTES]
            is_last = start + CHUNK_BYTES >= len(archive)
            await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=digest if is_last else ""))

    def _model_name(self, caller: Caller) -> str:
        return self.api.routes.public_name("", caller)

    @contextmanager
    def _abortable(self, key: Key) -> Iterator[asyncio.Timeout]:
        """A limit of time that `Abort` ends."""
        limit = asyncio.timeout(None)
        self._running.setdefault(key, set()).add(limit)
        try:
            yield limit
        finally:
            self._running[key].discard(limit)
            if not self._running[key]:
                del self._running[key]


def _no_model() -> NotFoundError:
    message = "vLLM's contract names no model, and there is not exactly one that this caller may use"
    return NotFoundError(message, reason="MODEL_NOT_FOUND")


def _packed(source: str) -> tuple[bytes, str]:
    """An archive of a model's tokenizer files, and its SHA-256 in hexadecimal. Raises NotFoundError and
    UnavailableError."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:  # stored, not compressed: cheap for the coordinator
        for path in tokenizer_files(source):
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
    archive_bytes = content.getvalue()
    return archive_bytes, hashlib.sha256(archive_bytes).hexdigest()
