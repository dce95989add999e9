"""`/v1/embeddings` as OpenAI serves it, `/v1/score` and `/v1/rerank` as vLLM does: for pooling models.

Each text or pair is a request of its own, since it is a prompt of its own to admission, quotas and workers.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, BeforeValidator, Field, SkipValidation, model_validator
from typing_extensions import override

from coordinator.entrypoints.http.exchange import ApiPath, FieldNames, HttpExchange
from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.openai.app import OpenAIServing
from coordinator.entrypoints.openai.bodies import Fields, Unsupported, dumped
from coordinator.entrypoints.openai.completion import Prompt, as_prompts
from coordinator.request.inference_request import choice_id, wrong_task
from coordinator.request.sending import Output
from coordinator.workers.snapshot import Model
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError, SplitserveError
from splitserve.generation.bounds import MAX_PRIORITY
from splitserve.generation.output_delta import TokenDelta
from splitserve.v1 import generation_pb2, inference_pb2

MAX_INPUTS = 2048
"""Most texts or pairs of a request, as with OpenAI."""
AT_ONCE, CHARACTERS_AT_ONCE = 64, 2**21
"""Most of them that are under way at once, and about their most characters: a query is in each of its pairs."""
QUOTAS = ("TENANT_QUOTA", "TENANT_CONCURRENCY")
"""Refusals that end by themselves."""
VALUE_BYTES = 16
"""About the size of a number in a response."""
NOT_SERVED: Unsupported = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "max_tokens_per_query": (0,),
    "max_tokens_per_doc": (0,),
}
"""vLLM's fields that have one value here. Other fields are refused as unknown."""
SCORES = (
    generation_pb2.POOLING_SCORE,
    generation_pb2.POOLING_SCORE_JOINED,
    generation_pb2.POOLING_EMBED,
)
"""What models do that can score: for embeddings, the score is the cosine of their angle."""
Vector = NDArray[np.float32]


class ScoredPair(NamedTuple):
    """Two texts that the tokenizer joins."""

    first: str
    second: str


class PoolingFields(Fields):
    """Fields of all three requests."""

    max_items: ClassVar[
        Mapping[str, int]
    ] = {}  # of `input`, the number of texts is bounded, not that of tokens

    model: str | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    use_activation: bool | None = None


