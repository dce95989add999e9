"""The paths of the Files and Batch APIs and their handlers.

https://platform.openai.com/docs/api-reference/files and .../batch.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Sequence
from functools import partial
from typing import Annotated, Literal, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field

from coordinator.entrypoints.batch.folder import MAX_FILE_BYTES, BatchFolder
from coordinator.entrypoints.batch.records import BATCH_PREFIX, FILE_PREFIX, Batch, StoredFile, new_id
from coordinator.entrypoints.batch.runner import BatchRunner
from coordinator.entrypoints.batch.upload import FORM_BYTES, FileForm
from coordinator.entrypoints.http.exchange import ApiPath, HttpExchange, json_bytes
from coordinator.entrypoints.openai.app import OpenAIServing
from coordinator.entrypoints.openai.bodies import Fields, validated
from coordinator.entrypoints.responses.requests import Metadata
from splitserve.errors import InvalidArgumentError, NotFoundError

UPLOAD_TIMEOUT_S = 600.0
"""Longest time that the body with a file may take."""
PIECE_BYTES = 2**18
"""Of a file that is sent."""
WINDOW = re.compile(r"([1-9][0-9]{0,5})([smh])")
UNIT_S = {"s": 1, "m": 60, "h": 3600}
MOST_WINDOW_S = 7 * 86400
MAX_PARAMETERS = 8


class BatchRequest(Fields):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None


class Query(BaseModel):
    """What all lists take in their queries."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    limit: int


class FilesQuery(Query):
    """The query of `GET /v1/files`."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    purpose: str | None = None


class BatchesQuery(Query):
    """The query of `GET /v1/batches`."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20


Q = TypeVar("Q", bound=Query)


