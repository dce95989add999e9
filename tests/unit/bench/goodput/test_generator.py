"""The load generator against servers that answer late, refuse, break off or never answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest

from autoscaler.simulation.scenario import Slo
from bench.goodput.generator import LoadGenerator, LoadJob, LoadResult, job_from_json, result_from_json
from bench.goodput.mixes import PlannedRequest
from bench.goodput.outcome import attained_share
from bench.goodput.wire import ServedAt, completion_body, parsed
from bench.server_process import HOST

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TIMEOUT_S = 60.0
Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def end(tokens: int) -> bytes:
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode()
    return event("", "length") + b"data: " + usage + b"\n\ndata: [DONE]\n\n"


async def at_once(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """The whole answer."""
    writer.write(HEAD + chunk(event("a")) + chunk(end(body["max_tokens"])) + chunk(b""))


@asynccontextmanager
async def server(answer: Answer, seen: list[dict[str, Any]]) -> AsyncIterator[int]:
    """An HTTP server that gives this answer; its port."""
    calls = set()

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.add(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        seen.append(json.loads(await reader.readexactly(length)))
        await answer(seen[-1], writer)
        writer.close()

    listening = await asyncio.start_server(called, HOST, 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        listening.close()


def job(at: ServedAt, times: list[float], *, timeout_s: float = TIMEOUT_S, warm: int = 0) -> LoadJob:
    requests = [PlannedRequest(at_s, (1, 2, number), 4, "short") for number, at_s in enumerate(times)]
    return LoadJob(at, requests[:warm], requests, timeout_s, (1000.0, 50.0))


async def outcome(answer: Answer, times: list[float], **options: Any) -> LoadResult:
    async with server(answer, []) as port:
        return await LoadGenerator(job(ServedAt(port), times, **options)).run()


async def test_an_answer_is_seen_whole() -> None:
    seen: list[dict[str, Any]] = []
    async with server(at_once, seen) as port:
        at = ServedAt(port, model="m", names_targets=True)
        result = await LoadGenerator(job(at, [0.0, 0.01, 0.02], warm=2)).run()
    assert len(seen) == 5
    assert seen[0] == completion_body(at, (1, 2, 0), 4, (1000.0, 50.0))
    assert (seen[0]["model"], seen[0]["ttft_ms"], seen[0]["tpot_ms"]) == ("m", 1000.0, 50.0)
    assert [(one.ending, one.tokens, len(one.event_s)) for one in result.requests] == [("complete", 4, 2)] * 3
    assert all(one.sent_s >= one.at_s for one in result.requests)
    assert result.lateness_s == [one.sent_s - one.at_s for one in result.requests]


async def test_a_server_without_targets_is_not_told_any() -> None:
    assert {"ttft_ms", "tpot_ms", "model"}.isdisjoint(completion_body(ServedAt(1), (1,), 4, (1000.0, 50.0)))


async def test_what_comes_late_is_late_from_its_scheduled_time() -> None:
    begun = asyncio.Event()

    async def late(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not begun.is_set():
            # The load's own process stands still: the second request is sent when it was long due.
            begun.set()
            until = asyncio.get_running_loop().time() + 0.3
            while asyncio.get_running_loop().time() < until:
                pass
        await at_once(body, writer)

    result = await outcome(late, [0.0, 0.1])
    second = result.requests[1]
    assert second.ttft_s is not None
    assert second.sent_s > 0.2
    assert second.ttft_s >= second.sent_s - second.at_s > 0.1
    assert max(result.lateness_s) > 0.1


async def test_requests_go_out_whatever_became_of_earlier_ones() -> None:
    waiting = asyncio.Event()

    async def held(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["prompt"][-1] == 2:
            waiting.set()
        await waiting.wait()
        await at_once(body, writer)

    result = await outcome(held, [0.0, 0.01, 0.02])
    assert [one.ending for one in result.requests] == ["complete"] * 3


async def test_a_server_that_never_answers_ends_by_the_deadline() -> None:
    async def silent(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    asked = job(ServedAt(1), [0.0, 0.05], timeout_s=0.2)
    assert asked.longest_s == pytest.approx(0.45)
    async with asyncio.timeout(TIMEOUT_S):
        result = await outcome(silent, [0.0, 0.05], timeout_s=0.2)
    assert [one.ending for one in result.requests] == ["timed out"] * 2
    assert attained_share(result.requests, Slo(1.0, 0.05)) == 0


@pytest.mark.slow
async def test_one_that_stops_in_the_middle_keeps_what_came() -> None:
    async def half(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event("a")))
        await asyncio.Event().wait()

    (one,) = (await outcome(half, [0.0], timeout_s=4.0)).requests
    assert (one.ending, len(one.event_s), one.tpot_s) == ("timed out", 1, None)


@pytest.mark.parametrize(
    ("status", "ending"), [(429, "refused"), (503, "refused"), (500, "failed"), (400, "failed")]
)
async def test_refusals_are_told_from_failures(status: int, ending: str) -> None:
    async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d No\r\nContent-Length: 4\r\n\r\nbusy" % status)

    (one,) = (await outcome(refuse, [0.0])).requests
    assert (one.ending, one.error, one.tokens) == (ending, f"{status}: busy", 0)


async def test_broken_answers_are_failures() -> None:
    async def cut(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event("a")))

    async def told(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b'data: {"error": {"message": "a fault"}}\n\n') + chunk(b""))

    async def garbled(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"data: {\n\n") + chunk(end(4)) + chunk(b""))

    async def short(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event("a")) + chunk(end(3)) + chunk(b""))

    async def gone(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        pass

    cases = (
        (cut, "Incomplete"),
        (told, "a fault"),
        (garbled, "no JSON"),
        (short, "3 tokens, not 4"),
        (gone, ""),
    )
    for answer, error in cases:
        (one,) = (await outcome(answer, [0.0])).requests
        assert one.ending == "failed"
        assert error in one.error


async def test_nobody_listens() -> None:
    async with server(at_once, []) as port:
        pass
    (one,) = (await LoadGenerator(job(ServedAt(port), [0.0])).run()).requests
    assert one.ending == "failed"


async def test_a_system_that_does_not_serve_an_idle_client_is_no_figure() -> None:
    async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 No\r\nContent-Length: 10\r\n\r\nbad prompt")

    with pytest.raises(RuntimeError, match="400: bad prompt"):
        await outcome(refuse, [0.0, 0.1], warm=2)


async def test_a_pair_gets_two_calls() -> None:
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []

    async def prefilled(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        reply = json.dumps({"kv_transfer_params": {"block": 7}}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(reply), reply))

    async with server(prefilled, first) as prefill_port, server(at_once, second) as port:
        result = await LoadGenerator(job(ServedAt(port, "m", prefill_port), [0.0])).run()
    assert result.requests[0].ending == "complete"
    assert first[0]["max_tokens"] == 1
    assert first[0]["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert "stream" not in first[0]
    assert "stream_options" not in first[0]
    assert (second[0]["kv_transfer_params"], second[0]["max_tokens"]) == ({"block": 7}, 4)


def test_events_without_text_are_none_but_for_the_end() -> None:
    whole = event("") + event("a") + event("") + end(3)
    # However the bytes come.
    assert parsed([(1.0, whole)]).event_s == (1.0, 1.0)
    split = parsed([(float(number), whole[number : number + 1]) for number in range(len(whole))])
    assert len(split.event_s) == 2
    assert split.event_s[0] < split.event_s[1]
    assert (split.tokens, split.error) == (3, "")


async def test_jobs_and_results_survive_json() -> None:
    asked = job(ServedAt(1, "m", 2, True), [0.0, 0.5], warm=1)
    again = job_from_json(json.dumps(asdict(asked)))
    assert (again.at, again.timeout_s, again.targets_ms) == (asked.at, asked.timeout_s, asked.targets_ms)
    assert [one.at_s for one in again.requests] == [0.0, 0.5]
    result = await outcome(at_once, [0.0])
    assert result_from_json(json.dumps(asdict(result))) == result
