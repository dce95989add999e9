"""OpenAI's own client, Anthropic's, LangChain's and plain HTTP against a split pair with SmolLM2's first layers."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from splitserve.client import ChatMessage
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.chat_templates import with_template
from tests.support.clients.patient import PatientClient
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.reference import Reference
from tests.support.waiting import PATIENCE_S

MODEL = "smol"
QUESTION = "What is the name of the capital of France?"
PROMPTS = ["Once upon a time there was a", "The three primary colours are", "def fibonacci(n):"]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TOOLS_BLOCK = (
    "{% if tools %}<|im_start|>system\nYou may call these functions:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|im_end|>\n{% endif %}'
)
READ = (
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.name }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{{ c.id }}{% endfor %}{% endfor %}"
)
"""Fields that the template reads of messages."""
SWITCH = (
    "{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    "{% if add_generation_prompt and thinking %}<think>\n{% elif false %}</think>{% endif %}"
)
"""What a thinking model's template has at its end."""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def folder(short_smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model, with a chat template that knows tools."""
    return with_template(short_smollm2, tmp_path_factory.mktemp("model") / "m", TOOLS_BLOCK + "{}" + READ)


def pair_of(model: str, logs: Path) -> Cluster:
    options = ["--dtype", "float32", "--num-blocks", "400", "--served-model-name", MODEL]
    return Cluster(logs, model=model, engine="torch", worker_options=options, http=True)