class BatchEndpoints:
    """All paths of both APIs. Without a runner, which has the folder, they refuse requests. `endpoints`: of the
    requests of batches. `chats` parses the bodies."""

    def __init__(self, chats: OpenAIServing, runner: BatchRunner | None, endpoints: Collection[str]) -> None:
        self._chats, self._endpoints, self._runner_or_none = chats, endpoints, runner
        self.paths = [
            ApiPath(("GET", "POST"), "/v1/files", self.files),
            ApiPath(("GET", "DELETE"), "/v1/files/{file_id}", self.file),
            ApiPath(("GET",), "/v1/files/{file_id}/content", self.content),
            ApiPath(("GET", "POST"), "/v1/batches", self.batches),
            ApiPath(("GET",), "/v1/batches/{batch_id}", self.batch),
            ApiPath(("POST",), "/v1/batches/{batch_id}/cancel", self.cancel),
        ]

    async def files(self, exchange: HttpExchange) -> None:
        """GET and POST /v1/files."""
        tenant = exchange.caller().tenant
        if exchange.method == "POST":
            await exchange.respond(200, json_bytes((await self._uploaded(exchange, tenant)).shown()))
            return
        query, folder = _query(exchange, FilesQuery), self._folder
        wanted = ("batch", "batch_output") if query.purpose is None else (query.purpose,)

        def page() -> bytes:
            found = [each for each in folder.files.values() if each.tenant == tenant]
            return _page([each for each in found if each.purpose in wanted], query)

        await exchange.respond(200, await folder.run(page))

    async def file(self, exchange: HttpExchange) -> None:
        """GET and DELETE /v1/files/{file_id}."""
        tenant, file_id = exchange.caller().tenant, exchange.path_params["file_id"]
        if exchange.method == "GET":
            await exchange.respond(200, json_bytes(self._folder.file(tenant, file_id).shown()))
            return
        await self._folder.run(self._folder.delete_file, tenant, file_id)
        await exchange.respond(200, json_bytes({"id": file_id, "object": "file", "deleted": True}))

    async def content(self, exchange: HttpExchange) -> None:
        """GET /v1/files/{file_id}/content."""
        tenant, folder = exchange.caller().tenant, self._folder
        file = folder.file(tenant, exchange.path_params["file_id"])
        content = await folder.run(folder.open_content, file)

        async def pieces() -> AsyncIterator[bytes]:
            left = file.bytes
            while left and (piece := await folder.run(content.read, min(PIECE_BYTES, left))):
                left -= len(piece)
                yield piece

        with content:
            await exchange.respond_pieces(file.bytes, pieces())

    async def batches(self, exchange: HttpExchange) -> None:
        """GET and POST /v1/batches."""
        tenant = exchange.caller().tenant
        if exchange.method == "POST":
            await exchange.respond(200, json_bytes((await self._created(exchange, tenant)).shown()))
            return
        query, folder = _query(exchange, BatchesQuery), self._folder

        def page() -> bytes:
            return _page([each for each in folder.batches.values() if each.tenant == tenant], query)

        await exchange.respond(200, await folder.run(page))

    async def batch(self, exchange: HttpExchange) -> None:
        """GET /v1/batches/{batch_id}."""
        tenant, batch_id = exchange.caller().tenant, exchange.path_params["batch_id"]
        await exchange.respond(200, json_bytes(self._folder.batch(tenant, batch_id).shown()))

    async def cancel(self, exchange: HttpExchange) -> None:
        """POST /v1/batches/{batch_id}/cancel. The body, if any, has no effect."""
        tenant, batch_id = exchange.caller().tenant, exchange.path_params["batch_id"]
        batch = self._folder.batch(tenant, batch_id)
        if batch.status != "cancelling" and not await self._runner.cancel(batch):
            message = f"batch_id: a batch that is {batch.status} cannot be cancelled"
            raise InvalidArgumentError(message, reason="BATCH_NOT_RUNNING", field="batch_id")
        await exchange.respond(200, json_bytes(batch.shown()))

    @property
    def _runner(self) -> BatchRunner:
        if self._runner_or_none is None:
            message = "batch_folder is not set: files and batches need it (--batch-folder FOLDER)"
            raise NotFoundError(message, reason="BATCHES_OFF", field="batch_folder")
        return self._runner_or_none

    @property
    def _folder(self) -> BatchFolder:
        return self._runner.folder

    async def _uploaded(self, exchange: HttpExchange, tenant: str) -> StoredFile:
        folder, now = self._folder, self._runner.clock()
        upload = await folder.run(folder.begin_upload, tenant)
        try:
            write = partial(folder.write, upload)
            form = FileForm(exchange.header(b"content-type") or "", write)

            async def feed(piece: bytes) -> None:
                await folder.run(form.feed, piece)

            await exchange.read_body(feed, MAX_FILE_BYTES + FORM_BYTES, UPLOAD_TIMEOUT_S)
            form.end()
        except BaseException:
            await folder.run(folder.discard, upload)
            raise
        return await folder.run(folder.end_upload, upload, form.filename, now)

    async def _created(self, exchange: HttpExchange, tenant: str) -> Batch:
        folder, now = self._folder, int(self._runner.clock())
        request = await self._chats.parsed(BatchRequest, await exchange.json_body(), {})
        if request.endpoint not in self._endpoints:
            message = f"endpoint must be one of {', '.join(sorted(self._endpoints))}"
            raise InvalidArgumentError(message, field="endpoint")
        batch = Batch(
            id=new_id(BATCH_PREFIX),
            tenant=tenant,
            endpoint=request.endpoint,
            input_file_id=self._input(tenant, request.input_file_id).id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + _window_s(request.completion_window),
            metadata=request.metadata,
            output_file_id=new_id(FILE_PREFIX),
            error_file_id=new_id(FILE_PREFIX),
        )
        await folder.run(folder.add_batch, batch)
        self._runner.added()
        return batch

    def _input(self, tenant: str, file_id: str) -> StoredFile:
        file = self._folder.file(tenant, file_id, "input_file_id")
        if file.purpose != "batch":
            message = "input_file_id must name a file of purpose batch"
            raise InvalidArgumentError(message, field="input_file_id")
        return file


def _window_s(window: str) -> int:
    parts = WINDOW.fullmatch(window)
    seconds = int(parts[1]) * UNIT_S[parts[2]] if parts else 0
    if not 0 < seconds <= MOST_WINDOW_S:
        message = "completion_window must be a number followed by s, m or h, at most 168h"
        raise InvalidArgumentError(message, field="completion_window")
    return seconds


def _query(exchange: HttpExchange, kind: type[Q]) -> Q:
    """The query's parameters. Raises InvalidArgumentError that names the first wrong one."""
    try:
        given = dict(parse_qsl(exchange.query.decode("latin-1"), max_num_fields=MAX_PARAMETERS))
    except ValueError:
        raise InvalidArgumentError(f"the query has more than {MAX_PARAMETERS} parameters") from None
    return validated(kind, given)


def _page(found: Sequence[StoredFile] | Sequence[Batch], query: Query) -> bytes:
    """A page of `found`, which begins with the oldest one. Raises NotFoundError."""
    if query.order == "desc":
        found = found[::-1]
    ids = [each.id for each in found]
    if query.after is not None and query.after not in ids:
        raise NotFoundError(f"after: there is no {query.after[:64]!r}", field="after")
    start = 0 if query.after is None else ids.index(query.after) + 1
    page = found[start : start + query.limit]
    shown = {
        "object": "list",
        "data": [each.shown() for each in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + query.limit < len(found),
    }
    return json_bytes(shown)
