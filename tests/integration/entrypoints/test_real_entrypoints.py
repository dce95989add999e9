"""SmolLM2 through a real pair: KServe's protocol, OpenAI's and Anthropic's give the answers of `transformers`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest

from splitserve.client import ChatMessage, Completion
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
QUESTION = "What is the name of the capital of France?"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
async def cluster(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = ["--dtype", "float32", "--num-blocks", "400", "--served-model-name", MODEL]
    logs = tmp_path_factory.mktemp("logs")
    patient = ["--heartbeat-timeout", "60"]  # on a busy machine
    made = Cluster(
        logs, model=smollm2, engine="torch", worker_options=options, coordinator_options=patient, http=True
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


async def test_openais_completions_are_the_same(client: openai.AsyncOpenAI, greedy: list[Completion]) -> None:
    for prompt, expected in zip(PROMPTS, greedy, strict=True):
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=MAX_TOKENS
        )
        assert answer.choices[0].text == expected.text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens


async def test_a_chat_turn_ends_by_itself_and_all_apis_say_the_same(
    client: openai.AsyncOpenAI, cluster: Cluster
) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    async with cluster.client(timeout_s=PATIENCE_S) as ours:
        expected = await ours.generate([ChatMessage(role="user", content=QUESTION)], temperature=0.0)
    assert "Paris" in expected.text
    assert expected.finish_reason == "stop"
    chat = await client.chat.completions.create(**asked, temperature=0)
    assert chat.choices[0].message.content == expected.text
    assert chat.choices[0].finish_reason == "stop"
    response = await client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert (response.output_text, response.status) == (expected.text, "completed")
    base_url = cluster.base_url.removesuffix("/v1")
    async with (
        anthropic.AsyncAnthropic(base_url=base_url, api_key="any", max_retries=0) as other,
        # More than the context has room for.
        other.messages.stream(**asked, max_tokens=32_000, extra_body={"temperature": 0}) as stream,
    ):
        assert await stream.get_final_text() == expected.text
