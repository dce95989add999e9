"""Recorded texts through real processes, as clients of the Responses and of the Messages API read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
)

from tests.support.cluster.real_cluster import Cluster, echoing
from tests.support.formats.recorded_model import make_recorded_model
from tests.support.formats.samples import CALLS, CITY, SAMPLES

MODEL = "simulated"
FUNCTIONS = {"get_weather": CITY, "now": {"type": "object", "properties": {}}}
FLAT_TOOLS: Any = [
    {"type": "function", "name": name, "parameters": schema} for name, schema in FUNCTIONS.items()
]
TOOLS: Any = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS.items()]
SAID = f"<think>I need the weather.\n</think>\n\nLet me see.\n{SAMPLES['hermes'].calls}"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with echoing(tmp_path_factory.mktemp("logs"), make_recorded_model) as cluster:
        yield cluster


@pytest.fixture
async def responses(cluster: Cluster) -> AsyncIterator[openai.resources.AsyncResponses]:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="any", max_retries=0) as client:
        yield client.responses


@pytest.fixture
async def messages(cluster: Cluster) -> AsyncIterator[anthropic.resources.AsyncMessages]:
    base_url = cluster.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="any", max_retries=0) as client:
        yield client.messages


def shown(items: Any) -> list[Any]:
    """What the items of a response say."""
    return [
        (item.name, json.loads(item.arguments)) if item.type == "function_call" else item.content[0].text
        for item in items
    ]


async def test_responses(responses: openai.resources.AsyncResponses) -> None:
    whole = await responses.create(model=MODEL, input=SAID, tools=FLAT_TOOLS)
    assert shown(whole.output) == ["I need the weather.", "Let me see.", *CALLS]
    assert (whole.status, whole.output_text) == ("completed", "Let me see.")
    async with responses.stream(model=MODEL, input=SAID, tools=FLAT_TOOLS) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert shown(streamed.output) == shown(whole.output)
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.output_tokens_details == whole.usage.output_tokens_details
    assert streamed.usage.input_tokens_details.cached_tokens > 0
    cut = await responses.create(model=MODEL, input=SAID, max_output_tokens=12, store=False)
    assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(cut.id)


async def test_a_response_is_continued(responses: openai.resources.AsyncResponses) -> None:
    first = await responses.create(model=MODEL, input=SAID, instructions="Be kind.", tools=FLAT_TOOLS)
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Sunny."}
        for item in first.output
        if item.type == "function_call"
    ]
    told: Any = [{"role": "user", "content": SAID}, *first.output, *results]
    whole = await responses.create(model=MODEL, input=told, tools=FLAT_TOOLS)
    continued = await responses.create(
        model=MODEL, input=results, previous_response_id=first.id, tools=FLAT_TOOLS
    )
    assert shown(continued.output) == shown(whole.output)
    assert whole.usage is not None
    assert continued.usage is not None
    assert continued.usage.input_tokens == whole.usage.input_tokens
    assert await responses.retrieve(continued.id) == continued
    await responses.delete(continued.id)
    with pytest.raises(openai.NotFoundError) as missing:
        await responses.create(model=MODEL, input="hi", previous_response_id=continued.id)
    assert (missing.value.param, missing.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )


async def test_messages(messages: anthropic.resources.AsyncMessages) -> None:
    asked: Any = {
        "model": MODEL,
        "max_tokens": 20_000,
        "messages": [{"role": "user", "content": SAID}],
        "tools": TOOLS,
    }
    whole = await messages.create(**asked)
    thinking, text, *uses = whole.content
    assert (thinking.type, text.type, whole.stop_reason) == ("thinking", "text", "tool_use")
    assert (thinking.thinking, text.text) == ("I need the weather.", "Let me see.")
    assert [(use.name, use.input) for use in uses if use.type == "tool_use"] == CALLS
    async with messages.stream(**asked) as stream:
        async for event in stream:
            if event.type == "message_start":
                prompt = event.message.usage.input_tokens
        streamed = await stream.get_final_message()
    kept = [block.model_dump(exclude={"id", "signature", "parsed_output"}) for block in streamed.content]
    assert kept == [block.model_dump(exclude={"id", "signature"}) for block in whole.content]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    counted = await messages.count_tokens(**{name: asked[name] for name in ("model", "messages", "tools")})
    assert counted.input_tokens == prompt
    assert prompt == streamed.usage.input_tokens + (streamed.usage.cache_read_input_tokens or 0)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "Sunny."} for use in uses]
    turns = [
        *asked["messages"],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": results},
    ]
    again = await messages.create(**asked | {"messages": turns})
    assert again.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("text", "options", "reason", "sequence"),
    [
        ("Hello END.", {"stop_sequences": ["STOP", "END"]}, "stop_sequence", "END"),
        ("Hello END.", {}, "end_turn", None),
        ("Hello END.", {"max_tokens": 3}, "max_tokens", None),
    ],
)
async def test_why_a_message_ends(
    messages: anthropic.resources.AsyncMessages, text: str, options: Any, reason: str, sequence: str | None
) -> None:
    turns: Any = [{"role": "user", "content": text}]
    message = await messages.create(**{"model": MODEL, "max_tokens": 50, "messages": turns} | options)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("streams", [False, True])
async def test_the_agents_sdk_goes_on_after_calls(cluster: Cluster, kind: Any, streams: bool) -> None:
    called: list[tuple[str, dict[str, Any]]] = []

    @function_tool
    def get_weather(city: str, days: int) -> str:
        called.append(("get_weather", {"city": city, "days": days}))
        return "Sunny."

    @function_tool
    def now() -> str:
        called.append(("now", {}))
        return "Noon."

    def after(_context: object, _results: object) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(is_final_output=len(called) == 2 * len(CALLS), final_output="done")

    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="any", max_retries=0) as client:
        agent = Agent(
            "a", tools=[get_weather, now], model=kind(MODEL, openai_client=client), tool_use_behavior=after
        )
        plain = RunConfig(tracing_disabled=True)
        if streams:
            run = Runner.run_streamed(agent, SAID, run_config=plain)
            assert [event async for event in run.stream_events()]
            output = run.final_output
        else:
            output = (await Runner.run(agent, SAID, run_config=plain)).final_output
    # In one turn the tools run side by side.
    by_name = sorted(called, key=lambda call: call[0])
    assert (output, by_name) == ("done", sorted(2 * CALLS, key=lambda call: call[0]))


async def test_errors_are_in_the_form_of_their_api(cluster: Cluster) -> None:
    hi = {"model": "none", "input": "hi", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(base_url=cluster.base_url) as http:
        for path in ("messages", "messages/count_tokens"):
            for status, made in (
                (404, http.post(path, json={name: hi[name] for name in hi if name != "input"})),
                (400, http.post(path, content=b"{", headers={"content-type": "application/json"})),
                (405, http.get(path)),
                (415, http.post(path, content=b"{}")),
            ):
                response = await made
                assert (response.status_code, response.json()["type"]) == (status, "error")
        response = await http.post("responses", json={"model": "none", "input": "hi"})
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
