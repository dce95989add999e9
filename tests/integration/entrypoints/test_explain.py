"""`splitserve explain` and the calls behind it: one story everywhere, records for their tenant alone, typed errors."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from splitserve.client import Completion
from splitserve.errors import InvalidArgumentError, NotFoundError, UnauthenticatedError
from splitserve.rpc.documents import document
from splitserve.security.api_keys import key_hash, new_key
from splitserve.v1 import records_pb2
from tests.support.clients.patient import PatientClient
from tests.support.cluster.fake_cluster import Collected, FakeCluster, ask, fake_cluster, finish, read
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.otlp_receiver import SERVER, OtlpReceiver, ReceivedSpan, from_all
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
PROMPT = list(range(5, 85))
TOLERANCE_MS = 1.0
ROUNDING_NS = 1e4
"""Of a time since 1970, in seconds, as a float."""
REQUIRED = {"request_id", "ttft_ms", "phases", "decisions"}
PHASE = {"name", "start_ms", "end_ms", "worker"}
DECISION = {"stage", "chosen", "candidates", "reason"}
KEYS = {name: new_key() for name in ("alice", "bob", "root")}

pytestmark = pytest.mark.timeout(120)


async def program(*arguments: str, target: str, **environment: str) -> tuple[int, str, str]:
    """Exit code and output of `splitserve explain`."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "launcher", "explain", *arguments),
        stdout=pipe, stderr=pipe, cwd=ROOT, env=os.environ | {"SPLITSERVE_TARGET": target} | environment,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    assert b"Traceback" not in err
    return process.returncode, out.decode(), err.decode()


def sums(metrics: str) -> dict[str, float]:
    """Milliseconds by phase, cold ones included; the TTFT as `ttft`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "splitserve_request_phase_seconds_sum":
                phase = sample.labels["phase"]
            elif sample.name == "splitserve_time_to_first_token_seconds_sum":
                phase = "ttft"
            else:
                continue
            found[phase] = found.get(phase, 0.0) + sample.value * 1e3
    return found


def assert_one_story(
    record: records_pb2.RequestRecord, told: Completion, metrics: str, trace: list[ReceivedSpan]
) -> None:
    """The record, what `--timings` shows, the metrics and the trace agree within a millisecond, phase by phase."""
    times, counted = told.timings, sums(metrics)
    took = {phase.name: phase.end_ms - phase.start_ms for phase in record.phases}
    near = pytest.approx
    before = [phase for phase in record.phases if phase.start_ms < record.ttft_ms - 1e-6]
    assert sum(p.end_ms - p.start_ms for p in before) == near(record.ttft_ms, abs=TOLERANCE_MS)
    assert record.ttft_ms == near(times.ttft_ms, abs=TOLERANCE_MS) == near(counted["ttft"], abs=TOLERANCE_MS)
    ways = {
        "reserve": (times.reserve_ms, counted["reserve"]),
        "prefill_compute": (times.prefill_ms, counted["prefill_compute"]),
        "transfer": (times.transfer_ms, counted["transfer"]),
        "decode_admit": (times.decode_admit_ms, counted["decode_admit"]),
        "prefill_queue": (counted["prefill_queue"],) * 2,
    }
    for name, (timing, metric) in ways.items():
        assert took.get(name, 0.0) == near(timing, abs=TOLERANCE_MS) == near(metric, abs=TOLERANCE_MS), name
    until_computing = ("tokenize", "admission", "route", "reserve", "prefill_queue")
    assert sum(took.get(name, 0.0) for name in until_computing) == near(times.queue_ms, abs=TOLERANCE_MS)
    assert record.tpot_ms == near(times.tpot_ms, abs=TOLERANCE_MS)
    assert record.attempt_count == told.served_by.attempts == 1
    attempt = record.attempts[0]
    workers = told.served_by.prefill_worker, told.served_by.decode_worker
    assert (attempt.prefill_worker, attempt.decode_worker) == workers
    assert (attempt.transport, attempt.written_bytes) == (told.served_by.transport, times.transfer_bytes)
    assert record.prompt_tokens == told.usage.prompt_tokens
    assert record.output_tokens == told.usage.completion_tokens
    assert attempt.descriptors > 0
    assert attempt.chunks > 0
    assert attempt.lane
    assert_trace_tells_it(record, trace)


def assert_page_tells_it(
    record: records_pb2.RequestRecord, shown: dict[str, Any], history: dict[str, Any], metrics: str
) -> None:
    """The page's waterfall is the record, and its figures over time add up to the metrics' sums."""
    assert shown == document(record)
    counted, columns, (rows,) = sums(metrics), history["columns"], history["models"].values()
    added = {name: sum(row[place] or 0 for row in rows) for place, name in enumerate(columns)}
    assert (added["requests"], added["ttft_count"], added["tpot_count"]) == (1, 1, 1)
    near = pytest.approx
    assert (
        added["ttft_ms"] == near(record.ttft_ms, abs=TOLERANCE_MS) == near(counted["ttft"], abs=TOLERANCE_MS)
    )
    assert added["tpot_ms"] == near(record.tpot_ms, abs=TOLERANCE_MS)
    for phase in ("admit", "reserve", "prefill_queue", "prefill_compute"):
        assert added[f"{phase}_ms"] == near(counted[phase], abs=TOLERANCE_MS), phase


async def page_of(
    cluster: Cluster, http: httpx.AsyncClient, name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The page's record of a request, and its figures once they count the first one that ended."""
    base_url = cluster.base_url.removesuffix("/v1")
    shown = (await http.get(f"{base_url}/page/request/{name}")).json()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        history = (await http.get(f"{base_url}/page/history")).json()
        place = history["columns"].index("tpot_count")
        if sum(row[place] for rows in history["models"].values() for row in rows):
            return shown, history
        assert time.monotonic() < deadline, history
        await asyncio.sleep(0.1)