@pytest.fixture(scope="module")
async def cluster(folder: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with running(pair_of(folder, tmp_path_factory.mktemp("logs"))) as ready:
        yield ready
        await ready.assert_no_leaks()


@pytest.fixture
async def thinking(short_smollm2: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """The same with a template that thinks. Where nothing stops it, a model without sense thinks on and on."""
    folder = with_template(short_smollm2, tmp_path / "m", "{}" + SWITCH)
    async with running(pair_of(folder, tmp_path)) as ready:
        yield ready
        await ready.assert_no_leaks()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def chain(cluster: Cluster) -> ChatOpenAI:
    key = SecretStr("any")
    return ChatOpenAI(
        base_url=cluster.base_url, api_key=key, model=MODEL, temperature=0.0, max_tokens=60, max_retries=0
    )


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.base_url, timeout=PATIENCE_S) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": QUESTION}]
    return await client.chat.completions.create(
        **({"model": MODEL, "messages": messages, "max_tokens": 24} | options)
    )


async def test_a_chat_answer(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client, temperature=0)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = await ask(client, temperature=0)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


async def test_a_streamed_chat_answer(client: openai.AsyncOpenAI) -> None:
    whole = await ask(client, temperature=0)
    stream = await ask(client, temperature=0, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_several_choices_are_reproducible_and_differ(client: openai.AsyncOpenAI) -> None:
    options = {"n": 3, "seed": 4, "temperature": 1.0, "max_tokens": 12}
    first, second = [await ask(client, **options) for _ in range(2)]
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3
    assert first.usage.completion_tokens > 12
    alone = await ask(client, **(options | {"n": 1, "seed": 5}))
    assert alone.choices[0].message.content == texts[1]


async def test_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2)
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    completion = await client.completions.create(
        model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=5, logprobs=1
    )
    shown = completion.choices[0].logprobs
    assert shown is not None
    assert "".join(shown.tokens or ()) == completion.choices[0].text
    assert (shown.text_offset or [])[0] == 0


async def test_log_probabilities_of_the_prompt(client: openai.AsyncOpenAI, folder: str) -> None:
    """The second time the prompt is cached; it has several chunks."""
    prompt = sentences(90, seed=3)
    token_ids = load_tokenizer(folder).encode(prompt)
    assert len(token_ids) > 512
    expected = Reference(folder).logprobs(token_ids)
    for asked, max_tokens in ((prompt, 0), (token_ids, 1), ([prompt], 3)):
        answer = await client.completions.create(
            model=MODEL, prompt=asked, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0
        )
        choice, shown = answer.choices[0], answer.choices[0].logprobs
        assert shown is not None
        assert shown.tokens is not None
        assert shown.token_logprobs is not None
        assert shown.top_logprobs is not None
        assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", max_tokens)
        assert "".join(shown.tokens) == choice.text
        assert len(shown.tokens) == len(token_ids) + max_tokens
        own = [expected[place, token_id].item() for place, token_id in enumerate(token_ids[1:])]
        assert shown.token_logprobs[0] is None
        assert shown.token_logprobs[1 : len(token_ids)] == pytest.approx(own, abs=1e-3)
        best = [max(top.values()) for top in shown.top_logprobs[1 : len(token_ids)]]
        assert best == pytest.approx(expected.amax(-1).tolist(), abs=1e-3)
        offsets = [len("".join(shown.tokens[:place])) for place in range(len(shown.tokens))]
        assert shown.text_offset == offsets


def test_log_probabilities_of_a_chat_prompt(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 1}
    chat = http.post("/chat/completions", json=body | {"max_tokens": 0}).json()
    assert not chat["choices"][0]["message"]["content"]
    assert chat["usage"]["completion_tokens"] == 0
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    for fields, param in (
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 0, "prompt_logprobs": None}, "max_tokens"),
        ({"min_tokens": 1, "max_tokens": 0}, "min_tokens"),
    ):
        refused = http.post("/chat/completions", json=body | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_prompts_in_every_form(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=PROMPTS, temperature=0, max_tokens=4, echo=True
    )
    for choice, prompt in zip(answer.choices, PROMPTS, strict=True):
        assert choice.text.startswith(prompt)
        assert len(choice.text) > len(prompt)
    ids = await client.completions.create(model=MODEL, prompt=[[504, 2281], [1]], max_tokens=3, temperature=0)
    assert [choice.index for choice in ids.choices] == [0, 1]


async def test_errors_are_typed(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await ask(client, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await ask(client, model="gpt-17")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await ask(client, messages=[{"role": "user", "content": "word " * 20000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="image_url"):
        await ask(
            client, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        )


async def test_a_stream_that_is_closed_early_ends_the_generation(
    client: openai.AsyncOpenAI, cluster: Cluster
) -> None:
    stream = await ask(client, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    async for _ in stream:
        break
    await stream.close()
    await cluster.assert_no_leaks()


def test_the_synchronous_client(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=cluster.base_url, api_key="any", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": QUESTION}]
        asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24}
        answer = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == answer.choices[0].message.content


async def test_json_that_follows_a_schema(client: openai.AsyncOpenAI) -> None:
    class City(BaseModel):
        name: str = Field(max_length=20)
        population: int = Field(ge=0, le=10**8)

    answer = await client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Paris as JSON"}],
        response_format=City,
        temperature=0,
        max_tokens=100,
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    free = await ask(client, response_format={"type": "json_object"}, max_tokens=60, temperature=0)
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_that_must_be(client: openai.AsyncOpenAI, choice: Any, sampling: Any) -> None:
    options = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
    options |= sampling
    answer = await ask(client, **options)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert not message.content
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    name = reason = ""
    pieces = []
    async for chunk in await ask(client, **options, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        for piece in chunk.choices[0].delta.tool_calls or ():
            name += piece.function.name or ""
            pieces += [piece.function.arguments] if piece.function.arguments else []
    assert (name, "".join(pieces), reason) == ("get_weather", call.function.arguments, "tool_calls")
    assert len(pieces) > 1, "the arguments came piece by piece"


async def test_a_call_that_must_be_over_the_other_apis(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    function = WEATHER["function"]
    flat: Any = {"type": "function", "strict": True} | function
    called = await client.responses.create(
        model=MODEL,
        input=QUESTION,
        temperature=0,
        tools=[flat],
        tool_choice="required",
        max_output_tokens=100,
    )
    assert json.loads(called.output[0].arguments)["city"] in ("Paris", "Rome")  # type: ignore[union-attr]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 100}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    base_url = cluster.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="any", max_retries=0) as other:
        used = await other.messages.create(
            **asked, tools=[tool], tool_choice=choice, extra_body={"temperature": 0}
        )
    assert used.stop_reason == "tool_use"
    assert used.content[0].input["city"] in ("Paris", "Rome")  # type: ignore[union-attr, index]


async def test_a_conversation_with_a_call_in_it(client: openai.AsyncOpenAI) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages = [
        {"role": "user", "content": "The weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
    ]
    answer = await ask(client, messages=messages, tools=[WEATHER], temperature=0, max_tokens=20)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_langchain_invokes_and_streams(chain: ChatOpenAI) -> None:
    answer = chain.invoke(QUESTION)
    assert answer.usage_metadata is not None
    assert "".join(str(chunk.content) for chunk in chain.stream(QUESTION)) == answer.content


def test_langchain_binds_tools(chain: ChatOpenAI) -> None:
    @tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        return f"Sunny in {city}."

    # Strict: without, further arguments are allowed, of which this model makes up many.
    options: Any = {"tool_choice": "get_weather", "parallel_tool_calls": False, "strict": True}
    bound = chain.bind_tools([get_weather], **options)
    answer = bound.invoke("The weather in Paris?")
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
    assert answer.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
async def test_a_call_that_is_cut_leaves_none_of_its_format_as_text(
    client: openai.AsyncOpenAI, max_tokens: int
) -> None:
    options = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": max_tokens}
    answer = await ask(client, **options)
    assert answer.choices[0].finish_reason == "length"
    assert not answer.choices[0].message.content
    text = ""
    async for chunk in await ask(client, **options, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == ""
    stopped = await ask(client, **options | {"max_tokens": 20}, stop=["call"])
    assert not stopped.choices[0].message.content


@pytest.mark.parametrize("cats", ["🐱🐱é漢字 abc def", "👩\u200d🚀 क्षि", "e\u0301𐍈 שָׁ", "𠀀𠀁ab𠀂"])
def test_offsets_of_a_completion_are_those_of_its_text(http: httpx.Client, cats: str) -> None:
    schema = {"name": "cats", "schema": {"const": cats}}
    body = {
        "prompt": "A",
        "temperature": 0,
        "max_tokens": 60,
        "logprobs": 5,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    (choice,) = http.post("/completions", json=body).json()["choices"]
    text, shown = choice["text"], choice["logprobs"]
    assert json.loads(text) == cats
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text.startswith(token, offset) or offset == len(text)
    assert any(token.startswith("bytes:\\x") for token in shown["tokens"])
    for top, token in zip(shown["top_logprobs"], shown["tokens"], strict=True):
        assert token in top
        assert not any("\ufffd" in key for key in top)
    assert sorted(shown["text_offset"]) == shown["text_offset"]
    assert shown["text_offset"][-1] <= len(text)
    streamed = http.post("/completions", json=body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert [at for piece in pieces if piece for at in piece["text_offset"]] == shown["text_offset"]


CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": None, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}],
}
LONG = "a name that takes some tokens"
LONGER = [
    ({"role": "assistant", "content": "Hm.", "reasoning_content": None}, {"reasoning_content": LONG}),
    ({"role": "assistant", "content": "Hm.", "thinking": None}, {"thinking": LONG}),
    ({"role": "user", "content": "Hm.", "name": None}, {"name": LONG}),
    ({"role": "tool", "content": "Hm.", "tool_call_id": "c"}, {"tool_call_id": LONG}),
    (CALLING, {"tool_calls": [CALLING["tool_calls"][0] | {"id": LONG}]}),  # type: ignore[index, operator]
]


@pytest.mark.parametrize(("message", "field"), LONGER, ids=",".join)
def test_fields_of_messages_reach_the_template(
    http: httpx.Client, message: dict[str, Any], field: dict[str, Any]
) -> None:
    user, counts = {"role": "user", "content": QUESTION}, []
    for each in (message, message | field):
        response = http.post("/chat/completions", json={"messages": [user, each, user], "max_tokens": 1})
        assert response.status_code == 200, response.text
        counts.append(response.json()["usage"]["prompt_tokens"])
    assert counts[1] > counts[0] + 4


def test_a_field_that_the_template_does_not_read_is_refused(http: httpx.Client) -> None:
    for field in ("contents", "thoughts", "images", "cache_control"):
        message = {"role": "user", "content": QUESTION, field: QUESTION}
        refused = http.post("/chat/completions", json={"messages": [message]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"messages[0].{field}")


USER = {"role": "user", "content": QUESTION}
THINKING: Any = {"chat_template_kwargs": {"thinking": True, "nobody_reads": 1}}


async def test_what_a_request_tells_the_template(thinking: Cluster) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        response = httpx.post(thinking.base_url + path, json=body, timeout=PATIENCE_S)
        assert response.status_code == 200, response.text
        return response.json()

    def answer(**fields: Any) -> tuple[dict[str, Any], int]:
        body = {"messages": [USER], "temperature": 0, "max_tokens": 12} | fields
        answered = post("/chat/completions", body)
        given = {name: value for name, value in body.items() if name not in ("temperature", "max_tokens")}
        counted = post("/../tokenize", given)
        usage, message = answered["usage"]["prompt_tokens"], answered["choices"][0]["message"]
        assert usage == counted["count"] == len(counted["tokens"])
        raw = {"prompt": counted["tokens"], "temperature": 0, "max_tokens": 12}
        said = post("/completions", raw)["choices"][0]["text"]
        assert said.strip() == (message["content"] or message["reasoning"]).strip()
        return message, usage

    plain, count = answer()
    assert (plain["reasoning"], bool(plain["content"])) == (None, True)
    for fields in (THINKING, {"reasoning_effort": "high"}):
        thought, longer = answer(**fields)
        assert (thought["content"], bool(thought["reasoning_content"])) == (None, True)
        assert longer > count
    async with PatientClient(thinking.target, timeout_s=PATIENCE_S) as ours:
        same = await ours.generate(
            [ChatMessage(role="user", content=QUESTION)], temperature=0.0, max_tokens=12, **THINKING
        )
    assert (same.usage.prompt_tokens, same.text.strip()) == (longer, thought["reasoning"])
    assert answer(add_generation_prompt=False)[1] < count
    assert answer(documents=[{"text": QUESTION}])[1] > count + 5
    begun = {"role": "assistant", "content": "The name of the capital of France is"}
    continued, longer = answer(messages=[USER, begun], continue_final_message=True)
    assert (bool(continued["content"]), longer > count) == (True, True)
    begun["content"] = "<think>The name of the capital of France is"
    continued, _ = answer(messages=[USER, begun], continue_final_message=True)
    assert (continued["content"], bool(continued["reasoning"])) == (None, True)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"chat_template": "{{ messages }}"}, "chat_template", "unsupported_field"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "unsupported_field"),
        ({"documents": [{"a": [{}] * 40_000}]}, None, "too_many_values"),
        ({"chat_template_kwargs": {"a": 1e999}}, None, "malformed_json"),
        ({"chat_template_kwargs": {"a": "x" * 2_000_000}}, "messages", "context_length_exceeded"),
        ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_value",
        ),
    ],
)
def test_what_no_template_gets(http: httpx.Client, fields: dict[str, Any], param: str, code: str) -> None:
    for path in ("/chat/completions", "../tokenize"):
        body = json.dumps({"messages": [USER]} | fields)
        refused = http.post(path, content=body, headers={"content-type": "application/json"})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, param, code), error


def test_tokens_and_their_text(http: httpx.Client) -> None:
    asked = {"prompt": " Grüße <|im_end|>", "return_token_strs": True, "add_special_tokens": False}
    answer = http.post("../tokenize", json=asked).json()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 8192)
    assert answer["token_strs"][-1] == "<|im_end|>"
    assert answer["token_strs"][0].startswith("Ġ")
    text = http.post("../detokenize", json={"tokens": answer["tokens"]}).json()
    assert text == {"prompt": asked["prompt"]}
    whole = http.post("../tokenize", json={"prompt": "The cat sat. " * 20_000}).json()
    assert whole["count"] > whole["max_model_len"], "a prompt that is too long is counted all the same"
    for path, body, param in (
        ("../detokenize", {"tokens": [10**9]}, "tokens"),
        ("../detokenize", {"tokens": [0, 2**40]}, "tokens[1]"),
        ("../detokenize", {"tokens": "x"}, "tokens"),
        ("../tokenize", {"prompt": ""}, "prompt"),
        ("../tokenize", {"prompt": "x", "model": "other"}, "model"),
    ):
        refused = http.post(path, json=body)
        assert (refused.status_code in (400, 404), refused.json()["error"]["param"]) == (True, param)


def answered(http: httpx.Client, path: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The text of an answer, which must be that of its stream, and the whole response."""
    prompt = (
        {"prompt": PROMPTS[0]}
        if path == "/completions"
        else {"messages": [{"role": "user", "content": QUESTION}]}
    )
    body = {"temperature": 0, "max_tokens": 20} | prompt | fields
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    whole = response.json()
    choice = whole["choices"][0]
    text = choice["text"] if path == "/completions" else choice["message"]["content"]
    lines = http.post(path, json=body | {"stream": True}).text.split("\n\n")
    events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    events = [event for event in events if event["index"] == 0]
    streamed = [one["text"] if path == "/completions" else one["delta"].get("content", "") for one in events]
    assert "".join(streamed) == text
    ids = [token for one in events for token in one.get("token_ids") or ()]
    assert ids == choice.get("token_ids", [])
    return text, whole


AN_OBJECT = {"type": "json_object", "schema": {"required": ["a"]}}
PATHS = ["/completions", "/chat/completions"]


@pytest.mark.parametrize("path", PATHS)
def test_answers_of_any_form(http: httpx.Client, path: str) -> None:
    for fields, pattern in (
        ({"guided_choice": ["red", "reddish brown"]}, "red|reddish brown"),
        ({"structured_outputs": {"choice": ["\u00e9\U0001f600", "é!"]}}, "é\U0001f600|é!"),
        ({"structured_outputs": {"regex": "[0-9]{3}/[ab]"}}, "[0-9]{3}/[ab]"),
        ({"guided_grammar": 'start: "The " NUMBER\nNUMBER: /[0-9]{2}/'}, "The [0-9]{2}"),
        ({"guided_json": {"enum": ["a", 7]}}, '"a"|7'),
        (
            {"response_format": AN_OBJECT, "stop": ":", "bad_words": ["<"]},  # "<" would begin its reasoning
            r'\{\s*"a"\s*',
        ),
    ):
        text, _ = answered(http, path, **fields)
        assert re.fullmatch(pattern, text), (fields, text)
    for fields, param in (
        ({"guided_regex": "((("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: ]["}}, "structured_outputs.grammar"),
        ({"guided_json": {"type": "objekt"}}, "guided_json"),
        ({"bad_words": [" "]}, "bad_words[0]"),
        ({"bad_words": ["word " * 51] * 21}, "bad_words"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ):
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        del body["messages" if path == "/completions" else "prompt"]
        refused = http.post(path, json=body | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


@pytest.mark.parametrize("path", PATHS)
def test_tokens_that_may_and_must_not_come(http: httpx.Client, path: str) -> None:
    free, whole = answered(http, path, return_token_ids=True)
    ids = whole["choices"][0]["token_ids"]
    prompt_ids = (whole if path == "/chat/completions" else whole["choices"][0])["prompt_token_ids"]
    assert len(prompt_ids) == whole["usage"]["prompt_tokens"]
    words = [word for word in re.findall(r"\w+", free) if len(word) > 2][:6]
    other, _ = answered(http, path, bad_words=words)
    assert not set(re.findall(r"\w+", other)) & set(words), (words, other)
    _, whole = answered(http, path, allowed_token_ids=ids[:2], return_token_ids=True, n=2, ignore_eos=True)
    for choice in whole["choices"]:
        assert set(choice["token_ids"]) <= set(ids[:2])
    # The last token of the free answer is the end of the turn in a chat.
    cut, _ = answered(http, path, stop_token_ids=ids[3:4], skip_special_tokens=False)
    kept, _ = answered(http, path, stop_token_ids=ids[3:4], include_stop_str_in_output=True)
    assert (cut, kept) == (free[: len(cut)], free[: len(kept)])
    assert len(kept) > len(cut)
    stopped, _ = answered(http, path, stop=free[4:9], include_stop_str_in_output=True)
    assert stopped == free[:9]
    last, whole = answered(http, path, truncate_prompt_tokens=5, return_token_ids=True, max_tokens=1)
    assert whole["usage"]["prompt_tokens"] == 5
    again = http.post(
        "/completions", json={"prompt": prompt_ids[-5:], "temperature": 0, "max_tokens": 1}
    ).json()
    assert again["choices"][0]["text"] == last


def test_special_tokens_in_the_text(http: httpx.Client) -> None:
    forced = {"logit_bias": {"2": 100}, "ignore_eos": True, "max_tokens": 2, "logprobs": 0}
    text, whole = answered(http, "/completions", skip_special_tokens=False, **forced)
    assert text == "<|im_end|>" * 2
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 10]
    text, whole = answered(http, "/completions", return_tokens_as_token_ids=True, **forced)
    assert (text, whole["choices"][0]["logprobs"]["tokens"]) == ("", ["token_id:2"] * 2)
    ended, _ = answered(
        http,
        "/completions",
        logit_bias={"2": 100},
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    assert ended == "<|im_end|>"


def test_the_best_answers_are_returned(http: httpx.Client) -> None:
    body = {"prompt": PROMPTS[:2], "seed": 3, "max_tokens": 6, "logprobs": 0}
    every = http.post("/completions", json=body | {"n": 4}).json()["choices"]
    best = http.post("/completions", json=body | {"n": 2, "best_of": 4, "logprobs": None}).json()

    def mean(choice: Any) -> float:
        found = choice["logprobs"]["token_logprobs"]
        return float(sum(found) / len(found))

    ranked = [sorted(every[start : start + 4], key=mean, reverse=True)[:2] for start in (0, 4)]
    expected = [choice["text"] for group in ranked for choice in group]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [(choice["index"], choice["logprobs"]) for choice in best["choices"]] == [
        (n, None) for n in range(4)
    ]
    assert best["usage"]["completion_tokens"] >= 8 * 4


def test_token_counts_in_each_event(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, prompt in (
        ("/completions", {"prompt": "Once"}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        body = prompt | {
            "max_tokens": 5,
            "n": 2,
            "stream": True,
            "stream_options": options,
            "ignore_eos": True,
        }
        events = [
            json.loads(line[6:])
            for line in http.post(path, json=body).text.split("\n\n")
            if line.startswith("data: {")
        ]
        last = events.pop()["usage"]
        for index in (0, 1):
            counts = [event["usage"] for event in events if event["choices"][0]["index"] == index]
            assert {count["prompt_tokens"] for count in counts} == {last["prompt_tokens"]}
            assert [count["completion_tokens"] for count in counts] == sorted(
                count["completion_tokens"] for count in counts
            )
            assert counts[-1]["completion_tokens"] == 5
        assert last["completion_tokens"] == 10
