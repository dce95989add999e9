"""Files and batches through OpenAI's own client, with real processes: restarts, tenants, load, hostile input."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai.types import Batch

from splitserve.security.api_keys import key_hash, new_key
from tests.support.cluster.ports import free_port
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WINDOW: Any = "24h"
OVER = ("completed", "cancelled", "expired", "failed")

pytestmark = pytest.mark.timeout(180)


def line(number: int, *, url: str = TEXT, custom_id: str | None = None, **body: Any) -> dict[str, Any]:
    """A line of a batch."""
    default = {"prompt": [7, number % 90 + 1, 9], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    return {
        "custom_id": custom_id or f"n{number}",
        "method": "POST",
        "url": url,
        "body": default | body,
    }


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def client_of(cluster: Cluster, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=cluster.base_url, api_key=key, timeout=PATIENCE_S, max_retries=0)


async def submitted(
    client: openai.AsyncOpenAI, content: bytes, endpoint: Any = TEXT, window: Any = WINDOW
) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, metadata={"a": "b"}
    )


async def settled(client: openai.AsyncOpenAI, batch_id: str, least: int | None = None) -> Batch:
    """The batch when it is over, or when so many of its lines have results."""
    deadline_s = time.monotonic() + 2 * PATIENCE_S
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in OVER or (least is not None and counted(batch) >= least):
            return batch
        assert time.monotonic() < deadline_s, batch
        await asyncio.sleep(0.05)


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file of results; a batch has none where it has no such results."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines()]


@asynccontextmanager
async def serving(tmp_path: Path, *options: str, **settings: Any) -> AsyncIterator[Cluster]:
    given = ["--batch-folder", str(tmp_path / "batches"), *options]
    cluster = Cluster(tmp_path, coordinator_options=given, http=True, **settings)
    async with running(cluster):
        yield cluster
        await cluster.assert_no_leaks()


def once(lines: list[dict[str, Any]], *files: list[dict[str, Any]]) -> None:
    """Asserts that each line has one result."""
    found = [each["custom_id"] for file in files for each in file]
    assert sorted(found) == sorted(each["custom_id"] for each in lines)


async def test_a_batch_gives_each_answer_and_each_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as cluster, client_of(cluster) as client:
        lines = [line(number) for number in range(20)]
        lines[3] = line(3, max_tokens=-1)
        lines[4] = line(4, model="unknown")
        batch = await submitted(client, jsonl(lines))
        assert batch.status == "validating"
        ended = await settled(client, batch.id)
        assert (ended.status, ended.metadata) == ("completed", {"a": "b"})
        assert ended.request_counts is not None
        assert ended.request_counts.to_dict() == {"total": 20, "completed": 18, "failed": 2}
        good, bad = await results(client, ended.output_file_id), await results(client, ended.error_file_id)
        once(lines, good, bad)
        for each in good:
            asked = lines[int(each["custom_id"][1:])]["body"]
            direct = await client.completions.create(model="", prompt="", extra_body={"model": None} | asked)
            assert each["error"] is None
            assert each["response"]["status_code"] == 200
            assert each["response"]["body"]["choices"][0]["text"] == direct.choices[0].text
        told = {each["custom_id"]: each["response"] for each in bad}
        assert (told["n3"]["status_code"], told["n3"]["body"]["error"]["param"]) == (400, "max_tokens")
        assert (told["n4"]["status_code"], told["n4"]["body"]["error"]["code"]) == (404, "model_not_found")

        listed = [each async for each in client.batches.list(limit=1)]
        assert [each.id for each in listed] == [batch.id]
        assert {file.purpose async for file in client.files.list(limit=1)} == {"batch", "batch_output"}
        assert [file.id async for file in client.files.list(purpose="batch")] == [batch.input_file_id]
        assert (await client.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.batches.cancel(batch.id)


async def test_a_killed_coordinator_goes_on_and_runs_no_line_twice(tmp_path: Path) -> None:
    ports = [f"--{name}={free_port()}" for name in ("grpc-port", "http-port")]
    lines = [line(number, max_tokens=40) for number in range(200)]
    async with serving(tmp_path, *ports, "--batch-concurrency", "8") as cluster, client_of(cluster) as client:
        batch = await submitted(client, jsonl(lines))
        for least in (20, 90):
            await settled(client, batch.id, least)
            coordinator = cluster.members["coordinator"]
            coordinator.kill()
            for path in (tmp_path / "batches/files").glob("*.jsonl"):
                if path.stem != batch.input_file_id:
                    with path.open("ab") as torn:
                        torn.write(b'{"id":"batch_req_torn')
            coordinator.start()
            await asyncio.to_thread(coordinator.wait_event, "coordinator.ready")
        ended = await settled(client, batch.id)
        assert ended.status == "completed"
        once(lines, await results(client, ended.output_file_id))
        assert ended.request_counts is not None
        assert ended.request_counts.to_dict() == {"total": 200, "completed": 200, "failed": 0}
        second = Cluster(
            tmp_path / "second",
            coordinator_options=["--batch-folder", str(tmp_path / "batches")],
            http=True,
        )
        (tmp_path / "second").mkdir()
        with pytest.raises(AssertionError, match="in use by another coordinator"):
            async with running(second, wait_ready=False):
                pass
        await cluster.wait_ready()


def counted(batch: Batch) -> int:
    """Lines with a result."""
    assert batch.request_counts is not None
    return batch.request_counts.completed + batch.request_counts.failed


async def test_tenants_do_not_see_each_other_and_pay_for_their_lines(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("one", "two", "root")}
    own: dict[str, dict[str, Any]] = {
        "one": {"models": ["simulated"], "max_output_tokens": 8, "max_concurrent_requests": 2},
        "two": {"models": ["other"]},
        "root": {"admin": True},
    }
    tenants = [{"name": name, "key_hashes": [key_hash(keys[name])], **own[name]} for name in keys]
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    options = ["--tenants", str(tmp_path / "tenants.yaml"), "--request-log", str(tmp_path / "log")]
    async with (
        serving(tmp_path, *options, api_key=keys["root"]) as cluster,
        client_of(cluster, keys["one"]) as one,
        client_of(cluster, keys["two"]) as two,
    ):
        lines = [line(number, max_tokens=100 if number == 5 else 4) for number in range(12)]
        batch = await submitted(one, jsonl(lines))
        for call in (
            two.batches.retrieve(batch.id),
            two.batches.cancel(batch.id),
            two.files.retrieve(batch.input_file_id),
            two.files.content(batch.input_file_id),
            two.files.delete(batch.input_file_id),
            two.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window=WINDOW
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert [each async for each in two.batches.list()] == []
        assert [each async for each in two.files.list()] == []
        refused = await submitted(two, jsonl([line(0, model="simulated")]))
        ended = await settled(one, batch.id)
        assert counted(ended) == 12
        (bad,) = await results(one, ended.error_file_id)
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("n5", 400)
        ended = await settled(two, refused.id)
        (bad,) = await results(two, ended.error_file_id)
        assert bad["response"]["body"]["error"]["code"] == "model_not_found"
        async with client_of(cluster, "wrong") as nobody:
            with pytest.raises(openai.AuthenticationError):
                await nobody.batches.list()
    logged = [json.loads(each) for each in (tmp_path / "log").read_text().splitlines()]
    assert Counter(each["tenant"] for each in logged) == {"one": 11}
    assert all(each["request_id"].startswith(f"batch_req_{batch.id[6:]}_") for each in logged)


async def test_a_batch_is_cancelled_and_another_one_expires(tmp_path: Path) -> None:
    lines = [line(number, max_tokens=400) for number in range(300)]
    async with serving(tmp_path, "--batch-concurrency", "4") as cluster, client_of(cluster) as client:
        batch = await submitted(client, jsonl(lines))
        await settled(client, batch.id, 3)
        with pytest.raises(openai.BadRequestError, match="an unfinished batch reads"):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        ended = await settled(client, batch.id)
        assert ended.status == "cancelled"
        assert ended.cancelling_at is not None
        assert len(await results(client, ended.output_file_id)) == counted(ended) < 300
        await cluster.assert_no_leaks()

        batch = await submitted(client, jsonl(lines), window="2s")
        ended = await settled(client, batch.id)
        assert ended.status == "expired"
        good, bad = await results(client, ended.output_file_id), await results(client, ended.error_file_id)
        once(lines, good, bad)
        assert {each["error"]["code"] for each in bad} == {"batch_expired"}


HOSTILE: dict[str, tuple[bytes, dict[str, Any]]] = {
    "not UTF-8": (b'{"custom_id": "\xff"}\n', {"line": 1, "code": "invalid_json_line"}),
    "no JSON": (jsonl([line(0)]) + b"\n{", {"line": 3, "code": "invalid_json_line"}),
    "twice": (jsonl([line(0), line(0)]), {"line": 2, "code": "duplicate_custom_id", "param": "custom_id"}),
    "url": (jsonl([line(0, url=CHAT)]), {"line": 1, "code": "mismatched_url", "param": "url"}),
    "method": (
        jsonl([line(0) | {"method": "GET"}]),
        {"line": 1, "code": "invalid_method", "param": "method"},
    ),
    "field": (jsonl([line(0) | {"x": 1}]), {"line": 1, "code": "unknown_field", "param": "x"}),
    "stream": (jsonl([line(0, stream=True)]), {"line": 1, "code": "invalid_body", "param": "body"}),
    "id": (jsonl([line(0) | {"custom_id": "n" * 257}]), {"line": 1, "code": "invalid_custom_id"}),
    "deep": (b'{"custom_id":' + b"[" * 10**6 + b"\n", {"line": 1, "code": "invalid_json_line"}),
    "wide": (b'{"body":[' + b"{}," * 10**6 + b"\n", {"line": 1, "code": "invalid_json_line"}),
    "long": (b'{"body": "' + b"x" * 100 * 2**20, {"line": 1, "code": "line_too_long"}),
    "many": (b"\n" * 60_000, {"line": 50_001, "code": "too_many_lines"}),
    "empty": (b"\n\n", {"line": None, "code": "empty_file"}),
}


async def test_hostile_files_are_named_and_harm_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as cluster, client_of(cluster) as client:
        began_s = time.monotonic()
        for what, (content, expected) in HOSTILE.items():
            batch = await submitted(client, content)
            ended = await settled(client, batch.id)
            assert ended.status == "failed", what
            assert ended.errors is not None
            assert ended.errors.data is not None
            told = ended.errors.data[0].to_dict()
            assert expected.items() <= told.items(), (what, told)
            assert ended.output_file_id is None
            await client.files.delete(batch.input_file_id)
            await client.completions.create(model="", prompt="", extra_body=line(1)["body"] | {"model": None})
        print(f"{time.monotonic() - began_s:.1f} s")
        with pytest.raises(openai.BadRequestError, match="purpose must be batch, not 'fine-tune'"):
            await client.files.create(file=b"{}", purpose="fine-tune")
        expiry: Any = {"anchor": "created_at", "seconds": 3600}
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await client.files.create(file=b"{}", purpose="batch", expires_after=expiry)
        file = await client.files.create(file=b"{}", purpose="batch")
        for given in (
            {"endpoint": "/v1/moderations"},
            {"completion_window": "9d"},
            {"input_file_id": "../lock"},
        ):
            body: Any = {"input_file_id": file.id, "endpoint": TEXT, "completion_window": WINDOW} | given
            with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
                await client.batches.create(**body)
            assert refused.value.param == next(iter(given))


async def test_without_a_folder_one_error_names_the_setting(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, http=True, prefill=0, decode=0)
    async with running(cluster, wait_ready=False), client_of(cluster) as client:
        for call in (client.files.create(file=b"{}", purpose="batch"), client.batches.retrieve("batch_0")):
            with pytest.raises(openai.NotFoundError, match="--batch-folder FOLDER"):
                await call


async def test_real_answers_of_every_endpoint(smollm2: str, tmp_path: Path) -> None:
    options = ["--dtype", "float32", "--num-blocks", "400", "--served-model-name", "smol"]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
        TEXT: {"prompt": "The three primary colours are"},
        RESPONSES: {"input": "What is the capital of France?"},
    }
    async with (
        serving(tmp_path, model=smollm2, engine="torch", worker_options=options) as cluster,
        client_of(cluster) as client,
    ):
        for url, body in bodies.items():
            body |= {"model": "smol", "temperature": 0}
            asked = {"custom_id": "a", "method": "POST", "url": url, "body": body}
            batch = await submitted(client, jsonl([asked]), endpoint=url)
            (result,) = await results(client, (await settled(client, batch.id)).output_file_id)
            said = result["response"]["body"]
            direct: Any = await client.post(url.removeprefix("/v1"), body=body, cast_to=object)
            drop = ("id", "created", "created_at", "completed_at", "usage", "store")
            assert said["usage"]["total_tokens"] == direct["usage"]["total_tokens"]
            for name in drop:
                said.pop(name, None), direct.pop(name, None)
            if url == RESPONSES:
                said, direct = (each["output"][0]["content"] for each in (said, direct))
            assert said == direct


@pytest.mark.alone
@pytest.mark.slow
async def test_requests_beside_a_batch_are_hardly_later(tmp_path: Path) -> None:
    async def median_s(client: openai.AsyncOpenAI) -> float:
        times = []
        for number in range(40):
            began_s = time.monotonic()
            body = line(number, max_tokens=16)["body"] | {"model": None}
            await client.completions.create(model="", prompt="", extra_body=body)
            times.append(time.monotonic() - began_s)
        return statistics.median(times)

    async with serving(tmp_path) as cluster, client_of(cluster) as client:
        alone_s = await median_s(client)
        batch = await submitted(client, jsonl(line(number, max_tokens=64) for number in range(20_000)))
        await settled(client, batch.id, 100)
        beside_s = await median_s(client)
        at = await client.batches.cancel(batch.id)
        print(f"alone {alone_s * 1e3:.1f} ms, beside {beside_s * 1e3:.1f} ms, {counted(at)} lines")
        assert counted(at) < 20_000
        assert beside_s < 4 * alone_s + 0.25