def assert_trace_tells_it(record: records_pb2.RequestRecord, trace: list[ReceivedSpan]) -> None:
    """The coordinator's spans are the record's phases, and what the workers measured themselves is the same."""
    near, received_ns = pytest.approx, record.received.ToNanoseconds()
    ours = {span.name: span for span in trace if span.service == "splitserve-coordinator"}
    whole = next(span for span in ours.values() if span.kind == SERVER)
    assert whole.ms == near(record.total_ms, abs=TOLERANCE_MS)
    assert whole.attributes["splitserve.ttft_ms"] == near(record.ttft_ms, abs=TOLERANCE_MS)
    assert ours.keys() - {whole.name, "attempt"} == {phase.name for phase in record.phases}
    for phase in record.phases:
        span = ours[phase.name]
        times = (span.start_ns - received_ns) / 1e6, (span.end_ns - received_ns) / 1e6
        assert times == near((phase.start_ms, phase.end_ms), abs=TOLERANCE_MS), phase.name
        assert span.attributes.get("splitserve.worker", "") == phase.worker
    before = [
        span
        for span in ours.values()
        if span.parent_id and span.end_ns <= whole.start_ns + record.ttft_ms * 1e6 + ROUNDING_NS
    ]
    phases = [span.ms for span in before if span.name != "attempt"]
    assert sum(phases) == near(record.ttft_ms, abs=TOLERANCE_MS)
    took = {phase.name: phase.end_ms - phase.start_ms for phase in record.phases}
    theirs = {(span.service, span.name): span.ms for span in trace}
    measured = {
        ("splitserve-prefill-worker", "queue"): took.get("prefill_queue", 0.0),
        ("splitserve-prefill-worker", "compute"): took["prefill_compute"],
        ("splitserve-decode-worker", "admit"): took["decode_admit"],
    }
    for place, took_ms in measured.items():
        assert theirs[place] == near(took_ms, abs=TOLERANCE_MS), place


