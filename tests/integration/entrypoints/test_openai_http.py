"""The OpenAI face over real HTTP, with scripted workers behind a real coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from coordinator.entrypoints.http import exchange
from coordinator.entrypoints.http import server as http_protocol
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.v1 import decode_pb2
from tests.support.cluster.fake_cluster import FakeCluster, fake_cluster
from tests.support.deadlines import kept_timeouts, kept_timers, passes_now
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

MODEL = "words"
HI = {"model": MODEL, "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 4}
TEXT = {"model": MODEL, "prompt": "w1 w2", "max_tokens": 4}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT_S = 2 * PATIENCE_S
"""A deadline of requests that no other timeout equals."""


class Http:
    """A cluster and a client of its HTTP face."""

    def __init__(self, cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        self.cluster, self.client = cluster, client
        self.port = cluster.coordinator.http_port

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def error(self, status: int, path: str, body: Any) -> dict[str, Any]:
        return error_of(await self.post(path, body), status)

    async def events(self, path: str, body: Any) -> list[str]:
        """The payloads of all events."""
        response = await self.post(path, body | {"stream": True})
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"  # else nginx keeps the pieces back
        return payloads(response.text)

    async def raw(self, *pieces: bytes) -> bytes:
        """Sends bytes as they are and reads to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


@asynccontextmanager
async def serving(prefill: int = 1, decode: int = 1, **config: Any) -> AsyncIterator[Http]:
    async with fake_cluster(prefill, decode, **({"http_port": 0} | config)) as cluster:
        base = f"http://127.0.0.1:{cluster.coordinator.http_port}"
        async with httpx.AsyncClient(base_url=base, timeout=PATIENCE_S) as client:
            yield Http(cluster, client)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error)


def payloads(text: str) -> list[str]:
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]


def words(count: int) -> str:
    return "".join(f" w{100 + number}" for number in range(count))


async def test_a_chat_without_any_worker_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(0, 0, no_worker_wait_s=0.01) as http:
        registry = http.cluster.coordinator.registry
        waits_s: list[float] = []
        wait_until = registry.wait_until

        async def counted(condition: Any, wait_s: float) -> Any:
            waits_s.append(wait_s)
            return await wait_until(condition, wait_s)

        monkeypatch.setattr(registry, "wait_until", counted)
        assert (await http.error(503, CHAT, HI))["code"] == "no_worker"
        assert waits_s == [0.01]


