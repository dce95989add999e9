"""Recorded texts of several families through real processes: reasoning and calls as OpenAI's client reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.cluster.real_cluster import Cluster, echoing
from tests.support.formats.samples import CALLS, CITY, SAMPLES

MODEL = "simulated"
FAMILIES = {"qwen_xml": "<think>", "kimi_k2": "<think>", "gemma": "<|channel>thought\n"}
"""Each with the beginning of its reasoning."""
ENDS = {"<think>": "</think>", "<|channel>thought\n": "<channel|>"}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
async def cluster(family: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    reasoning = "gemma" if family == "gemma" else "think"
    async with echoing(tmp_path_factory.mktemp("logs"), family, reasoning) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="any", max_retries=0) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, text: str, **options: Any) -> tuple[Any, Any]:
    """The whole answer's choice, and its usage; the streamed one is the same."""
    messages: Any = [{"role": "user", "content": text}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, **options}
    whole = await client.chat.completions.create(**asked)
    choice, usage = whole.choices[0], whole.usage
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    content = reasoning = same_reasoning = reason = ""
    calls: list[list[str]] = []
    last = None
    async for chunk in stream:
        last = chunk.usage or last
        for piece in chunk.choices:
            reason = piece.finish_reason or reason
            content += piece.delta.content or ""
            further = piece.delta.model_extra or {}
            reasoning += further.get("reasoning_content", "")
            same_reasoning += further.get("reasoning", "")
            for call in piece.delta.tool_calls or ():
                if call.function.name:
                    assert call.index == len(calls)
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
    message = choice.message
    assert content == (message.content or "")
    assert reasoning == same_reasoning == (message.reasoning_content or "") == (message.reasoning or "")
    assert calls == [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    assert reason == choice.finish_reason
    assert last is not None
    assert last.completion_tokens_details == usage.completion_tokens_details
    return choice, usage


async def test_reasoning_and_calls(client: openai.AsyncOpenAI, family: str) -> None:
    begin = FAMILIES[family]
    thought = f"{begin}I need the weather.\n{ENDS[begin]}"
    choice, usage = await ask(client, f"{thought}\n\nLet me see.\n{SAMPLES[family].calls}", tools=TOOLS)
    message = choice.message
    assert (message.reasoning_content, message.content) == ("I need the weather.", "Let me see.")
    called = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert (called, choice.finish_reason) == (CALLS, "tool_calls")
    assert usage.completion_tokens_details.reasoning_tokens == len(thought)


async def test_answers_without_calls(client: openai.AsyncOpenAI, family: str) -> None:
    begin = FAMILIES[family]
    for options in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        choice, _ = await ask(client, f"{begin}Hm.{ENDS[begin]}Hello <b>.", **options)
        assert (choice.message.reasoning, choice.message.content) == ("Hm.", "Hello <b>.")
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    choice, usage = await ask(client, "Hello.")
    assert (choice.message.reasoning, choice.message.content) == (None, "Hello.")
    assert usage.completion_tokens_details.reasoning_tokens == 0


async def test_a_limit_inside_reasoning_or_a_call(client: openai.AsyncOpenAI, family: str) -> None:
    begin = FAMILIES[family]
    text = f"{begin}I need the weather.{ENDS[begin]}{SAMPLES[family].calls}"
    for limit in (len(begin) + 6, len(begin) + 21, len(begin) + 40, len(begin) + 75):
        choice, _ = await ask(client, text, tools=TOOLS, max_tokens=limit)
        assert choice.finish_reason == "length"
        assert not choice.message.content
        assert "I need the weather.".startswith(choice.message.reasoning)


async def test_a_forced_call(client: openai.AsyncOpenAI, family: str) -> None:
    """The model would say something else once it has thought."""
    begin = FAMILIES[family]
    hour = {
        "type": "object",
        "properties": {
            "hour": {"type": "integer", "minimum": 0, "maximum": 23},
            "zone": {"enum": ["UTC", "CET"]},
        },
        "required": ["hour", "zone"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "wake", "parameters": hour}}]
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    choice, _ = await ask(client, f"{begin}A <tool_call>?{ENDS[begin]}Hello.", **options)
    assert (choice.message.reasoning, choice.message.content) == ("A <tool_call>?", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("wake", "tool_calls")
    arguments = json.loads(call.function.arguments)
    assert 0 <= arguments["hour"] <= 23
    assert arguments["zone"] in ("UTC", "CET")