async def story(
    cluster: Cluster, otlp: OtlpReceiver, prompt: Any
) -> tuple[records_pb2.RequestRecord, Completion]:
    """One request, the first one of this cluster, told everywhere; then by the program."""
    async with cluster.client() as client, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        told = await client.generate(prompt, max_tokens=8, temperature=0.0, request_id="story")
        record = await client.request_record("story")
        metrics = (await http.get(f"{cluster.base_url.removesuffix('/v1')}/metrics")).text
        shown_by_page, history = await page_of(cluster, http, "story")
    assert record.outcome == "completed"
    trace = await otlp.trace(record.trace_id, from_all("coordinator", "prefill-worker", "decode-worker"))
    assert_one_story(record, told, metrics, trace)
    assert_page_tells_it(record, shown_by_page, history, metrics)
    code, out, _ = await program("story", "--json", target=cluster.target)
    assert code == 0
    shown = json.loads(out)
    assert shown.keys() >= REQUIRED
    assert all(phase.keys() >= PHASE for phase in shown["phases"])
    assert all(decision.keys() >= DECISION for decision in shown["decisions"])
    assert (shown["trace_id"], shown["trace_exported"]) == (record.trace_id, True)
    assert shown["ttft_ms"] == pytest.approx(told.timings.ttft_ms, abs=TOLERANCE_MS)
    return record, told


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, otlp: OtlpReceiver) -> AsyncIterator[Cluster]:
    """Two pairs of simulated engines, whose every request is slow and traced."""
    traced = ["--tracing-endpoint", otlp.endpoint]
    made = Cluster(
        tmp_path_factory.mktemp("logs"),
        prefill=2,
        decode=2,
        worker_options=traced,
        coordinator_options=["--slow-ttft", "0.000001", *traced, "--trace-sample-ratio", "1"],
        http=True,
    )
    async with running(made):
        yield made


async def test_timings_explain_metrics_trace_and_page_tell_one_story(
    cluster: Cluster, otlp: OtlpReceiver
) -> None:
    record, _ = await story(cluster, otlp, PROMPT)
    stages = {decision.stage: decision for decision in record.decisions}
    assert list(stages) == ["admission", "prefill", "decode"]
    for pool in ("prefill", "decode"):
        assert {one.worker for one in stages[pool].candidates} == {f"{pool}-0", f"{pool}-1"}
        assert stages[pool].candidates[0].worker == stages[pool].chosen
        assert "predicted" in stages[pool].reason
    assert record.cost.prefill_seconds > 0
    assert record.cost.kv_block_seconds > 0
    await cluster.assert_no_leaks()


async def test_the_waterfall_fits_a_screen_and_is_plain_when_piped(cluster: Cluster) -> None:
    async with cluster.client() as client:
        await client.generate(PROMPT, max_tokens=4, request_id="waterfall")
    code, out, err = await program("waterfall", target=cluster.target)
    assert (code, err) == (0, "")
    assert out.isascii()
    assert "\x1b" not in out
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines), out
    assert lines[0] == "request waterfall"
    for word in ("prefill_compute", "first token", "decode", "attempt 1:", "decisions", "cost:"):
        assert any(line.strip().startswith(word) for line in lines), word
    code, listed, _ = await program("--slow", target=cluster.target)
    assert code == 0
    assert "waterfall" in listed
    assert "slow: TTFT" in listed


