"""Traces over OTLP: one trace through three processes, contexts of clients, resumes, receivers that are not there."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from splitserve.client import Completion
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.kserve.open_inference_pb2_grpc import GRPCInferenceServiceStub
from splitserve.rpc.channel import make_channel
from splitserve.tracing.context import TraceContext
from splitserve.v1 import inference_pb2
from tests.support.cluster.fake_cluster import (
    Collected,
    FakeCluster,
    ask,
    expected,
    fake_cluster,
    finish,
    read,
)
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.otlp_receiver import SERVER, OtlpReceiver, ReceivedSpan, from_all
from tests.support.waiting import PATIENCE_S, SLACK_S

PROMPT = list(range(5, 85))
SERVICES = ("coordinator", "prefill-worker", "decode-worker")
PROMPT_WORD = "xylophone"
CHAT = {
    "model": "simulated",
    "max_tokens": 3,
    "messages": [{"role": "user", "content": f"{PROMPT_WORD} {PROMPT_WORD}"}],
}
STOP_S = SLACK_S / 2
"""What ending a process may take here: its own time, FLUSH_S for its spans, and what a busy machine adds."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, otlp: OtlpReceiver) -> AsyncIterator[Cluster]:
    """A pair of simulated engines that trace what clients want to be traced, and nothing else."""
    traced = ["--tracing-endpoint", otlp.endpoint]
    made = Cluster(
        tmp_path_factory.mktemp("logs"),
        worker_options=traced,
        coordinator_options=[*traced, "--trace-sample-ratio", "0", "--max-client-traces", "1000"],
        http=True,
    )
    async with running(made):
        yield made


def sampled() -> TraceContext:
    return TraceContext.new(sampled=True)


def one(spans: list[ReceivedSpan], service: str, name: str) -> ReceivedSpan:
    return next(span for span in spans if (span.service, span.name) == (f"splitserve-{service}", name))


def root_of(spans: list[ReceivedSpan]) -> ReceivedSpan:
    return next(span for span in spans if span.kind == SERVER and span.service == "splitserve-coordinator")


async def test_one_trace_goes_through_all_three_processes(cluster: Cluster, otlp: OtlpReceiver) -> None:
    client = sampled()
    async with cluster.client() as calls:
        answer = await calls.generate(
            PROMPT, max_tokens=6, traceparent=client.traceparent, request_id="three"
        )
        record = await calls.request_record("three")
    assert isinstance(answer, Completion)
    assert (record.trace_id, record.trace_exported) == (client.trace_id, True)
    spans = await otlp.trace(client.trace_id, from_all(*SERVICES))
    assert len({span.span_id for span in spans}) == len(spans)
    root, attempt = root_of(spans), one(spans, "coordinator", "attempt")
    assert (root.name, root.parent_id) == ("text_completion simulated", client.span_id)
    assert attempt.parent_id == root.span_id
    for service, name, worker in (
        ("prefill-worker", "prefill", "prefill-0"),
        ("decode-worker", "decode", "decode-0"),
    ):
        whole = one(spans, service, name)
        assert (whole.parent_id, whole.instance, whole.kind) == (attempt.span_id, worker, SERVER)
        parts = [span for span in spans if span.parent_id == whole.span_id]
        assert parts
        assert all(whole.start_ns <= part.start_ns <= part.end_ns <= whole.end_ns for part in parts)
    names = {(span.service.removeprefix("splitserve-"), span.name) for span in spans}
    wanted = {("prefill-worker", name) for name in ("queue", "compute", "write")}
    wanted |= {("decode-worker", name) for name in ("reserve", "receive", "admit", "generate")}
    assert names >= wanted
    usage = root.attributes["gen_ai.usage.input_tokens"], root.attributes["gen_ai.usage.output_tokens"]
    assert usage == (len(PROMPT), 6)
    assert root.attributes["gen_ai.response.id"] == "three"
    await cluster.assert_no_leaks()


