"""`GenerateRequest.resume`: the rest of an answer, at a coordinator that has not seen its beginning."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from splitserve.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.cluster.fake_cluster import FakeCluster, ask, fake_cluster
from tests.support.cluster.fake_workers import FIRST_TOKEN
from tests.support.waiting import PATIENCE_S

LENGTH = generation_pb2.FINISH_REASON_LENGTH


async def messages(
    cluster: FakeCluster, resume: dict[str, Any] | None = None, **asked: Any
) -> list[inference_pb2.GenerateResponse]:
    request = ask(**asked)
    if resume is not None:
        request.resume.CopyFrom(inference_pb2.GenerationResume(**resume))
    return [message async for message in cluster.client.Generate(request, timeout=PATIENCE_S)]


async def test_the_first_message_says_how_to_go_on() -> None:
    async with fake_cluster() as cluster:
        first, *rest = await messages(cluster, max_tokens=4)
        assert first.HasField("delta")
        assert first.started.served_model == "words"
        assert first.started.request_id == rest[-1].done.request_id != ""
        assert first.started.seed == rest[-1].done.seed
        assert not any(message.HasField("started") for message in rest)


@pytest.mark.parametrize("known", [1, 3, 5])
async def test_the_rest_of_an_answer(known: int) -> None:
    async with fake_cluster() as cluster:
        have = [FIRST_TOKEN + n for n in range(known)]
        *deltas, last = await messages(
            cluster, {"token_ids": have, "served_model": "words"}, max_tokens=6, model="words"
        )
        assert deltas[0].delta.first_position == known
        assert [t for m in deltas for t in m.delta.token_ids] == [FIRST_TOKEN + n for n in range(known, 6)]
        assert last.done.finish_reason == LENGTH
        assert last.done.usage.completion_tokens == 6
        worker = cluster.prefills[0]
        assert worker.calls.entries[0].prior_output_tokens == known
        assert list(worker.calls.entries[0].token_ids)[-known:] == have


@pytest.mark.parametrize(
    ("resume", "reason"),
    [
        ({"token_ids": [100, 101, 102]}, LENGTH),
        (
            {"token_ids": [100], "finish_reason": generation_pb2.FINISH_REASON_STOP},
            generation_pb2.FINISH_REASON_STOP,
        ),
    ],
)
async def test_only_the_last_message_is_missing(
    resume: dict[str, Any], reason: generation_pb2.FinishReason.ValueType
) -> None:
    async with fake_cluster() as cluster:
        only = (await messages(cluster, resume, max_tokens=3))[0]
        assert only.done.finish_reason == reason
        assert only.done.usage.completion_tokens == len(resume["token_ids"])
        assert not cluster.prefills[0].calls.entries


@pytest.mark.parametrize(
    ("resume", "asked", "kind", "field"),
    [
        ({"token_ids": [100] * 5}, {"max_tokens": 4}, InvalidArgumentError, "resume.token_ids"),
        ({"token_ids": [1] * 65}, {"max_tokens": 4}, InvalidArgumentError, "resume.token_ids"),
        ({"token_ids": [2**31]}, {}, InvalidArgumentError, "resume.token_ids"),
        ({"token_ids": [1], "finish_reason": 99}, {}, InvalidArgumentError, "resume.finish_reason"),
        ({"served_model": "other"}, {"model": "words"}, FailedPreconditionError, "resume.served_model"),
        ({"served_model": "other"}, {"model": "public"}, FailedPreconditionError, "resume.served_model"),
        ({"served_model": "words"}, {"model": "secret"}, NotFoundError, "model"),
    ],
)
async def test_what_is_refused(
    resume: dict[str, Any], asked: dict[str, Any], kind: type[Exception], field: str
) -> None:
    async with fake_cluster(model_routes={"public": {"words": 1.0}}) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await messages(cluster, resume, **asked)
        error = error_from_rpc(caught.value)
        assert isinstance(error, kind)
        assert error.field == field


async def test_a_route_keeps_its_version() -> None:
    """Whatever the weights and the readiness have become: the tokens are those of the model that began."""
    async with fake_cluster(model_routes={"public": {"words": 0.0, "next": 1.0}}) as cluster:
        *_, last = await messages(
            cluster, {"token_ids": [FIRST_TOKEN], "served_model": "words"}, max_tokens=3, model="public"
        )
        assert last.done.served_by.model == "words"
        assert last.done.model == "public"
