"""Recorded texts of every family through real processes, in tokens: what OpenAI's client reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from coordinator.entrypoints.openai.formats.table import TOOL_FORMATS
from coordinator.entrypoints.openai.formats.tool_format import ReasoningFormat
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.tokenizer import Tokenizer
from tests.support.cluster.real_cluster import Cluster, echoing
from tests.support.formats.recorded_model import family_template, reasoning_of
from tests.support.formats.samples import CALLS, CITY, SAMPLES

TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
THOUGHT = "I need the weather."

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    async with echoing(folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tokenizer(cluster: Cluster, folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder / "model"))


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(params=sorted(TOOL_FORMATS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reasoning(family: str) -> ReasoningFormat:
    return reasoning_of(family)


async def ask(client: openai.AsyncOpenAI, family: str, text: str, **options: Any) -> tuple[Any, Any]:
    """The whole answer's choice, and its usage; the streamed one is the same."""
    messages: Any = [{"role": "user", "content": text}]
    template = {"chat_template": family_template(family)}
    asked: dict[str, Any] = {"model": "simulated", "messages": messages, "extra_body": template, **options}
    create = client.chat.completions.create
    whole, stream = await asyncio.gather(
        create(**asked), create(**asked, stream=True, stream_options={"include_usage": True})
    )
    choice, usage = whole.choices[0], whole.usage
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


async def test_reasoning_and_calls(
    client: openai.AsyncOpenAI, family: str, reasoning: ReasoningFormat, tokenizer: Tokenizer
) -> None:
    thought = f"{reasoning.begin}{THOUGHT}\n{reasoning.ends[0]}"
    said = "" if TOOL_FORMATS[family].is_bare else "Let me see."
    text = f"{thought}\n\n{said}\n{SAMPLES[family].calls}"
    choice, usage = await ask(client, family, text, tools=TOOLS)
    message = choice.message
    assert (message.reasoning_content, message.content or "") == (THOUGHT, said)
    called = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert (called, choice.finish_reason) == (CALLS, "tool_calls")
    assert usage.completion_tokens_details.reasoning_tokens == len(tokenizer.encode(thought))


async def test_answers_without_calls(
    client: openai.AsyncOpenAI, family: str, reasoning: ReasoningFormat
) -> None:
    for options in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        choice, _ = await ask(client, family, f"{reasoning.begin}Hm.{reasoning.ends[0]}Hello <b>.", **options)
        assert (choice.message.reasoning, choice.message.content) == ("Hm.", "Hello <b>.")
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    choice, usage = await ask(client, family, "Hello.")
    assert (choice.message.reasoning, choice.message.content) == (None, "Hello.")
    assert usage.completion_tokens_details.reasoning_tokens == 0


async def test_a_limit_inside_reasoning_or_a_call(
    client: openai.AsyncOpenAI, family: str, reasoning: ReasoningFormat, tokenizer: Tokenizer
) -> None:
    text = f"{reasoning.begin}{THOUGHT}{reasoning.ends[0]}{SAMPLES[family].calls}"
    length = len(tokenizer.encode(text))
    for limit in (3, length // 3, length // 2, length - 1):
        choice, _ = await ask(client, family, text, tools=TOOLS, max_tokens=limit)
        assert choice.finish_reason == "length"
        assert not choice.message.content
        assert THOUGHT.startswith(choice.message.reasoning or "")


async def test_a_forced_call(client: openai.AsyncOpenAI, family: str, reasoning: ReasoningFormat) -> None:
    """The model would say something else once it has thought."""
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
    text = f"{reasoning.begin}A <tool_call>?{reasoning.ends[0]}Hello."
    choice, _ = await ask(client, family, text, **options)
    assert (choice.message.reasoning, choice.message.content) == ("A <tool_call>?", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("wake", "tool_calls")
    arguments = json.loads(call.function.arguments)
    assert 0 <= arguments["hour"] <= 23
    assert arguments["zone"] in ("UTC", "CET")