class EmbeddingsRequest(PoolingFields):
    """The body of `/v1/embeddings`."""

    input: Annotated[list[Prompt], SkipValidation, BeforeValidator(as_prompts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _is_bounded(self) -> EmbeddingsRequest:
        if len(self.input) > MAX_INPUTS:
            raise InvalidArgumentError(f"input must have at most {MAX_INPUTS} texts", field="input")
        return self


def _texts(value: Any) -> Any:
    """One text or document, or a list of them, as a list of texts."""
    listed = value if isinstance(value, list) else [value]
    return [item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item for item in listed]


Texts = Annotated[
    list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), BeforeValidator(_texts)
]


class ScoreRequest(PoolingFields):
    """The body of `/v1/score`. vLLM has several names for both lists."""

    queries: Texts = Field(validation_alias=AliasChoices("queries", "text_1", "data_1"))
    """One text, or as many as there are documents."""
    documents: Texts = Field(validation_alias=AliasChoices("documents", "items", "text_2", "data_2"))

    @model_validator(mode="after")
    def _has_pairs(self) -> ScoreRequest:
        if len(self.queries) not in (1, len(self.documents)):
            counts = f"1 or {len(self.documents)} texts, as there are documents, not {len(self.queries)}"
            raise InvalidArgumentError(f"queries must have {counts}", field="queries")
        return self


class RerankRequest(PoolingFields):
    """The body of `/v1/rerank`."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] | None = None
    """0: all."""
    return_documents: bool | None = None
    """Default: true, as with vLLM and Jina."""


@dataclass(slots=True)
class _Result(Output):
    """Takes the result of one text or pair."""

    vector: Vector
    tokens: int = 0

    @override
    async def send(self, delta: TokenDelta, started: inference_pb2.GenerationStart | None) -> None:
        self.vector = np.array(delta.pooled, np.float32)

    @override
    async def end(self, done: inference_pb2.GenerationDone) -> None:
        self.tokens = done.usage.prompt_tokens


class PoolingEndpoints:
    """The three paths, and vLLM's other names for them. `chats` parses the bodies."""

    def __init__(self, api: InferenceApi, chats: OpenAIServing) -> None:
        self._api, self._chats = api, chats
        serve = {"embeddings": self.embeddings, "score": self.score, "rerank": self.rerank}
        names = ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank")
        self.paths = [ApiPath(("POST",), name, serve[name.rpartition("/")[2]]) for name in names]

    async def embeddings(self, exchange: HttpExchange) -> None:
        """POST /v1/embeddings."""
        fields = await self._chats.parsed(EmbeddingsRequest, await exchange.json_body(), NOT_SERVED)
        as_text = fields.encoding_format == "base64"

        def shown(results: list[_Result]) -> list[dict[str, Any]]:
            vectors = (result.vector for result in results)
            values = (
                base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist()
                for vector in vectors
            )
            return [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)]

        async with exchange.while_connected():
            model = await self._model(exchange, fields, (generation_pb2.POOLING_EMBED,), "embeddings")
            asked = _asked(fields, model, fields.dimensions)
            asked.omit_special_tokens = fields.add_special_tokens is False
            results = await self._pooled(exchange, asked, fields.input, _named("input", fields.input))
            await self._respond(exchange, asked, {"object": "list"}, "data", results, shown)

    async def score(self, exchange: HttpExchange) -> None:
        """POST /v1/score."""
        fields = await self._chats.parsed(ScoreRequest, await exchange.json_body(), NOT_SERVED)
        head = {"id": f"score-{exchange.request_id}", "object": "list", "created": int(time.time())}

        def shown(scores: list[float]) -> list[dict[str, Any]]:
            return [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]

        lists = fields.queries, fields.documents
        await self._scored(exchange, fields, lists, "queries", (head, "data"), shown)

    async def rerank(self, exchange: HttpExchange) -> None:
        """POST /v1/rerank."""
        fields = await self._chats.parsed(RerankRequest, await exchange.json_body(), NOT_SERVED)
        head, keeps = {"id": f"rerank-{exchange.request_id}"}, fields.return_documents is not False

        def shown(scores: list[float]) -> list[dict[str, Any]]:
            best = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n or None]
            documents = [{"document": {"text": text}} if keeps else {} for text in fields.documents]
            return [{"index": i} | documents[i] | {"relevance_score": scores[i]} for i in best]

        lists = [fields.query], fields.documents
        await self._scored(exchange, fields, lists, "query", (head, "results"), shown)

    async def _scored(
        self,
        exchange: HttpExchange,
        fields: PoolingFields,
        lists: tuple[list[str], list[str]],
        name: str,
        head: tuple[dict[str, Any], str],
        shown: Callable[[list[float]], list[dict[str, Any]]],
    ) -> None:
        """Responds with the scores of the pairs of both lists, the first of which may have one text for all. `name`:
        the field with that one. `head`: the response's first fields, and the name of the one with the scores."""
        (first, second), names = lists, _named("documents", lists[1])
        async with exchange.while_connected():
            model = await self._model(exchange, fields, SCORES, "scores")
            asked = _asked(fields, model)
            if model.pooling == generation_pb2.POOLING_EMBED:
                names = [*_named(name, first), *names]
                results = await self._pooled(exchange, asked, [*first, *second], names)

                def scores(results: list[_Result]) -> list[dict[str, Any]]:
                    left, right = results[: len(first)], results[len(first) :]
                    left = left if len(left) == len(right) else left * len(right)
                    return shown([_cosine(a.vector, b.vector) for a, b in zip(left, right, strict=True)])
            else:
                firsts = first if len(first) == len(second) else first * len(second)
                pairs = [ScoredPair(a, b) for a, b in zip(firsts, second, strict=True)]
                joined = model.pooling == generation_pb2.POOLING_SCORE_JOINED
                results = await self._pooled(exchange, asked, pairs, names, joined=joined)

                def scores(results: list[_Result]) -> list[dict[str, Any]]:
                    return shown([float(result.vector[0]) for result in results])

            await self._respond(exchange, asked, *head, results, scores, sum(map(len, second)))

    async def _model(
        self, exchange: HttpExchange, fields: PoolingFields, kinds: Sequence[int], wanted: str
    ) -> Model:
        """The model of a request. Raises InvalidArgumentError (WRONG_TASK) unless its pooling is one of `kinds`."""
        model = await self._api.model(fields.model or "", exchange.request_id, exchange.caller())
        if model.pooling not in kinds:
            raise wrong_task(fields.model or model.name, model, wanted)
        return model

    async def _pooled(
        self,
        exchange: HttpExchange,
        asked: inference_pb2.GenerateRequest,
        prompts: Sequence[Prompt | ScoredPair],
        names: Sequence[str],
        *,
        joined: bool = False,
    ) -> list[_Result]:
        """The results of all prompts. `asked`: what their requests have in common; `names`: where the HTTP request has
        each; `joined`: the texts of a pair are one text. The first failure cancels the others, but the tenant's quotas,
        which each text counts for, refuse the first text alone: the others wait until they are let in."""
        caller, results = exchange.caller(), [_Result(np.zeros(0, np.float32)) for _ in prompts]
        room = CHARACTERS_AT_ONCE // max(1, *map(_size, prompts))
        turns = asyncio.Semaphore(max(1, min(AT_ONCE, room, self._api.most_at_once(caller))))
        deadline_s = time.monotonic() + self._api.flow.config.request_timeout_s
        parent = exchange.header(b"traceparent")
        state = exchange.joined(b"tracestate") if parent else None
        trace = self._api.begin_trace(parent, state, "embeddings")

        async def run(index: int) -> None:
            async with turns:
                own = trace.sibling() if trace is not None and index else trace
                request = _request(asked, prompts[index], joined)
                request.request_id = choice_id(exchange.request_id, index)
                try:
                    while True:
                        try:
                            await self._api.generate(request, caller, results[index], trace=own)
                            return
                        except ResourceExhaustedError as error:
                            wait_s = error.retry_after_s
                            if not index or error.reason not in QUOTAS or wait_s is None:
                                raise
                            if time.monotonic() + wait_s > deadline_s:
                                raise
                        await asyncio.sleep(wait_s)
                except SplitserveError:
                    forms = ("prompt.text", "prompt.token_ids", "prompt.pair")
                    fields = {"pooling.": "", **dict.fromkeys(forms, names[index])}
                    exchange.field_names = FieldNames(fields)
                    raise

        async with asyncio.TaskGroup() as group:
            for index in range(len(prompts)):
                group.create_task(run(index))
        return results

    async def _respond(
        self,
        exchange: HttpExchange,
        asked: inference_pb2.GenerateRequest,
        head: dict[str, Any],
        name: str,
        results: list[_Result],
        shown: Callable[[list[_Result]], list[dict[str, Any]]],
        size: int = 0,
    ) -> None:
        """Responds with the results as `shown`; with `size` characters beside their numbers."""
        tokens = sum(result.tokens for result in results)
        model = self._api.routes.public_name(asked.model, exchange.caller())
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}

        def rendered() -> bytes:
            return dumped(head | {"model": model, name: shown(results), "usage": usage}).encode()

        size += VALUE_BYTES * sum(result.vector.size for result in results)
        await exchange.respond(200, await self._api.parser.run(size, rendered))