async def test_an_openai_answers_id_is_found(cluster: Cluster) -> None:
    body = {"model": "simulated", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http, cluster.client() as client:
        answered = await http.post(f"{cluster.base_url}/chat/completions", json=body | {"n": 2})
        assert answered.status_code == 200
        header = answered.headers["x-request-id"]
        for given in (answered.json()["id"], header):
            assert (await client.request_record(given)).request_id == f"{header}-0"


async def test_wrong_ids_give_one_error(cluster: Cluster) -> None:
    async with cluster.client() as client:
        with pytest.raises(NotFoundError) as caught:
            await client.request_record("nobody")
        assert (caught.value.reason, caught.value.field) == ("REQUEST_NOT_FOUND", "request_id")
        for given in ("", "a b", "x" * 138, "日本"):
            with pytest.raises(InvalidArgumentError, match="request_id"):
                await client.request_record(given)
        with pytest.raises(InvalidArgumentError, match="limit"):
            await client.request_records(limit=1001)
    code, out, err = await program("nobody", "--json", target=cluster.target)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "nobody" in err
    assert (await program("nobody", "--slow", target=cluster.target))[0] == 2


async def record_of(cluster: FakeCluster, name: str) -> records_pb2.RequestRecord:
    request = records_pb2.GetRequestRecordRequest(request_id=name)
    return (await cluster.client.GetRequestRecord(request, timeout=PATIENCE_S)).record


async def test_a_resumed_request_shows_both_attempts() -> None:
    async with fake_cluster(decode=2) as cluster:
        for decode in cluster.decodes:
            decode.pause_at = 3
        began_s = time.monotonic()
        call, answer = cluster.call(ask(10, request_id="resumed")), Collected()
        await read(call, answer, 3)
        live = await record_of(cluster, "resumed")
        assert (live.outcome, live.output_tokens, live.attempt_count) == ("running", 3, 1)
        killed, other = sorted(cluster.decodes, key=lambda d: -d.live)
        other.pause_at = None
        paused_s = 0.2 + time.monotonic() - began_s  # longer than any gap before
        await asyncio.sleep(paused_s)
        stopped_s = time.monotonic()
        await killed.stop()
        await finish(call, answer)
        rest_s = time.monotonic() - stopped_s
        record = await record_of(cluster, "resumed")
        assert (record.outcome, record.output_tokens, record.attempt_count) == ("completed", 10, 2)
        assert record.attempts[0].failed_worker == killed.worker_id
        assert record.attempts[1].decode_worker == other.worker_id
        assert record.longest_gap_ms >= 1e3 * paused_s
        assert record.longest_gap_position == 3 or rest_s > paused_s, "unless the machine stood still later"
        assert any("resumed:" in why for why in record.kept_because)
        resume = next(one for one in record.decisions if one.stage == "resume")
        assert "3 tokens had been sent" in resume.reason
        listed = await cluster.client.ListRequestRecords(
            records_pb2.ListRequestRecordsRequest(failed=True), timeout=PATIENCE_S
        )
        assert [one.request_id for one in listed.requests] == ["resumed"]


async def test_what_never_got_a_worker_is_there_with_its_error() -> None:
    async with fake_cluster(prefill=0, decode=0) as cluster:
        error = await cluster.error(ask(request_id="nobody-home"))
        record = await record_of(cluster, "nobody-home")
        assert (record.outcome, record.served_model) == ("failed", "")
        assert record.failure == f"{error.reason}: {error.message}"
        assert not record.HasField("ttft_ms")


async def test_records_can_be_switched_off() -> None:
    off = {"max_recent_records": 0, "max_notable_records": 0}
    async with fake_cluster(records=off) as cluster:
        await cluster.answer(ask(request_id="unseen"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await record_of(cluster, "unseen")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_each_coordinator_knows_its_own_requests(cluster: Cluster) -> None:
    async with fake_cluster() as two:
        await two.answer(ask(request_id="on-two"))
        both = f"{cluster.target},{two.address}"
        code, out, _ = await program("on-two", "--json", target=both)
        assert (code, json.loads(out)["request_id"]) == (0, "on-two")
        code, out, err = await program("on-nobody", target=both)
        assert (code, out, err.count("\n")) == (1, "", 1)
        code, out, _ = await program("--json", target=both)
        assert (code, json.loads(out)["requests"][0]["request_id"]) == (0, "on-two")


async def test_tenants_read_their_own_records_only(tmp_path: Path) -> None:
    tenants = [{"name": name, "key_hashes": [key_hash(KEYS[name])], "admin": name == "root"} for name in KEYS]
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    async with fake_cluster(tenants=path) as cluster:
        clients = {name: PatientClient(cluster.address, api_key=key) for name, key in KEYS.items()}
        async with clients["alice"] as alice, clients["bob"] as bob, clients["root"] as root:
            await alice.generate("w1 w2 w3", max_tokens=3, request_id="private")
            assert (await alice.request_record("private")).tenant == "alice"
            assert (await root.request_record("private")).tenant == "alice"
            assert [one.request_id for one in await root.request_records()] == ["private"]
            assert await bob.request_records() == []
            messages = set()
            for name in ("private", "unknown"):
                with pytest.raises(NotFoundError) as caught:
                    await bob.request_record(name)
                messages.add(caught.value.message.replace(name, "ID"))
            assert len(messages) == 1, "nothing tells another tenant's id from an unknown one"
        async with PatientClient(cluster.address) as nobody:
            with pytest.raises(UnauthenticatedError):
                await nobody.request_record("private")
