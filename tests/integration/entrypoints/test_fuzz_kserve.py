"""Random and damaged messages to the KServe service: typed errors only, and nothing breaks or leaks.

`SPLITSERVE_FUZZ_EXAMPLES` sets how many are sent to each face; the default is for `make test`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kserve import open_inference_pb2 as pb
from tests.support.clients.fuzz import (
    EXAMPLES,
    FUZZED,
    Loop,
    as_they_are,
    changed,
    damaged,
    ending,
    exchange,
    raw_channel,
    raw_stream_channel,
    settle_for_long_run,
    tell_stall,
)
from tests.support.cluster.fake_cluster import FakeCluster, ask, expected, fake_cluster
from tests.support.journal import settled

SERVICE = "/inference.GRPCInferenceService/"
TYPED = frozenset({"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"})
PICKS = st.integers(0, 2**64 - 1).map(random.Random)
CALL_S = 10.0
Face = tuple[Loop, grpc.aio.Channel, FakeCluster, Counter[str]]

pytestmark = pytest.mark.timeout(max(300, EXAMPLES * 1.5))


def typed_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="words", id="fuzz")
    for name, kind, field, values in (
        ("text_input", "BYTES", "bytes_contents", [b"w1 w2"]),
        ("max_tokens", "INT32", "int_contents", [3]),
        ("temperature", "FP32", "fp32_contents", [0.5]),
        ("stop", "BYTES", "bytes_contents", [b"x", b"y"]),
    ):
        tensor = request.inputs.add(name=name, datatype=kind, shape=[len(values)])
        getattr(tensor.contents, field).extend(values)
    request.outputs.add(name="text_output")
    return request


def raw_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="words", id="fuzz")
    request.inputs.add(name="input_ids", datatype="INT32", shape=[1, 3])
    request.raw_input_contents.append(b"\1\0\0\0\2\0\0\0\3\0\0\0")
    request.parameters["max_tokens"].int64_param = 3
    request.parameters["sampling_parameters"].string_param = '{"temperature": 0.5, "logit_bias": {"5": 1}}'
    return request


VALID = [typed_request(), raw_request()]
OTHERS: list[tuple[str, Message]] = [
    ("ModelReady", pb.ModelReadyRequest(name="words")),
    ("ModelMetadata", pb.ModelMetadataRequest(name="words")),
    ("ModelConfig", pb.ModelConfigRequest(name="words")),
    ("RepositoryIndex", pb.RepositoryIndexRequest()),
]


@pytest.fixture(scope="module")
def face() -> Iterator[Face]:
    loop = Loop()

    @asynccontextmanager
    async def made() -> AsyncIterator[Face]:
        async with fake_cluster() as cluster, raw_channel(cluster.address) as channel:
            settle_for_long_run(cluster.coordinator.loop_lag)
            yield loop, channel, cluster, Counter[str]()

    with loop.holding(made) as held:
        yield held
        print(dict(sorted(held[3].items())))


@pytest.fixture(autouse=True)
def no_errors_inside(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Servers in this process log no error."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR] == []


def bytes_of(pick: random.Random, valid: Message) -> bytes:
    data = changed(pick, valid).SerializeToString()
    return damaged(pick, data) if pick.random() < 0.25 else data


def send(face: Face, method: str, data: bytes) -> None:
    loop, channel, _, codes = face

    async def call() -> tuple[grpc.StatusCode, str]:
        make: Any = channel.unary_unary(
            SERVICE + method, request_serializer=as_they_are, response_deserializer=as_they_are
        )
        return await ending(make(data, timeout=CALL_S))

    code, details = loop.run(call())
    codes[f"{method} {code.name}"] += 1
    assert code.name in TYPED, f"{method}: {code}: {details}\n{data!r}"


def works(face: Face) -> None:
    """A normal request afterwards, and nothing of the others left."""
    loop, _, cluster, _ = face

    async def request() -> None:
        answer = await cluster.answer(ask(max_tokens=5, model="words"))
        assert answer.token_ids == expected(5)
        await settled(lambda: not cluster.coordinator.api.running)
        await settled(lambda: not any(decode.live for decode in cluster.decodes))

    loop.run(request())
    tell_stall(cluster.coordinator.loop_lag)


def test_infer(face: Face) -> None:
    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        send(face, "ModelInfer", bytes_of(pick, pick.choice(VALID)))

    fuzz()
    works(face)
    assert face[3]["ModelInfer OK"] > EXAMPLES / 20
    assert face[3]["ModelInfer INVALID_ARGUMENT"] > EXAMPLES / 20


def test_infer_streams(face: Face) -> None:
    """Errors of single requests come in their responses."""
    _, _, cluster, codes = face

    @FUZZED
    @given(pick=PICKS)
    def fuzz(channel: grpc.Channel, pick: random.Random) -> None:
        messages = [bytes_of(pick, pick.choice(VALID)) for _ in range(pick.randint(1, 3))]
        ended, details, answers = exchange(channel, SERVICE + "ModelStreamInfer", messages, CALL_S)
        codes[f"ModelStreamInfer {ended.name}"] += 1
        assert ended.name in TYPED, (ended, details, messages)
        for answer in map(pb.ModelStreamInferResponse.FromString, answers):
            code = answer.infer_response.parameters["error_code"].string_param or "OK"
            codes[f"in a stream {code}"] += 1
            assert code in TYPED, (answer.error_message, messages)

    with raw_stream_channel(cluster.address) as channel:
        fuzz(channel)
    works(face)


@pytest.mark.parametrize(("method", "valid"), OTHERS)
def test_other_methods(face: Face, method: str, valid: Message) -> None:
    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        send(face, method, bytes_of(pick, valid))

    fuzz()
    works(face)