def _asked(
    fields: PoolingFields, model: Model, dimensions: int | None = None
) -> inference_pb2.GenerateRequest:
    """What the requests of all prompts have in common. A route may have several models: all prompts go to `model`."""
    return inference_pb2.GenerateRequest(
        model=fields.model or "",
        priority=fields.priority or 0,
        pooling=generation_pb2.PoolingParams(
            dimensions=dimensions or 0, use_activation=fields.use_activation
        ),
        resume=inference_pb2.GenerationResume(served_model=model.name),
    )


def _size(prompt: Prompt | ScoredPair) -> int:
    """Characters of a text or pair, or tokens."""
    return sum(map(len, prompt)) if isinstance(prompt, ScoredPair) else len(prompt)


def _request(
    asked: inference_pb2.GenerateRequest, prompt: Prompt | ScoredPair, joined: bool
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(asked)
    match prompt:
        case str():
            request.text = prompt
        case ScoredPair() if joined:
            request.text = "".join(prompt)
        case ScoredPair():
            request.pair.first, request.pair.second = prompt
        case _:
            request.token_ids.ids.extend(prompt)
    return request


def _named(name: str, prompts: Sequence[Prompt]) -> list[str]:
    """Where a list has each of its prompts."""
    return [f"{name}[{index}]" for index in range(len(prompts))] if len(prompts) > 1 else [name]


def _cosine(a: Vector, b: Vector) -> float:
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-8))
