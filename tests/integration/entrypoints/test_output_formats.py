"""Recorded texts of every family through real processes, in tokens: what OpenAI's client reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from coordinator.entrypoints.openai.formats.table import TOOL_FORMATS
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.tokenizer import Tokenizer
from tests.support.cluster.real_cluster import Cluster, echoing
from tests.support.formats.recorded_model import (
    family_template,
    make_gpt_oss_model,
    make_recorded_model,
    reasoning_of,
)
from tests.support.formats.samples import CALLS, CITY, SAMPLES

TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
THOUGHT = "I need the weather."

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
async def most(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with echoing(tmp_path_factory.mktemp("logs"), make_recorded_model) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with echoing(tmp_path_factory.mktemp("gpt-oss"), make_gpt_oss_model) as cluster:
        yield cluster


@pytest.fixture(params=[*sorted(TOOL_FORMATS.keys() - {"harmony"}), "harmony"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(family: str, request: pytest.FixtureRequest) -> Cluster:
    """One cluster serves all families but gpt-oss, which has a vocabulary of its own."""
    cluster: Cluster = request.getfixturevalue("gpt_oss" if family == "harmony" else "most")
    return cluster


@pytest.fixture
def tokenizer(cluster: Cluster) -> Tokenizer:
    return load_tokenizer(str(cluster.log_dir / "model"))


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="any", max_retries=0) as client:
        yield client


@dataclass(frozen=True)
class Told:
    """What a family's model is told to say."""

    family: str
    thought: str = ""
    text: str = ""
    calls: bool = False

    @property
    def reasoning(self) -> str:
        """The reasoning with its tags."""
        reasoning = reasoning_of(self.family)
        end = "<|end|>" if self.family == "harmony" else reasoning.ends[0]
        return f"{reasoning.begin}{self.thought}{end}" if self.thought else ""

    @property
    def whole(self) -> str:
        if self.family != "harmony":
            gap = "\n\n" if self.thought and self.text else ""
            return f"{self.reasoning}{gap}{self.text}" + (
                f"\n{SAMPLES[self.family].calls}" if self.calls else ""
            )
        messages = [self.reasoning] if self.thought else []
        if self.text:
            messages.append(f"<|channel|>{'commentary' if self.calls else 'final'}<|message|>{self.text}")
        if self.calls:
            arguments = json.dumps(CALLS[0][1], ensure_ascii=False)
            head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            messages.append(head + arguments)
        return "<|end|><|start|>assistant".join(message.removesuffix("<|end|>") for message in messages)


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


async def test_reasoning_and_calls(client: openai.AsyncOpenAI, family: str, tokenizer: Tokenizer) -> None:
    text = "" if TOOL_FORMATS[family].is_bare else "Let me see."
    told = Told(family, f"{THOUGHT}\n", text, calls=True)
    choice, usage = await ask(client, family, told.whole, tools=TOOLS)
    message = choice.message
    assert (message.reasoning_content, message.content or "") == (THOUGHT, text)
    called = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert (called, choice.finish_reason) == (CALLS[: len(called)], "tool_calls")
    assert len(called) == (1 if family == "harmony" else len(CALLS))
    assert usage.completion_tokens_details.reasoning_tokens == len(tokenizer.encode(told.reasoning))


async def test_answers_without_calls(client: openai.AsyncOpenAI, family: str) -> None:
    told = Told(family, "Hm.", "Hello <b>.").whole
    for options in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        choice, _ = await ask(client, family, told, **options)
        assert (choice.message.reasoning, choice.message.content) == ("Hm.", "Hello <b>.")
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    choice, usage = await ask(client, family, Told(family, text="Hello.").whole)
    assert (choice.message.reasoning, choice.message.content) == (None, "Hello.")
    assert usage.completion_tokens_details.reasoning_tokens == 0


async def test_a_limit_inside_reasoning_or_a_call(
    client: openai.AsyncOpenAI, family: str, tokenizer: Tokenizer
) -> None:
    text = Told(family, THOUGHT, calls=True).whole
    length = len(tokenizer.encode(text))
    for limit in (3, length // 3, length // 2, length - 1):
        choice, _ = await ask(client, family, text, tools=TOOLS, max_tokens=limit)
        assert choice.finish_reason == "length"
        assert not choice.message.content
        assert THOUGHT.startswith(choice.message.reasoning or "")


async def test_a_forced_call(client: openai.AsyncOpenAI, family: str) -> None:
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
    told = Told(family, "A <tool_call>?", "Hello.").whole
    choice, _ = await ask(client, family, told, **options)
    assert (choice.message.reasoning, choice.message.content) == ("A <tool_call>?", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("wake", "tool_calls")
    arguments = json.loads(call.function.arguments)
    assert 0 <= arguments["hour"] <= 23
    assert arguments["zone"] in ("UTC", "CET")
