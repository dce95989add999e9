"""Random and damaged messages to every service (failure case 21): typed errors only, and nothing breaks or leaks.

`SPLITSERVE_FUZZ_EXAMPLES` sets how many are sent to each face; the default is for `make test`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from splitserve.v1 import (
    calls_pb2,
    decode_pb2,
    generation_pb2,
    inference_pb2,
    prefill_pb2,
    records_pb2,
    registry_pb2,
    routes_pb2,
    scaling_pb2,
)
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from tests.support.clients.fuzz import (
    EXAMPLES,
    FUZZED,
    Loop,
    changed,
    damaged,
    raw_channel,
    raw_stream_channel,
)
from tests.support.clients.fuzz_target import CALL_S, Target, bytes_of, fuzzed_coordinator, works
from tests.support.clients.patient import PatientClient
from tests.support.cluster.fake_cluster import FakeCluster
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.registrations import registration

PICKS = st.integers(0, 2**64 - 1).map(random.Random)
STREAM_S = 0.05
"""How long a stream that would stay open is left so."""
LONG_POLL_S = 1.0
"""The same of a call that waits for what does not happen here."""

GENERATE = inference_pb2.GenerateRequest(
    model="words",
    text="w1 w2 w3",
    request_id="fuzz",
    session_id="s",
    sampling=generation_pb2.SamplingParams(temperature=0.7, top_p=0.9, seed=3, logprobs=2),
    stop=generation_pb2.StopParams(max_tokens=4, stop_strings=["x"], stop_token_ids=[5]),
)
GENERATE.timeout.seconds = 5
CHAT = inference_pb2.GenerateRequest(stop=generation_pb2.StopParams(max_tokens=3))
CHAT.chat.messages.add(role="user", content="w1 w2")
GUIDED = inference_pb2.GenerateRequest(text="w1", stop=generation_pb2.StopParams(max_tokens=3))
GUIDED.sampling.grammar.json_schema = '{"type": "string", "maxLength": 3}'
TOKENS = inference_pb2.GenerateRequest(stop=generation_pb2.StopParams(max_tokens=3))
TOKENS.token_ids.ids.extend([1, 2, 3])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, EXAMPLES * 1.5))]


@pytest.fixture(scope="module")
def front() -> Iterator[tuple[Target, FakeCluster]]:
    with fuzzed_coordinator() as target:
        yield target


@pytest.fixture(autouse=True)
def no_errors_inside(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Servers in this process log no error: gRPC logs there what it cannot send."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR] == []


def test_generate(front: tuple[Target, FakeCluster]) -> None:
    target, cluster = front

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        data = bytes_of(pick, pick.choice([GENERATE, CHAT, GUIDED, TOKENS]))
        target.send("/splitserve.v1.InferenceService/Generate", data, streams=True)

    fuzz()
    works(target, cluster)
    assert target.codes["Generate OK"] > EXAMPLES / 20
    assert target.codes["Generate INVALID_ARGUMENT"] > EXAMPLES / 20


OTHERS: list[tuple[str, Message]] = [
    ("InferenceService/GetServerInfo", inference_pb2.GetServerInfoRequest()),
    ("InferenceService/ListModels", inference_pb2.ListModelsRequest()),
    ("InferenceService/GetRequestRecord", records_pb2.GetRequestRecordRequest(request_id="fuzz")),
    ("InferenceService/ListRequestRecords", records_pb2.ListRequestRecordsRequest(slow=True, limit=5)),
    ("ScalingService/GetSignals", scaling_pb2.GetSignalsRequest()),
    ("ScalingService/ApplyPlan", scaling_pb2.ApplyPlanRequest()),
    (
        "ScalingService/ReportEnded",
        scaling_pb2.ReportEndedRequest(boots=[scaling_pb2.WorkerBoot(worker_id="x", epoch=1)]),
    ),
    ("RoutesService/GetRoutes", routes_pb2.GetRoutesRequest()),
    ("RegistryService/Register", registration("stranger", registry_pb2.ROLE_PREFILL)),
]


@pytest.mark.parametrize(("method", "valid"), OTHERS)
def test_the_coordinators_other_calls(front: tuple[Target, FakeCluster], method: str, valid: Message) -> None:
    target, cluster = front
    waits = method == "ScalingService/GetSignals"

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        message = changed(pick, valid)
        if isinstance(message, registry_pb2.RegisterRequest) and message.model.name == "words":
            message.model.name = "other"  # real workers of this model are not to be shut out
        data = message.SerializeToString()
        data = damaged(pick, data) if pick.random() < 0.25 else data
        target.send(f"/splitserve.v1.{method}", data, limit_s=LONG_POLL_S if waits else CALL_S)

    fuzz()
    works(target, cluster)


def test_report(front: tuple[Target, FakeCluster]) -> None:
    target, cluster = front
    valid = registry_pb2.ReportRequest(worker_id="stranger", epoch=1, connected_agent_ids=["a"])

    @FUZZED
    @given(pick=PICKS)
    def fuzz(channel: grpc.Channel, pick: random.Random) -> None:
        messages = [changed(pick, valid).SerializeToString() for _ in range(pick.randint(0, 3))]
        if messages and pick.random() < 0.25:
            messages[-1] = damaged(pick, messages[-1])
        target.send_stream(channel, "/splitserve.v1.RegistryService/Report", messages, limit_s=1.0)

    with raw_stream_channel(cluster.address) as channel:
        fuzz(channel)
    works(target, cluster)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    """Real workers with simulated engines: a target for each pool. `decode` has the output stream of "fuzz" open."""
    loop = Loop()
    options = ["--heartbeat", "0.2", "--lease", "1", "--quarantine", "2", "--num-blocks", "4000"]

    @asynccontextmanager
    async def made() -> AsyncIterator[dict[str, Target]]:
        cluster = Cluster(tmp_path_factory.mktemp("logs"), worker_options=options)
        async with running(cluster), PatientClient(cluster.target) as client:
            addresses = {worker.role: worker.address for worker in (await client.server_info()).workers}
            async with (
                raw_channel(addresses["prefill"]) as prefill,
                raw_channel(addresses["decode"]) as decode,
            ):
                stub = DecodeServiceStub(decode)
                outputs = stub.StreamOutputs(
                    decode_pb2.StreamOutputsRequest(coordinator_id="fuzz", attachment=1)
                )
                await outputs.read()
                yield {"prefill": Target(loop, prefill), "decode": Target(loop, decode)}
                outputs.cancel()
            answer = await client.generate([1, 2, 3], max_tokens=5)
            assert len(answer.token_ids) == 5
            await cluster.assert_no_leaks()

    with loop.holding(made) as targets:
        yield targets
        print({pool: dict(sorted(target.codes.items())) for pool, target in targets.items()})


def test_prefill(workers: dict[str, Target]) -> None:
    valid = prefill_pb2.PrefillRequest(request_id="p", token_ids=range(1, 30))
    valid.stop.max_tokens = 3
    valid.timeout.seconds = 5

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        workers["prefill"].send("/splitserve.v1.PrefillService/Prefill", bytes_of(pick, valid), streams=True)

    fuzz()
    assert workers["prefill"].codes["Prefill OK"] > EXAMPLES / 20


def test_reserve_and_abort(workers: dict[str, Target]) -> None:
    target = workers["decode"]
    valid = decode_pb2.ReserveRequest(
        request_id="r", coordinator_id="fuzz", attachment=1, token_ids=range(1, 30)
    )
    valid.stop.max_tokens = 3
    valid.timeout.seconds = 5

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        message = changed(pick, valid)
        data = message.SerializeToString()
        target.send(
            "/splitserve.v1.DecodeService/Reserve", damaged(pick, data) if pick.random() < 0.25 else data
        )
        abort = decode_pb2.AbortRequest(
            request_id=message.request_id, coordinator_id=message.coordinator_id, no_writer=True
        )
        target.send("/splitserve.v1.DecodeService/Abort", abort.SerializeToString())
        target.send("/splitserve.v1.DecodeService/Abort", bytes_of(pick, abort))

    fuzz()
    assert target.codes["Reserve OK"] > EXAMPLES / 20


def test_carried_calls(workers: dict[str, Target]) -> None:
    """Their requests are those above; here also what carries them is wrong."""
    target = workers["decode"]
    reserve = decode_pb2.ReserveRequest(
        request_id="c", coordinator_id="fuzz", attachment=1, token_ids=range(1, 30)
    )
    reserve.stop.max_tokens = 3
    reserve.timeout.seconds = 5
    abort = decode_pb2.AbortRequest(request_id="c", coordinator_id="fuzz", no_writer=True)

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        message = calls_pb2.CarryRequest()
        message.calls.add(number=1, reserve=damaged(pick, changed(pick, reserve).SerializeToString()))
        message.calls.add(number=2, reserve=changed(pick, reserve).SerializeToString())
        message.calls.add(number=3, abort=changed(pick, abort).SerializeToString())
        message.calls.add(number=2, cancel=True)
        for call in message.calls:
            call.timeout.seconds = 5
        if pick.random() < 0.5:
            message = changed(pick, message)
        data = message.SerializeToString()
        target.send(
            "/splitserve.v1.CallService/Carry",
            damaged(pick, data) if pick.random() < 0.25 else data,
            streams=True,
        )
        target.send("/splitserve.v1.DecodeService/Abort", abort.SerializeToString())

    fuzz()
    assert target.codes["Carry OK"] > EXAMPLES / 20


def test_stream_outputs(workers: dict[str, Target]) -> None:
    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        asked = decode_pb2.StreamOutputsRequest(
            coordinator_id="other",
            attachment=pick.choice([0, 1, 2**63]),
            requests=[decode_pb2.AttachedRequest(request_id="a", next_position=3)],
        )
        message = changed(pick, asked)
        if message.coordinator_id == "fuzz":
            return
        data = message.SerializeToString()
        data = damaged(pick, data) if pick.random() < 0.5 else data
        workers["decode"].send(
            "/splitserve.v1.DecodeService/StreamOutputs", data, streams=True, limit_s=STREAM_S
        )
        read = changed(pick, decode_pb2.AcknowledgeOutputsRequest(coordinator_id="other", attachment=1))
        workers["decode"].send("/splitserve.v1.DecodeService/AcknowledgeOutputs", read.SerializeToString())

    fuzz()
