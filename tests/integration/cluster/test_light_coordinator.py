"""A real coordinator with the embedded model's tokenizer: what its process holds, and how chats go beside a flood."""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from splitserve.client import AsyncClient
from tests.support.chat_templates import with_template
from tests.support.cluster.fake_workers import FakeDecode, FakePrefill
from tests.support.cluster.processes import ServiceProcess
from tests.support.waiting import PATIENCE_S

RESIDENT_BYTES = 150e6
BYSTANDER_S = 1.0
"""What a chat of 2 kB may take beside a flood, on a machine that is free."""
SLOWNESS = 5.0
"""On another one, so many times what it takes without."""
CHAT = "/chat/completions"
JSON = {"content-type": "application/json"}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def coordinator(
    smollm2: str, log_dir: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[ServiceProcess, httpx.AsyncClient]]:
    """A real process with the model's own tokenizer; the workers are scripted."""
    options = ["coordinator", "--grpc-port", "0", "--http-port", "0"]
    process = ServiceProcess("coordinator", options, log_dir)
    process.start()
    async with AsyncExitStack() as stack:
        stack.callback(process.terminate)
        ready = process.wait_event("coordinator.ready")
        target = f"127.0.0.1:{ready['port']}"
        sources = {"m": smollm2}
        for number, template in enumerate(getattr(request, "param", ())):
            sources[f"m{number}"] = with_template(smollm2, log_dir / f"m{number}", template)
        for model, source in sources.items():
            served: dict[str, Any] = {"model": model, "tokenizer_source": source}
            served |= {"context_tokens": 8192, "vocabulary_size": 50_000}
            decode = FakeDecode(f"decode-{model}", target, **served)
            prefill = FakePrefill(f"prefill-{model}", target, lambda _agent, to=decode: to, **served)
            for worker in (decode, prefill):
                stack.push_async_callback(worker.stop)
                await worker.start()
                worker.let_go()
        client = await stack.enter_async_context(AsyncClient(target))
        for model in sources:
            await client.wait_ready(PATIENCE_S, model=model)
        base_url = f"http://127.0.0.1:{ready['http_port']}/v1"
        yield (
            process,
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=base_url, headers=JSON, timeout=PATIENCE_S)
            ),
        )
        info = await client.server_info()
        assert (info.running_requests, info.background_tasks) == (0, 0)


def asked(text: str, model: str = "m") -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return json.dumps(body).encode()


async def test_a_coordinator_stays_small(coordinator: tuple[ServiceProcess, httpx.AsyncClient]) -> None:
    process, web = coordinator
    for number in range(40):
        reply = await web.post(CHAT, content=asked(f"Hello, {number} times. " * (1 + number)))
        assert reply.status_code == 200, reply.text
    resident = psutil.Process(process.process.pid).memory_info().rss
    print(f"resident: {resident / 1e6:.1f} MB")
    assert resident < RESIDENT_BYTES


@pytest.mark.parametrize("most", [-(2**63), -(2**63) + 1, 2**63, 10**30])
async def test_a_tool_that_no_grammar_holds_where_the_template_has_no_tools(
    coordinator: tuple[ServiceProcess, httpx.AsyncClient], most: int
) -> None:
    process, web = coordinator
    number = {"type": "integer", "minimum": -(2**63), "maximum": most}
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": number}}}
    body = json.loads(asked("Hello")) | {"tools": [{"type": "function", "function": function}]}
    for choice in ("auto", "required"):
        reply = await web.post(CHAT, json=body | {"tool_choice": choice})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    assert (await web.post(CHAT, content=asked("Hello"))).status_code == 200
    assert process.process.poll() is None


def prose(characters: int) -> str:
    pick = random.Random(characters)
    words = (
        "".join(pick.choices(string.ascii_letters + "éü漢字🐱", k=pick.randint(1, 9)))
        for _ in range(characters // 2)
    )
    return " ".join(words)[:characters]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("count", "text", "status"),
    [
        pytest.param(40, "0123456789" * 104_857, 400, id="digits"),
        pytest.param(8, " " * 450_000 + "7" * 550_000, 400, id="digits at the end", marks=pytest.mark.slow),
        pytest.param(40, prose(2**19), 400, id="prose", marks=pytest.mark.slow),
        pytest.param(40, prose(10_000), 200, id="prose that fits"),
        pytest.param(4, " " * 480_000, 200, id="spaces that fit", marks=pytest.mark.slow),
    ],
)
async def test_a_flood_of_long_prompts_delays_no_chat_of_another(
    coordinator: tuple[ServiceProcess, httpx.AsyncClient], count: int, text: str, status: int
) -> None:
    _, web = coordinator

    async def chat(number: int) -> float:
        began_s = time.monotonic()
        reply = await web.post(CHAT, content=asked(f"{number} " + "Once upon a time there was. " * 70))
        assert reply.status_code == 200, reply.text
        return time.monotonic() - began_s

    alone_s = [await chat(number) for number in range(10)]
    bodies = [asked(f"{text}{number}") for number in range(count)]
    async with httpx.AsyncClient(base_url=web.base_url, headers=JSON, timeout=PATIENCE_S) as flooder:
        flood = asyncio.gather(*(flooder.post(CHAT, content=body) for body in bodies))
        beside_s = [await chat(10)]
        while not flood.done():
            beside_s.append(await chat(10 + len(beside_s)))
        replies = await flood
    print(f"alone {max(alone_s):.3f} s, beside {len(beside_s)}, {max(beside_s):.3f} s")
    assert {reply.status_code for reply in replies} == {status}, replies[0].text[:300]
    assert max(beside_s) < max(BYSTANDER_S, SLOWNESS * max(alone_s))


LOOP = "{% for i in range(100000) %}"
TEMPLATES = {
    LOOP * 2 + "{% endfor %}" * 2: "rendering takes more than 1 s",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}": "more than 1 s",
    "{{ 2.0 ** 5000 }}": "out of range",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recursion",
    "{{ 'a' * 10 ** 10 }}": "more than 33554432 characters",
    LOOP + "{{ messages[0].content }}{% endfor %}": "more than 33554432 characters",
}


@pytest.mark.parametrize("coordinator", [list(TEMPLATES)], indirect=True, ids=["hostile"])
async def test_a_hostile_template_is_refused_and_others_go_on(
    coordinator: tuple[ServiceProcess, httpx.AsyncClient],
) -> None:
    process, web = coordinator
    before = psutil.Process(process.process.pid).memory_info().rss
    text = "Once upon a time there was. " * 70
    hostile = [web.post(CHAT, content=asked(text, f"m{number}")) for number in range(len(TEMPLATES))]
    *refused, served = await asyncio.gather(*hostile, web.post(CHAT, content=asked(text)))
    assert served.status_code == 200
    for reply, why in zip(refused, TEMPLATES.values(), strict=True):
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["message"].startswith("messages: the chat template refuses these messages: ")
        assert why in error["message"]
    assert psutil.Process(process.process.pid).memory_info().rss < before + 300e6
