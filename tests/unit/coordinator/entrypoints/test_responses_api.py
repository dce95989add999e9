"""The Responses API: from its fields to a chat request, from an answer to its events, and what is kept of it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from coordinator.entrypoints.http.exchange import error_response
from coordinator.entrypoints.openai.bodies import parsed
from coordinator.entrypoints.openai.formats.table import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from coordinator.entrypoints.responses import store
from coordinator.entrypoints.responses.answers import ResponseAnswer
from coordinator.entrypoints.responses.endpoints import continued
from coordinator.entrypoints.responses.requests import NAMES, NOT_SERVED, InputItem, ResponsesRequest
from coordinator.entrypoints.responses.store import ResponseStore, StoredResponse
from splitserve.errors import InvalidArgumentError, NotFoundError, UnavailableError
from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.clients.server_sent_events import typed_events

STOP, LENGTH = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": CITY}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}", "id": "fc_1"}


def request(**fields: Any) -> ResponsesRequest:
    return parsed(ResponsesRequest, json.dumps({"input": "hi"} | fields).encode(), NOT_SERVED)


def generated(**fields: Any) -> inference_pb2.GenerateRequest:
    (made,) = request(**fields).chat_request([]).generate_requests()
    return made


def turns(**fields: Any) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in generated(**fields).chat.messages]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("user", "hi")]),
        ({"instructions": "Be kind."}, [("system", "Be kind."), ("user", "hi")]),
        (
            {
                "instructions": "Be kind.",
                "input": [
                    {"role": "developer", "content": "Be brief."},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"role": "user", "content": "b", "id": None, "index": 0},
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "c", "annotations": []}],
                    },
                ],
            },
            [("system", "Be kind.\nBe brief."), ("user", "a\nb"), ("assistant", "c")],
        ),
    ],
)
def test_messages(fields: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert turns(**fields) == expected


def test_what_the_assistant_says_in_a_row_is_one_message() -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "Well."},
        CALL,
        CALL | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
    ]
    _, said, *results = generated(input=items, tools=[TOOL]).chat.messages
    assert (said.role, said.content) == ("assistant", "Well.")
    assert json.loads(said.further_json) == {"reasoning_content": "s\nt"}
    assert [call["id"] for call in json.loads(said.tool_calls_json)] == ["c1", "c2"]
    assert [(turn.role, turn.content, turn.tool_call_id) for turn in results] == [
        ("tool", "1", "c1"),
        ("tool", "2", "c2"),
    ]


def test_other_fields() -> None:
    made = generated(
        model="m",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.25,
        tools=[TOOL | {"strict": None}],
        tool_choice="auto",
        prompt_cache_key="k",
        text={"format": {"type": "json_schema", "name": "n", "schema": CITY}},
        metadata={"a": "b"},
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        background=False,
        top_logprobs=0,
        service_tier="auto",
        client_metadata={"x": "y"},
        instructions="",
        reasoning={"effort": "high", "summary": "auto"},
    )
    assert json.loads(made.chat.template_kwargs_json)["reasoning_effort"] == "high"
    assert (made.model, made.stop.max_tokens, made.session_id) == ("m", 9, "k")
    assert (made.sampling.temperature, made.sampling.top_p) == (0.5, 0.25)
    (tool,) = json.loads(made.chat.tools_json)
    assert (tool["type"], tool["function"]["name"], tool["function"]["parameters"]) == (
        "function",
        "weather",
        CITY,
    )
    chat = request(tools=[TOOL], tool_choice={"type": "function", "name": "weather"}).chat_request([])
    assert chat.must_call
    assert (
        chat.names_as(NAMES, "parameters").http_name("sampling.grammar.json_schema") == "text.format.schema"
    )
    assert (
        chat.names_as(NAMES, "parameters").reworded(
            InvalidArgumentError("sampling.grammar.lark: arguments_0 is wrong", field="sampling.grammar.lark")
        )
        == "tools: weather: tools[0].parameters is wrong"
    )
    assert (
        request().chat_request([]).generate_requests()
        == request(text={}, tools=[]).chat_request([]).generate_requests()
    )


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"input": []}, "input", "say something"),
        ({"input": 5}, "input", ""),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, "input", "4096"),
        ({"input": [5]}, "input[0]", ""),
        ({"input": [{"role": "user"}]}, "input[0]", "content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", ""),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]", "call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [{"type": ["x"]}]}, "input[0].type", "not served"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content",
            "input_image",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "custom"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name", ""),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "function", "name": "no"}, "tools": [TOOL]}, "tool_choice", "no tool"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]", "logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "json_schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", ""),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata", "16"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "64"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "512"),
        ({"prompt_cache_key": "k" * 513}, "prompt_cache_key", "512"),
        ({"user": "u" * 513}, "user", "512"),
        ({"n": 2}, "n", "not a field"),
        ({"max_output_tokens": "9"}, "max_output_tokens", ""),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        request(**fields).chat_request([])
    assert caught.value.field == field
    assert says in caught.value.message


def answer(**fields: Any) -> ResponseAnswer:
    chat = request(tools=[TOOL]).chat_request([])
    known = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    return ResponseAnswer("r1", 7, "m", request(tools=[TOOL], **fields).shown(), chat.parser(known))


def streamed(made: ResponseAnswer, pieces: list[str], reason: Any = STOP) -> list[dict[str, Any]]:
    data = made.begin(inference_pb2.GenerationStart(prompt_tokens=5))
    data += b"".join(made.delta(generation_pb2.OutputDelta(text=piece)) for piece in pieces)
    usage = inference_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_prompt_tokens=4)
    made.done(inference_pb2.GenerationDone(finish_reason=reason, usage=usage))
    shown = typed_events(data + made.end())
    assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
    return shown


TEXT = '<think>Hm.</think>Well.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def test_the_events_of_an_answer() -> None:
    made = answer(instructions="Be kind.", metadata={"a": "b"})
    shown = streamed(made, [TEXT])
    place, text = ["response.output_item.added", "response.content_part.added"], "response.output_text"
    ends = ["response.content_part.done", "response.output_item.done"]
    thought, call = "response.reasoning_text", "response.function_call_arguments"
    assert [event["type"] for event in shown] == [
        *("response.created", "response.in_progress"),
        *(*place, f"{thought}.delta", f"{thought}.done", *ends),
        *(*place, f"{text}.delta", f"{text}.done", *ends),
        *(place[0], f"{call}.delta", f"{call}.done", ends[1]),
        "response.completed",
    ]
    whole = json.loads(made.whole())
    assert shown[-1]["response"] == whole
    assert whole["output"] == [event["item"] for event in shown if event["type"] == ends[1]]
    thinking, message, calling = whole["output"]
    assert thinking["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"] == [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}]
    assert (calling["name"], json.loads(calling["arguments"])) == ("weather", {"city": "Rome"})
    assert (whole["status"], whole["instructions"], whole["metadata"]) == (
        "completed",
        "Be kind.",
        {"a": "b"},
    )
    assert whole["model"] == "m"
    assert (whole["tools"], whole["text"]) == ([TOOL], {"format": {"type": "text"}})
    assert (whole["usage"]["total_tokens"], whole["usage"]["input_tokens_details"]["cached_tokens"]) == (8, 4)
    assert (shown[0]["response"]["status"], shown[0]["response"]["output"]) == ("in_progress", [])


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_whole_answer_does_not_depend_on_the_pieces(size: int) -> None:
    made = answer()
    streamed(made, [TEXT[start : start + size] for start in range(0, len(TEXT), size)])
    once = answer()
    streamed(once, [TEXT])

    def contents(of: ResponseAnswer) -> list[Any]:
        return [item.get("content", item.get("arguments")) for item in json.loads(of.whole())["output"]]

    assert contents(made) == contents(once)


def test_a_cut_answer_is_incomplete() -> None:
    shown = streamed(answer(), ["<think>Hm"], LENGTH)
    response = shown[-1]["response"]
    assert (shown[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]


def test_an_empty_answer_is_an_empty_message() -> None:
    (item,) = streamed(answer(), [""])[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""


def test_a_failure_in_a_stream() -> None:
    made = answer()
    made.delta(generation_pb2.OutputDelta(text="Well."))
    error, failed = typed_events(made.failed(error_response(UnavailableError("gone", reason="NO_WORKER"))))
    assert (error["type"], error["code"], error["message"]) == ("error", "no_worker", "gone")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert failed["sequence_number"] == error["sequence_number"] + 1


def test_a_stored_answer_is_continued() -> None:
    made = answer()
    streamed(made, [TEXT])
    stored = made.stored('{"role":"user","content":"hi"}')
    assert stored.whole == made.whole()
    earlier = [InputItem.model_validate(item) for item in json.loads(stored.items)]
    chat = request(input=[{"type": "function_call_output", "call_id": "c", "output": "Sun."}]).chat_request(
        earlier
    )
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]
    assert chat.messages[1].content == "Well."


def test_what_a_continued_request_keeps() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    items, _ = continued(b"[]", request(input=[{"role": "user", "content": "hi"}, thought]))
    assert [item.keys() & {"content", "summary"} for item in json.loads(f"[{items}]")] == [{"content"}] * 2
    with pytest.raises(InvalidArgumentError, match="more than 32768 objects") as caught:
        continued(b"[" + b"{}," * 2**15 + b"{}]", request())
    assert caught.value.field == "previous_response_id"


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_RESPONSES", 3)
    monkeypatch.setattr(store, "TENANT_BYTES", 100)
    monkeypatch.setattr(store, "STORE_BYTES", 150)
    kept = ResponseStore()

    def has(tenant: str, *ids: str) -> list[bool]:
        found = []
        for response_id in ids:
            with suppress(NotFoundError):
                kept.get(tenant, response_id)
                found.append(response_id)
        return [response_id in found for response_id in ids]

    def add(tenant: str, response_id: str, size: int) -> None:
        kept.add(tenant, response_id, StoredResponse(b"x" * (size - 1), b"y"))

    for response_id in "abc":
        add("one", response_id, 10)
    assert has("one", "b", "c", "a") == [True] * 3
    add("one", "d", 10)  # the one that was used longest ago makes room
    assert has("one", "a", "b", "c", "d") == [True, False, True, True]
    assert has("two", "a") == [False]
    add("one", "big", 95)
    assert has("one", "a", "c", "d", "big") == [False, False, False, True]
    add("one", "huge", 101)
    add("one", "big", 90)  # replaces
    add("two", "a", 50)
    add("two", "b", 20)  # more than all may have: the largest tenant loses
    assert has("one", "big", "huge") == [False, False]
    assert has("two", "a", "b") == [True, True]
    kept.delete("two", "a")
    assert has("two", "a") == [False]
    with pytest.raises(NotFoundError) as missing:
        kept.delete("two", "a")
    assert (missing.value.field, missing.value.reason) == ("response_id", "RESPONSE_NOT_FOUND")
