"""Random and damaged requests to the HTTP face: no 5xx that is a fault, errors of one form, and all works afterwards.

`SPLITSERVE_FUZZ_EXAMPLES` sets how many bodies are sent; the default is for `make test`.
"""

from __future__ import annotations

import copy
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clients.fuzz import EXAMPLES, FUZZED, Loop, damaged, settle_for_long_run, tell_stall
from tests.support.cluster.fake_cluster import FakeCluster, fake_cluster
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

CHAT: dict[str, Any] = {
    "model": "words",
    "messages": [{"role": "system", "content": "w3"}, {"role": "user", "content": "w1 w2"}],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "stream": False,
    "n": 1,
    "user": "u",
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string"}}},
    "bad_words": ["w9"],
    "allowed_token_ids": [1, 2],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 2,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
TOOLS: dict[str, Any] = {
    "model": "words",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "w1"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "w5"},
    ],
    "max_tokens": 3,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "none",
    "documents": [],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template": "",
    "stream": True,
    "stream_options": {"include_usage": True},
}
TEXT: dict[str, Any] = {
    "model": "words",
    "prompt": "w1 w2",
    "max_tokens": 3,
    "echo": False,
    "logprobs": 1,
    "stop": "y",
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0.5,
    "structured_outputs": {"choice": ["w1", "w2"]},
    "add_special_tokens": False,
}
ASKED = {
    name: value
    for name, value in TOOLS.items()
    if name not in ("stream", "stream_options", "max_tokens", "tool_choice")
}
BATCH = {
    "input_file_id": "file-0",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "metadata": {"a": "b"},
}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", TOOLS),
    ("/v1/completions", TEXT),
    ("/tokenize", ASKED | {"return_token_strs": True}),
    ("/detokenize", {"model": "words", "tokens": [1, 2, 3]}),
    ("/v1/batches", BATCH),
]
WILD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 0.5, 1e308, -1e308, 2**31, 2**32, 2**63, 2**64, 10**40, "", "w1", "words",
    "auto", "user", "\0", "\ud800", "日本", "a" * 300, "w1 " * 3000, [], {}, [[]], [{}], {"": None}, [1, 2, 3],
    [1] * 100, ["w1", "w2"], {"type": "text"}, {"type": "json_object"}, {"type": "text", "text": "w1"}, "NaN",
    {"type": "function", "function": {"name": "f"}}, float("nan"), float("inf"), [[1, 2], [3]], {"a": [{}] * 50},
    {"9" * 5000: 1}, "9" * 5000, {"5": 10**4000},
]  # fmt: skip
PATHS = ["/v1/models", "/v1/models/words", "/health", "/version", "/v1/none", "/", "/v1/chat/completions"]
PATHS += ["/v1/files", "/v1/files/file-0", "/v1/files/file-0/content", "/v1/batches", "/v1/batches/b/cancel"]
TYPED = frozenset({200, 400, 401, 403, 404, 405, 408, 411, 413, 415, 422, 429, 504})
PICKS = st.integers(0, 2**64 - 1).map(random.Random)

pytestmark = pytest.mark.timeout(max(300, EXAMPLES * 1.5))


def varied(pick: random.Random, value: Any, rate: float) -> Any:
    """A copy with some of its parts replaced, taken away, or doubled."""
    if pick.random() < rate:
        return copy.deepcopy(pick.choice(WILD))
    if isinstance(value, dict):
        made = {name: varied(pick, inner, rate) for name, inner in value.items() if pick.random() > rate / 2}
        if pick.random() < rate:
            made[
                pick.choice(
                    ["zzz", "suffix", "functions", "min_tokens", "top_k", "guided_regex", "ignore_eos"]
                )
            ] = pick.choice(WILD)
        return made
    if isinstance(value, list):
        made_list = [varied(pick, inner, rate) for inner in value]
        return made_list * 2 if pick.random() < rate else made_list
    return value


@pytest.fixture(autouse=True)
def no_errors_inside(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR] == []


@pytest.fixture(scope="module")
def face(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Loop, FakeCluster, httpx.AsyncClient, Counter[int]]]:
    loop, codes = Loop(), Counter[int]()

    @asynccontextmanager
    async def made() -> AsyncIterator[tuple[Loop, FakeCluster, httpx.AsyncClient, Counter[int]]]:
        async with fake_cluster(http_port=0, batch_folder=tmp_path_factory.mktemp("batches")) as cluster:
            base = f"http://127.0.0.1:{cluster.coordinator.http_port}"
            async with httpx.AsyncClient(base_url=base, timeout=PATIENCE_S, trust_env=False) as client:
                await client.get("/health")  # imports what this client needs
                settle_for_long_run(cluster.coordinator.loop_lag)
                yield loop, cluster, client, codes

    with loop.holding(made) as parts:
        yield parts
        print(dict(sorted(codes.items())))


def checked(response: httpx.Response, sent: bytes) -> None:
    assert response.status_code in TYPED, (response.status_code, response.text[:500], sent[:2000])
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["type"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert "Traceback" not in response.text
        for line in response.text.split("\n\n"):
            if line.startswith("data: {"):
                error = json.loads(line.removeprefix("data: ")).get("error", {})
                assert error.get("code") != "internal", sent
    else:
        response.json()


def test_bodies(face: tuple[Loop, FakeCluster, httpx.AsyncClient, Counter[int]]) -> None:
    loop, cluster, client, codes = face

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        path, valid = pick.choice(BODIES)
        body = varied(pick, valid, pick.choice([0.0, 0.02, 0.1, 0.3]))
        data = json.dumps(body, ensure_ascii=pick.random() < 0.5).encode("utf-8", "surrogatepass")
        if pick.random() < 0.2:
            data = damaged(pick, data)
        kind = pick.choice(
            ["application/json", "application/json", "application/json; charset=utf-8", "text/plain"]
        )
        response = loop.run(client.post(path, content=data, headers={"content-type": kind}))
        codes[response.status_code] += 1
        checked(response, data)

    fuzz()
    loop.run(works(cluster, client))
    tell_stall(cluster.coordinator.loop_lag)
    assert codes[200] > EXAMPLES / 20
    assert codes[400] > EXAMPLES / 20


def test_paths_methods_and_headers(face: tuple[Loop, FakeCluster, httpx.AsyncClient, Counter[int]]) -> None:
    loop, cluster, client, codes = face

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        path = pick.choice(PATHS) + pick.choice(
            ["", "", "?a=b", "/..", "%00", "/" + "x" * 300, "?" + "%ff" * 20]
        )
        method = pick.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
        headers = {"x-request-id": pick.choice(["", "a", "b" * 300, "a b", "\u00e9"]).encode("latin-1")}
        if pick.random() < 0.3:
            headers["authorization"] = pick.choice([b"", b"Bearer", b"Bearer x", b"Basic eA==", b"\xff"])
        response = loop.run(client.request(method, path, headers=headers))
        codes[response.status_code] += 1
        assert response.status_code in TYPED, (method, path, headers, response.text[:500])

    fuzz()
    loop.run(works(cluster, client))
    tell_stall(cluster.coordinator.loop_lag)


async def works(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
    """A normal request afterwards, and nothing of the others left."""
    body = {"model": "words", "prompt": "w1", "max_tokens": 3}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 3
    await settled(lambda: not cluster.coordinator.api.running)
    await settled(lambda: not any(decode.live for decode in cluster.decodes))