async def test_answers_of_both_endpoints() -> None:
    async with serving() as http:
        chat = (await http.post(CHAT, HI)).json()
        assert chat["id"].startswith("chatcmpl-")
        assert (chat["object"], chat["model"]) == ("chat.completion", MODEL)
        assert chat["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": words(4), "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ]
        assert chat["usage"]["total_tokens"] == chat["usage"]["prompt_tokens"] + 4
        text = (await http.post(COMPLETIONS, TEXT | {"echo": True})).json()
        assert text["object"] == "text_completion"
        assert text["choices"][0] == {
            "index": 0,
            "text": f"w1 w2{words(4)}",
            "logprobs": None,
            "finish_reason": "length",
        }


async def test_streams_of_both_endpoints() -> None:
    async with serving() as http:
        usage = {"stream_options": {"include_usage": True}}
        *chunks, last = await http.events(CHAT, HI | usage)
        assert last == "[DONE]"
        *chunks, counts = [json.loads(chunk) for chunk in chunks]
        assert counts["choices"] == []
        assert counts["usage"]["completion_tokens"] == 4
        assert all(chunk["usage"] is None for chunk in chunks)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == words(4)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
        *chunks, last = await http.events(COMPLETIONS, TEXT)
        shown = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
        assert "".join(shown) == words(4)


async def test_several_choices_and_prompts() -> None:
    async with serving() as http:
        many = TEXT | {"prompt": ["w1", "w2 w3"], "n": 2, "seed": 8, "echo": True}
        body = (await http.post(COMPLETIONS, many)).json()
        begins = [choice["text"].removesuffix(words(4)) for choice in body["choices"]]
        assert begins == ["w1", "w1", "w2 w3", "w2 w3"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 16,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        seeds = sorted(call.sampling.seed for call in http.cluster.prefills[0].calls.entries)
        assert seeds == [8, 8, 9, 9]
        *chunks, _ = await http.events(CHAT, HI | {"n": 3})
        texts = dict.fromkeys(range(3), "")
        for chunk in map(json.loads, chunks):
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert set(texts.values()) == {words(4)}


async def test_one_of_several_fails() -> None:
    async with serving() as http:
        http.cluster.prefills[0].failures = [ResourceExhaustedError("full", retry_after_s=3)]
        response = await http.post(CHAT, HI | {"n": 4})
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "3000")


async def test_the_request_id() -> None:
    async with serving() as http:
        response = await http.post(CHAT, HI, headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert response.json()["id"] == "chatcmpl-mine-1"
        response = await http.post(CHAT, HI, headers={"x-request-id": "not allowed!"})
        assert response.headers["x-request-id"] != "not allowed!"


async def test_a_model_may_be_left_out() -> None:
    async with serving() as http:
        body = {key: value for key, value in HI.items() if key != "model"}
        assert (await http.post(CHAT, body)).json()["model"] == MODEL


async def test_refusals() -> None:
    async with serving() as http:
        error = await http.error(400, CHAT, HI | {"temperature": -1})
        assert (error["param"], error["type"]) == ("temperature", "invalid_request_error")
        assert "temperature must be 0..100" in error["message"]
        assert "sampling." not in error["message"]
        error = await http.error(404, CHAT, HI | {"model": "nope"})
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        error = await http.error(400, CHAT, HI | {"max_completion_tokens": 1000})
        assert error["param"] == "max_completion_tokens"
        long = HI | {"messages": [{"role": "user", "content": "w1 " * 100}]}
        error = await http.error(400, CHAT, long)
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        error = await http.error(400, COMPLETIONS, TEXT | {"prompt": [[10**6]]})
        assert error["param"] == "prompt"
        error = await http.error(400, COMPLETIONS, TEXT | {"logprobs": 21})
        assert error["param"] == "logprobs"
        assert (await http.error(400, CHAT, [1]))["code"] == "malformed_json"


async def test_what_is_not_json() -> None:
    async with serving() as http:
        kind = {"content-type": "application/json"}
        for content in (b"", b"{", b'{"messages": "\xff"}', b"null", b"[" * 10_000):
            response = await http.client.post(CHAT, content=content, headers=kind)
            assert error_of(response, 400)["code"] == "malformed_json"
        for kind in (
            {},
            {"content-type": "text/plain"},
            {"content-type": "application/x-www-form-urlencoded"},
        ):
            response = await http.client.post(CHAT, content=json.dumps(HI).encode(), headers=kind)
            error_of(response, 415)
        kind = {"content-type": "Application/JSON; charset=utf-8"}
        assert (await http.client.post(CHAT, content=json.dumps(HI), headers=kind)).status_code == 200


async def test_paths_and_methods() -> None:
    async with serving() as http:
        for path in ("/v1", "/v1/audio/speech", "/v1/chat/completions/", "/v1/models/", "/%2e%2e", "/page"):
            error_of(await http.client.get(path), 404)
        for name in ("nope", "a/b", "%00"):
            assert error_of(await http.client.get(f"/v1/models/{name}"), 404)["code"] == "model_not_found"
        error_of(await http.client.post("/v1/models"), 405)
        error_of(await http.client.request("PROPFIND", "/health"), 405)
        assert (await http.client.head("/health")).status_code == 200


async def test_operations_pages() -> None:
    async with serving() as http:
        assert (await http.client.get("/health")).json() == {"status": "ok"}
        assert (await http.client.get("/ready")).json() == {"status": "ready"}
        assert "version" in (await http.client.get("/version")).json()
        metrics = await http.client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "splitserve_requests_ended" in metrics.text


async def test_not_ready_without_workers() -> None:
    async with serving(0, 0) as http:
        response = await http.client.get("/ready")
        assert error_of(response, 503)["code"] == "no_worker"
        assert "retry-after" in response.headers
        response = await http.post(CHAT, HI)
        assert error_of(response, 503)["code"] == "no_worker"
        assert "retry-after" in response.headers
        assert (await http.client.get("/health")).status_code == 200
        assert (await http.client.get("/v1/models")).json()["data"] == []


async def test_a_deadline() -> None:
    async with serving(request_timeout_s=0.2) as http:
        http.cluster.prefills[0].first_token_gate.close()
        assert (await http.error(504, CHAT, HI))["code"] == "deadline_exceeded"
        http.cluster.prefills[0].let_go()


async def test_an_error_after_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = kept_timeouts(monkeypatch, LIMIT_S)
    async with serving(request_timeout_s=LIMIT_S) as http:
        http.cluster.decodes[0].pause_at = 2
        async with http.client.stream("POST", CHAT, json=HI | {"stream": True}) as response:
            assert response.status_code == 200
            parts = response.aiter_text()
            first = await anext(parts)
            passes_now(deadlines[0])
            shown = payloads(first + "".join([part async for part in parts]))
        assert json.loads(shown[-1])["error"]["code"] == "deadline_exceeded"
        assert "[DONE]" not in shown
        http.cluster.decodes[0].let_go()


async def test_a_workers_refusal_keeps_its_field() -> None:
    async with serving() as http:
        error = InvalidArgumentError("sampling.grammar.lark: no", field="sampling.grammar.lark")
        http.cluster.prefills[0].failures = [error]
        http.cluster.decodes[0].reserve_failures = [error]
        tools = [{"type": "function", "function": {"name": "f"}}]
        shown = await http.error(400, CHAT, HI | {"tools": tools, "tool_choice": "required"})
        assert (shown["param"], shown["message"]) == ("tools", "tools: no")


async def test_a_broken_worker_stream_fails_or_resumes() -> None:
    async with serving(1, 2) as http:
        for decode in http.cluster.decodes:
            decode.pause_at = 3
        call = asyncio.create_task(http.post(CHAT, HI | {"max_tokens": 6}))
        await settled(lambda: any(decode.live and decode.sent.entries for decode in http.cluster.decodes))
        busy = next(decode for decode in http.cluster.decodes if decode.live)
        for decode in http.cluster.decodes:
            decode.pause_at = None
        busy.break_streams()
        for decode in http.cluster.decodes:
            decode.let_go()
        body = (await call).json()
        assert body["choices"][0]["message"]["content"] == words(6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("paused", ["prefill", "decode"])
async def test_a_client_that_leaves_cancels_at_once(stream: bool, paused: str) -> None:
    async with serving() as http:
        cluster = http.cluster
        if paused == "prefill":
            cluster.prefills[0].first_token_gate.close()
        else:
            cluster.decodes[0].pause_at = 2
        body = json.dumps(HI | {"stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(request_head(CHAT, len(body)) + body)
        await settled(lambda: len(cluster.prefills[0].calls.entries) == 1)
        if paused == "decode":
            await settled(lambda: len(cluster.decodes[0].sent.entries) >= 1)
        assert cluster.coordinator.api.running == 1
        writer.close()
        await settled(lambda: cluster.coordinator.api.running == 0)
        await settled(lambda: len(cluster.decodes[0].aborts.entries) == 1)
        for worker in cluster.workers:
            worker.let_go()
        del reader


async def test_a_client_that_does_not_read_stops_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ERROR_WRITE_S", 0.2)
    deadlines = kept_timeouts(monkeypatch, LIMIT_S)
    async with serving(request_timeout_s=LIMIT_S) as http:
        api = http.cluster.coordinator.api
        http.cluster.decodes[0].padding = 10**6
        body = json.dumps(HI | {"stream": True, "max_tokens": 40}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port, limit=2**10)
        writer.write(request_head(CHAT, len(body)) + body)
        await settled(lambda: api.running == 1)
        assert (await http.post(CHAT, HI | {"max_tokens": 3})).status_code == 200
        assert api.running == 1
        passes_now(deadlines[0])  # the slow reader's
        await settled(lambda: api.running == 0 and not answering())
        with suppress(ConnectionError):  # the connection was broken, not left open
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()


async def test_many_answers_to_a_long_request() -> None:
    async with serving() as http:
        error = await http.error(400, CHAT, HI | {"n": 100, "user": "x" * 2**20})
        assert error["param"] == "n"


async def test_a_body_that_is_too_long() -> None:
    async with serving(max_message_bytes=2**16) as http:
        long = HI | {"user": "x" * 2**17}
        assert (await http.error(413, CHAT, long))["code"] == "body_too_large"

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(200):
                yield b" " * 1000

        kind = {"content-type": "application/json"}
        response = await http.client.post(CHAT, content=pieces(), headers=kind)
        error_of(response, 413)
        assert (await http.post(CHAT, HI)).status_code == 200


async def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.1)
    async with serving() as http:
        answer = await http.raw(request_head(CHAT, 100) + b"{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in answer


async def test_a_head_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", LIMIT_S)
    timers = kept_timers(monkeypatch, LIMIT_S)
    whole = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving() as http:
        # What is written at first and answered, what is written then, and the limits that have begun by then: the first
        # one with the connection.
        for first, rest, begun in (
            (b"", b"", 1),
            (b"", b"GET /health HTTP/1.1\r\nhost: x\r\n", 1),
            (b"", whole + b"GET /hea", 2),
            (whole, b"\r\n", 2),  # begins no message, but ends the keep-alive timer
        ):
            timers.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
            writer.write(first)
            if first:
                await reader.readuntil(b'{"status":"ok"}')
            writer.write(rest)
            await settled(lambda begun=begun, rest=rest: came(timers, begun, rest))  # type: ignore[misc]
            passes_now(timers[-1])
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1 200") == rest.count(whole)
            assert answer.endswith(b'{"status":"ok"}' if answer else b"")
            writer.close()


def came(limits: list[asyncio.TimerHandle], begun: int, rest: bytes) -> bool:
    """Whether the server has read it all, in so many heads, and answers nothing any more."""
    if len(limits) < begun:
        return False
    connection = limits[-1]._callback.__self__  # type: ignore[attr-defined]
    return (begun > 1 or connection._head_bytes == len(rest)) and not connection._answering


async def test_a_head_that_is_too_long() -> None:
    async with serving() as http:
        one = b"GET /health HTTP/1.1\r\nx-long: " + b"x" * 10**6
        assert (await http.raw(one)).startswith((b"HTTP/1.1 431 ", b""))
        many = b"GET /health HTTP/1.1\r\n" + b"x-more: y\r\n" * 10**5
        assert (await http.raw(many)).startswith((b"HTTP/1.1 431 ", b""))
        assert (await http.client.get("/health")).status_code == 200


async def test_long_bodies_in_one_connection() -> None:
    async with serving() as http:
        for _ in range(3):
            assert (await http.post(CHAT, HI | {"user": "x" * 2**20})).status_code == 200


async def test_connections_are_kept_and_requests_pipelined() -> None:
    async with serving() as http:
        body = json.dumps(HI).encode()
        one = request_head(CHAT, len(body)) + body
        last = one.replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n")
        answer = await http.raw(one + one + last)
        assert answer.count(b"HTTP/1.1 200 OK") == 3


async def test_many_streams_side_by_side() -> None:
    async with serving() as http:
        shown = await asyncio.gather(*(http.events(CHAT, HI | {"max_tokens": 20}) for _ in range(64)))
        for payload in shown:
            assert payload[-1] == "[DONE]"
            deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in payload[:-1]]
            assert "".join(delta.get("content", "") for delta in deltas) == words(20)


async def test_draining_refuses_and_finishes() -> None:
    async with serving(drain_s=PATIENCE_S) as http:
        coordinator, decode = http.cluster.coordinator, http.cluster.decodes[0]
        decode.pause_at = 2
        running = asyncio.create_task(http.events(CHAT, HI))
        await settled(lambda: coordinator.api.running == 1)
        draining = asyncio.create_task(coordinator.drain())
        await settled(lambda: coordinator.api.draining)
        response = await http.post(CHAT, HI)
        assert error_of(response, 503)["code"] == "draining"
        assert "retry-after" in response.headers
        assert error_of(await http.client.get("/ready"), 503)["code"] == "draining"
        assert (await http.client.get("/health")).status_code == 200
        decode.let_go()
        assert (await running)[-1] == "[DONE]"
        await draining


async def test_what_still_runs_at_the_end_is_told() -> None:
    async with serving() as http:
        http.cluster.decodes[0].pause_at = 2
        async with http.client.stream("POST", CHAT, json=HI | {"stream": True}) as response:
            parts = response.aiter_text()
            first = await anext(parts)  # before it, the status would tell
            await http.cluster.coordinator.close()
            text = first + "".join([part async for part in parts])
        assert json.loads(payloads(text)[-1])["error"]["code"] == "draining"
        http.cluster.decodes[0].let_go()


async def test_overload() -> None:
    async with serving(max_running_requests=1) as http:
        http.cluster.prefills[0].first_token_gate.close()
        first = asyncio.create_task(http.post(CHAT, HI))
        await settled(lambda: http.cluster.coordinator.api.running == 1)
        response = await http.post(CHAT, HI)
        assert error_of(response, 429)["code"] == "too_many_requests"
        assert "retry-after" in response.headers
        http.cluster.prefills[0].let_go()
        assert (await first).status_code == 200


async def test_a_failed_decode_shows_as_an_error() -> None:
    async with serving() as http:
        failure = decode_pb2.Failure(reason="INTERNAL", message="boom")
        http.cluster.decodes[0].failure = failure
        response = await http.post(CHAT, HI)
        assert response.status_code >= 500
        assert "error" in response.json()


def answering() -> bool:
    """Whether the server is busy with any request."""
    return any("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks())


def request_head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()