async def test_headers_go_in_and_out_over_http(cluster: Cluster, otlp: OtlpReceiver) -> None:
    client, state = sampled(), "vendor=one"
    headers = {"traceparent": client.traceparent, "tracestate": state, "x-request-id": "over-http"}
    async with httpx.AsyncClient(timeout=PATIENCE_S, headers=headers) as http:
        for body in (CHAT, CHAT | {"stream": True}):
            answer = await http.post(f"{cluster.base_url}/chat/completions", json=body)
            assert answer.status_code == 200
            told = TraceContext.parse(answer.headers["traceparent"])
            assert told is not None
            assert (told.trace_id, told.sampled) == (client.trace_id, True)
    spans = await otlp.trace(client.trace_id, lambda found: any(s.span_id == told.span_id for s in found))
    last = next(span for span in spans if span.span_id == told.span_id)
    assert (last.parent_id, last.name) == (client.span_id, "chat simulated")
    assert {span.tracestate for span in spans if span.service == "splitserve-coordinator"} == {state}
    assert PROMPT_WORD not in str(spans)
    for member in cluster.members.values():
        assert PROMPT_WORD not in member.log_path.read_text()


async def test_each_choice_has_its_spans(cluster: Cluster, otlp: OtlpReceiver) -> None:
    client = sampled()
    async with httpx.AsyncClient(timeout=PATIENCE_S, headers={"traceparent": client.traceparent}) as http:
        answer = await http.post(f"{cluster.base_url}/chat/completions", json=CHAT | {"n": 3})
        assert answer.status_code == 200

    def roots(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.parent_id == client.span_id]

    spans = roots(await otlp.trace(client.trace_id, lambda found: len(roots(found)) == 3))
    given = {span.attributes["gen_ai.response.id"] for span in spans}
    assert given == {f"{answer.headers['x-request-id']}-{number}" for number in range(3)}


async def test_metadata_goes_in_and_out_over_grpc(cluster: Cluster, otlp: OtlpReceiver) -> None:
    client = sampled()
    metadata = (("traceparent", client.traceparent), ("tracestate", "a=1"), ("tracestate", "b=2"))
    prompt = pb.ModelInferRequest.InferInputTensor(
        name="text_input",
        datatype="BYTES",
        shape=[1],
        contents=pb.InferTensorContents(bytes_contents=[b"hello"]),
    )
    request = pb.ModelInferRequest(model_name="simulated", inputs=[prompt])
    request.parameters["max_tokens"].int64_param = 3
    async with make_channel(cluster.target) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=PATIENCE_S, metadata=metadata)
        told = TraceContext.parse(str(dict(await call.initial_metadata())["traceparent"]))
        await call
    assert told is not None
    spans = await otlp.trace(client.trace_id, from_all("coordinator"))
    assert (root_of(spans).span_id, root_of(spans).tracestate) == (told.span_id, "a=1,b=2")


async def test_an_unsampled_context_is_passed_on_and_logged(cluster: Cluster, otlp: OtlpReceiver) -> None:
    client = TraceContext.new(sampled=False)
    headers = {"traceparent": client.traceparent, "x-request-id": "unsampled"}
    async with httpx.AsyncClient(timeout=PATIENCE_S, headers=headers) as http, cluster.client() as calls:
        answer = await http.post(f"{cluster.base_url}/chat/completions", json=CHAT)
        record = await calls.request_record("unsampled")
        after = sampled()
        await calls.generate(PROMPT, max_tokens=2, traceparent=after.traceparent)
    assert answer.headers["traceparent"].endswith("-00")
    assert (record.trace_id, record.trace_exported) == (client.trace_id, False)
    logged = [e for e in cluster.members["coordinator"].events() if e.get("request_id") == "unsampled"]
    assert logged
    assert {entry["trace_id"] for entry in logged} == {client.trace_id}
    await otlp.trace(after.trace_id, from_all("coordinator"))  # sent after it
    assert not otlp.of(client.trace_id)


