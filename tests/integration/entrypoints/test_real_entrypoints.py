"""KServe's protocol and OpenAI's tool calls with SmolLM2 through a real pair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator

from splitserve.client import Completion
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.clients.traffic import REPEATS
from tests.support.clients.triton import triton
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.reference import Reference
from tests.support.waiting import PATIENCE_S

MODEL = "smol"
MAX_TOKENS = 12
PROMPTS = ["The capital of France is", "def fibonacci(n):", sentences(12, seed=5)]
TOOLS_BLOCK = (
    "{% if tools %}<|im_start|>system\nFunctions:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n{% endif %}'
)
ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"},
        "express": {"type": "boolean"},
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "item": {"enum": ["tea", "coffee", "bread"]},
                    "count": {"type": "integer", "minimum": 1, "maximum": 12},
                },
                "required": ["item", "count"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "express", "lines"],
    "additionalProperties": False,
}
CANCEL = {
    "type": "object",
    "properties": {"order": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}},
    "required": ["order"],
    "additionalProperties": False,
}
SCHEMAS = {"place_order": ORDER, "cancel_order": CANCEL}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model, with a chat template that knows tools."""
    made = tmp_path_factory.mktemp("model")
    for file in Path(smollm2).iterdir():
        (made / file.name).symlink_to(file)
    template = made / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    template.write_text(TOOLS_BLOCK + text)
    return str(made)


@pytest.fixture(scope="module")
async def cluster(folder: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = ["--dtype", "float32", "--num-blocks", "400", "--served-model-name", MODEL]
    logs = tmp_path_factory.mktemp("logs")
    patient = ["--heartbeat-timeout", "60"]  # on a busy machine
    made = Cluster(
        logs, model=folder, engine="torch", worker_options=options, coordinator_options=patient, http=True
    )
    async with running(made):
        yield made
        await made.assert_no_leaks()


@pytest.fixture(scope="module")
async def greedy(cluster: Cluster) -> list[Completion]:
    """Our own service's answer to each prompt."""
    async with cluster.client(timeout_s=240) as client:
        asked = (client.generate(p, temperature=0.0, max_tokens=MAX_TOKENS) for p in PROMPTS)
        return await asyncio.gather(*asked)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=cluster.base_url, api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def kserve_request(number: int, **inputs: Any) -> dict[str, Any]:
    """A greedy one of tritonclient."""
    text = {"text_input": ["BYTES", [PROMPTS[number]]], "max_tokens": ["INT32", [MAX_TOKENS]]}
    greedy = {"temperature": ["FP32", [0.0]]}
    return {"model": MODEL, "id": f"r{number}", "inputs": text | greedy | inputs}


async def test_greedy_answers_are_those_of_transformers(greedy: list[Completion], smollm2: str) -> None:
    tokenizer, reference = load_tokenizer(smollm2), Reference(smollm2)
    for prompt, answer in zip(PROMPTS, greedy, strict=True):
        assert list(answer.token_ids) == reference.greedy(tokenizer.encode(prompt), MAX_TOKENS)
        assert answer.served_by.transport == "nixl"


async def test_kserve_gives_the_same_answers(cluster: Cluster, greedy: list[Completion]) -> None:
    requests = [kserve_request(number) for number in range(len(PROMPTS))]
    seen = await triton(cluster.target, kind="infer", requests=requests)
    for number, (response, answer) in enumerate(zip(seen, greedy, strict=True)):
        assert response["id"] == f"r{number}"
        assert response["outputs"] == {
            "text_output": [answer.text],
            "output_ids": list(answer.token_ids),
            "finish_reason": [answer.finish_reason],
        }
        assert response["parameters"]["prompt_tokens"] == answer.usage.prompt_tokens
        assert response["parameters"]["completion_tokens"] == len(answer.token_ids)
        assert response["parameters"]["decode_worker"] == "decode-0"


async def test_kserve_streams_the_same_answers_side_by_side(
    cluster: Cluster, greedy: list[Completion]
) -> None:
    stream = {"stream": ["BOOL", [True]]}
    requests = [kserve_request(number, **stream) for number in range(len(PROMPTS))]
    for _ in range(REPEATS):  # a machine that stands still meanwhile has it all in one piece
        seen = await triton(cluster.target, kind="stream", requests=requests, finals=len(PROMPTS))
        of_each = [[piece for piece in seen if piece["id"] == f"r{n}"] for n in range(len(PROMPTS))]
        if min(map(len, of_each)) > 1:
            break
    for pieces, answer in zip(of_each, greedy, strict=True):
        assert len(pieces) > 1, "it came piece by piece"
        assert "".join(piece["outputs"]["text_output"][0] for piece in pieces) == answer.text
        ids = [token for piece in pieces for token in piece["outputs"]["output_ids"]]
        assert ids == list(answer.token_ids)
        finals = [piece["parameters"]["triton_final_response"] for piece in pieces]
        assert finals == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1]["outputs"]["finish_reason"] == [answer.finish_reason]


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    """Of the model with both tools. The bound is far above what a call of these schemas takes."""
    messages: Any = [{"role": "user", "content": "Two teas for Anna, please, at once."}]
    return await client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 400} | options
    )


def assert_valid(call: Any) -> None:
    """The call is of a function that was given, and its arguments satisfy its schema."""
    validator = Draft202012Validator(SCHEMAS[call.function.name])
    validator.validate(json.loads(call.function.arguments))


@pytest.mark.slow
async def test_a_forced_call_has_arguments_of_the_schema(client: openai.AsyncOpenAI) -> None:
    samplings = [
        {"temperature": 0},
        {"temperature": 0},
        *({"temperature": 1, "seed": seed} for seed in (1, 2)),
    ]

    async def forced(name: str) -> list[Any]:
        choice = {"type": "function", "function": {"name": name}}
        options = {"tool_choice": choice, "parallel_tool_calls": False}
        return await asyncio.gather(*(ask(client, **options, **sampling) for sampling in samplings))

    # All at once: they share the engine's steps.
    for name, answers in zip(SCHEMAS, await asyncio.gather(*map(forced, SCHEMAS)), strict=True):
        calls = []
        for answer in answers:
            (choice,) = answer.choices
            (call,) = choice.message.tool_calls
            assert (call.function.name, choice.finish_reason) == (name, "tool_calls")
            assert not choice.message.content
            assert_valid(call)
            calls.append(call.function)
        assert calls[0] == calls[1], "two greedy answers"


async def test_a_streamed_call_is_the_whole_one(client: openai.AsyncOpenAI) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    whole_answer = asyncio.create_task(ask(client, **options))
    name = arguments = reason = ""
    pieces = 0
    async for chunk in await ask(client, **options, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        for piece in chunk.choices[0].delta.tool_calls or ():
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
            pieces += bool(piece.function.arguments)
    whole = (await whole_answer).choices[0].message.tool_calls[0]
    assert_valid(whole)
    assert (name, arguments, reason) == (whole.function.name, whole.function.arguments, "tool_calls")
    assert pieces > 1, "the arguments came piece by piece"


async def test_calls_of_the_models_own_choice_are_valid(client: openai.AsyncOpenAI) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
    for answer in await asyncio.gather(*(ask(client, **options, seed=seed) for seed in range(3))):
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert_valid(call)


def test_a_forced_call_of_an_unknown_function_is_refused(cluster: Cluster) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tea"}], "tools": TOOLS}
    wrong = {"type": "function", "function": {"name": "pay"}}
    response = httpx.post(
        f"{cluster.base_url}/chat/completions", json=body | {"tool_choice": wrong}, timeout=PATIENCE_S
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
