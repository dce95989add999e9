"""Random and damaged messages to the KServe service: typed errors only, and nothing breaks or leaks.

`SPLITSERVE_FUZZ_EXAMPLES` sets how many are sent to each face; the default is for `make test`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kserve import open_inference_pb2 as pb
from tests.support.clients.fuzz import EXAMPLES, FUZZED, raw_stream_channel
from tests.support.clients.fuzz_target import CALL_S, TYPED, Target, bytes_of, fuzzed_coordinator, works
from tests.support.cluster.fake_cluster import FakeCluster

SERVICE = "/inference.GRPCInferenceService/"
PICKS = st.integers(0, 2**64 - 1).map(random.Random)

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
def front() -> Iterator[tuple[Target, FakeCluster]]:
    with fuzzed_coordinator() as target:
        yield target


@pytest.fixture(autouse=True)
def no_errors_inside(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Servers in this process log no error."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR] == []


def test_infer(front: tuple[Target, FakeCluster]) -> None:
    target, cluster = front

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        target.send(f"{SERVICE}ModelInfer", bytes_of(pick, pick.choice(VALID)))

    fuzz()
    works(target, cluster)
    assert target.codes["ModelInfer OK"] > EXAMPLES / 20
    assert target.codes["ModelInfer INVALID_ARGUMENT"] > EXAMPLES / 20


def test_infer_streams(front: tuple[Target, FakeCluster]) -> None:
    """Errors of single requests come in their responses."""
    target, cluster = front

    @FUZZED
    @given(pick=PICKS)
    def fuzz(channel: grpc.Channel, pick: random.Random) -> None:
        messages = [bytes_of(pick, pick.choice(VALID)) for _ in range(pick.randint(1, 3))]
        answers = target.send_stream(channel, f"{SERVICE}ModelStreamInfer", messages, CALL_S)
        for answer in map(pb.ModelStreamInferResponse.FromString, answers):
            code = answer.infer_response.parameters["error_code"].string_param or "OK"
            target.codes[f"in a stream {code}"] += 1
            assert grpc.StatusCode[code] in TYPED, (answer.error_message, messages)

    with raw_stream_channel(cluster.address) as channel:
        fuzz(channel)
    works(target, cluster)


@pytest.mark.parametrize(("method", "valid"), OTHERS)
def test_other_methods(front: tuple[Target, FakeCluster], method: str, valid: Message) -> None:
    target, cluster = front

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        target.send(SERVICE + method, bytes_of(pick, valid))

    fuzz()
    works(target, cluster)