@pytest.mark.parametrize(
    "wrong", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff" * 3000, "00-gg-\xe4-01"]
)
async def test_a_wrong_context_is_ignored_and_not_logged(cluster: Cluster, wrong: str) -> None:
    headers = {b"traceparent": wrong.encode("latin-1"), b"tracestate": b"=" * 3000}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        answer = await http.post(f"{cluster.base_url}/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 200
    assert TraceContext.parse(answer.headers["traceparent"]) is not None
    log = cluster.members["coordinator"].log_path.read_text()
    assert not wrong or wrong not in log
    assert "=" * 100 not in log


def traced(receiver: OtlpReceiver, **more: Any) -> dict[str, Any]:
    return {"tracing": {"endpoint": receiver.endpoint, "sample_ratio": 1.0, **more}}


async def test_a_resumed_attempt_links_to_the_failed_one(otlp: OtlpReceiver) -> None:
    async with fake_cluster(decode=2, **traced(otlp)) as cluster:
        for decode in cluster.decodes:
            decode.pause_at = 3
        call, answer = cluster.call(ask(10, request_id="resumed")), Collected()
        await read(call, answer, 3)
        killed, other = sorted(cluster.decodes, key=lambda d: -d.live)
        other.pause_at = None
        await killed.stop()
        await finish(call, answer)
        told = TraceContext.parse(str(dict(await call.initial_metadata())["traceparent"]))
        assert told is not None
        spans = await otlp.trace(told.trace_id, from_all("coordinator"))
    first, second = sorted(
        (span for span in spans if span.name == "attempt"), key=lambda s: s.attributes["splitserve.attempt"]
    )
    assert first.attributes["splitserve.decode_worker"] == killed.worker_id
    assert first.error
    assert first.links == ()
    assert second.links == ((told.trace_id, first.span_id),)
    assert second.error == ""


async def started(
    cluster: FakeCluster, request: inference_pb2.GenerateRequest
) -> inference_pb2.GenerationStart:
    responses = [response async for response in cluster.call(request)]
    return responses[0].started


async def test_an_answer_resumed_elsewhere_links_to_its_beginning(otlp: OtlpReceiver) -> None:
    async with fake_cluster(**traced(otlp)) as first:
        begun = TraceContext.parse((await started(first, ask(6))).traceparent)
    assert begun is not None
    rest = ask(6)
    rest.resume.token_ids.extend(expected(2))
    rest.resume.traceparent = begun.traceparent
    async with fake_cluster(**traced(otlp)) as second:
        went_on = TraceContext.parse((await started(second, rest)).traceparent)
        rest.resume.traceparent = "nonsense" * 1000
        await started(second, rest)
    assert went_on is not None
    wanted = {begun.span_id, went_on.span_id}
    found = await otlp.trace(begun.trace_id, lambda spans: wanted <= {span.span_id for span in spans})
    spans = {span.span_id: span for span in found}
    assert spans[went_on.span_id].links == ((begun.trace_id, begun.span_id),)


async def test_a_refused_request_is_traced_with_its_error(otlp: OtlpReceiver) -> None:
    async with fake_cluster(**traced(otlp)) as cluster:
        client = sampled()
        call = cluster.client.Generate(
            ask(6, model="unknown"), timeout=PATIENCE_S, metadata=(("traceparent", client.traceparent),)
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        spans = await otlp.trace(client.trace_id, from_all("coordinator"))
    assert root_of(spans).attributes["error.type"] == "MODEL_NOT_FOUND"


@pytest.fixture(params=["dead", "silent"])
def lost_endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """A port that refuses connections, or one that takes them and never says anything."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if request.param == "silent":
            port.listen(64)
        yield f"http://127.0.0.1:{port.getsockname()[1]}"


@pytest.mark.slow
async def test_a_receiver_that_is_not_there_costs_requests_nothing(log_dir: Path, lost_endpoint: str) -> None:
    options = ["--tracing-endpoint", lost_endpoint]
    made = Cluster(
        log_dir,
        worker_options=options,
        coordinator_options=[*options, "--trace-sample-ratio", "1"],
        http=True,
    )
    async with running(made):
        async with made.client() as calls:
            for _ in range(20):
                answer = await calls.generate(PROMPT, max_tokens=4, timeout_s=PATIENCE_S)
                assert len(answer.token_ids) == 4
        await made.assert_no_leaks()
        for name, member in reversed(made.members.items()):
            began_s = time.monotonic()
            assert await asyncio.to_thread(member.terminate) == 0, name
            assert time.monotonic() - began_s < STOP_S, name


PROGRAM = """
import asyncio, sys
from tests.support.cluster.fake_cluster import ask, fake_cluster

async def main() -> None:
    async with fake_cluster() as cluster:
        call = cluster.client.Generate(ask(6), metadata=(("traceparent", "00-{trace}-{span}-01"),))
        assert [response async for response in call][-1].done.usage.completion_tokens == 6
        assert "traceparent" not in dict(await call.initial_metadata())

asyncio.run(main())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_without_an_endpoint_no_tracing_library_is_loaded() -> None:
    program = PROGRAM.format(trace="4bf92f3577b34da6a3ce929d0e0e4736", span="00f067aa0ba902b7")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
