"""The Messages API: from its fields to a chat request, from an answer to its events, and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.entrypoints.anthropic.answers import MessageAnswer, StopSequences, error_body
from coordinator.entrypoints.anthropic.requests import NAMES, NOT_SERVED, MessagesRequest
from coordinator.entrypoints.http.exchange import HttpError, error_response
from coordinator.entrypoints.openai.bodies import parsed
from coordinator.entrypoints.openai.formats.table import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from splitserve.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SplitserveError,
    UnauthenticatedError,
    UnavailableError,
)
from splitserve.models.hf_tokenizer import ByteTokenizer
from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.clients.server_sent_events import typed_events

STOP, LENGTH = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH
USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}


def request(**fields: Any) -> MessagesRequest:
    body = json.dumps({"max_tokens": 9, "messages": [USER]} | fields).encode()
    return parsed(MessagesRequest, body, NOT_SERVED)


def generated(**fields: Any) -> inference_pb2.GenerateRequest:
    (made,) = request(**fields).chat_request().generate_requests()
    return made


def test_a_conversation() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Well."},
                USE,
                USE | {"id": "t2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "1", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "c"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "kind."},
    ]
    made = generated(messages=messages, system=system, tools=[TOOL]).chat.messages
    assert [(turn.role, turn.content) for turn in made] == [
        ("system", "Be\nkind."),
        ("user", "a\nb"),
        ("assistant", "Well."),
        ("tool", "1"),
        ("tool", "2"),
        ("user", "c"),
    ]
    assert json.loads(made[2].further_json) == {"reasoning_content": "Hm."}
    calls = json.loads(made[2].tool_calls_json)
    assert [(call["id"], json.loads(call["function"]["arguments"])) for call in calls] == [
        ("t1", {"city": "Rome"}),
        ("t2", {"city": "Rome"}),
    ]


def test_other_fields() -> None:
    made = generated(
        model="m",
        stop_sequences=["x"],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        tools=[TOOL | {"type": "custom", "description": "Now."}],
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        system="",
        service_tier="auto",
        context_management={"edits": []},
    )
    sampling, stop = made.sampling, made.stop
    assert (made.model, made.session_id, stop.max_tokens, list(stop.stop_strings)) == ("m", "u", 9, ["x"])
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    function = {"name": "weather", "description": "Now.", "parameters": CITY}
    assert json.loads(made.chat.tools_json) == [{"type": "function", "function": function}]
    assert json.loads(made.chat.template_kwargs_json) == {"enable_thinking": True, "thinking": True}
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert generated(messages=begun).chat.continue_final_message
    chat = request(output_config={"format": {"type": "json_schema", "schema": CITY}}).chat_request()
    grammar = chat.grammar(AnswerFormat())
    assert grammar is not None
    assert json.loads(grammar.json_schema) == CITY
    names = request(tools=[TOOL]).chat_request().names_as(NAMES, "input_schema")
    wrong = InvalidArgumentError("sampling.grammar.lark: arguments_0", field="sampling.grammar.lark")
    assert names.reworded(wrong) == "tools: weather: tools[0].input_schema"
    assert names.http_name("sampling.grammar.json_schema") == "output_config.format.schema"
    assert names.http_name("stop.stop_strings[0]") == "stop_sequences[0]"


@pytest.mark.parametrize(
    ("choice", "must_call", "uses_tools"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "weather"}, True, True),
        ({"type": "none"}, False, False),
    ],
)
def test_the_choice_of_tools(choice: dict[str, Any], must_call: bool, uses_tools: bool) -> None:
    chat = request(tools=[TOOL], tool_choice=choice).chat_request()
    assert (chat.must_call, chat.uses_tools) == (must_call, uses_tools)
    assert chat.parallel_tool_calls is not choice.get("disable_parallel_tool_use", False)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "required"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"messages": []}, "messages", ""),
        ({"messages": [USER] * 4097}, "messages", "4096"),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "messages[1].content", "at least 1"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages",
            "must end",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
            "image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": {}}]}]},
            "messages[0].content[0].type",
            "not served",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "text"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0]", "tool_use"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content",
            "image",
        ),
        ({"system": [{"type": "document"}]}, "system", "document"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice", "name"),
        ({"tool_choice": {"type": "tool", "name": "no"}, "tools": [TOOL]}, "tool_choice", "no tool"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "16"),
        ({"stop_sequences": "x"}, "stop_sequences", ""),
        ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens", ""),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "required"),
        ({"container": "c"}, "container", "not supported"),
        ({"n": 2}, "n", "not a field"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        request(**fields).chat_request()
    assert caught.value.field == field
    assert says in caught.value.message


def test_the_input_of_a_call_has_finite_numbers() -> None:
    message = {"role": "assistant", "content": [USE | {"input": {"day": 5}}]}
    body = json.dumps({"max_tokens": 9, "messages": [message]}).replace("5", "1e999").encode()
    with pytest.raises(InvalidArgumentError) as caught:
        parsed(MessagesRequest, body, NOT_SERVED)
    assert caught.value.field == "messages[0].content[0].input"


def answer(stops: StopSequences | None = None) -> MessageAnswer:
    known = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    return MessageAnswer("r1", "m", 9, stops, request(tools=[TOOL]).chat_request().parser(known))


def streamed(made: MessageAnswer, text: str, reason: Any = STOP, tokens: int = 9) -> list[dict[str, Any]]:
    usage = inference_pb2.Usage(prompt_tokens=5, completion_tokens=tokens, cached_prompt_tokens=4)
    data = made.begin(inference_pb2.GenerationStart(prompt_tokens=5))
    data += made.delta(generation_pb2.OutputDelta(text=text, token_ids=text.encode()))
    data += made.done(inference_pb2.GenerationDone(finish_reason=reason, usage=usage)) + made.end()
    return typed_events(data)


TEXT = '<think>Hm.</think>Well.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def test_the_events_of_an_answer() -> None:
    made = answer()
    shown = streamed(made, TEXT)
    start, delta, stop = (f"content_block_{name}" for name in ("start", "delta", "stop"))
    assert [event["type"] for event in shown] == [
        *("message_start", "ping"),
        *(start, delta, delta, stop),
        *(start, delta, stop),
        *(start, delta, stop),
        *("message_delta", "message_stop"),
    ]
    assert shown[0]["message"]["usage"] == {"input_tokens": 5, "output_tokens": 0}
    deltas = [event["delta"] for event in shown if event["type"] == delta]
    assert [each["type"] for each in deltas] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert [event["index"] for event in shown if event["type"] == start] == [0, 1, 2]
    message = json.loads(made.whole())
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "msg_r1"},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": message["content"][2]["id"], "name": "weather", "input": {"city": "Rome"}},
    ]
    usage = shown[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (1, 4, 9)
    assert usage == message["usage"]


CUT = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "day": "Mo'


@pytest.mark.parametrize(
    ("text", "reason", "tokens", "expected", "content"),
    [
        (TEXT, STOP, 9, "tool_use", None),
        ("Hi", STOP, 2, "end_turn", [{"type": "text", "text": "Hi"}]),
        ("Hi", LENGTH, 9, "max_tokens", [{"type": "text", "text": "Hi"}]),
        ("Hi", LENGTH, 8, "model_context_window_exceeded", [{"type": "text", "text": "Hi"}]),
        ("", STOP, 1, "end_turn", [{"type": "text", "text": ""}]),
        (CUT, LENGTH, 9, "max_tokens", {"city": "Rome"}),
    ],
)
def test_why_an_answer_ends(text: str, reason: Any, tokens: int, expected: str, content: Any) -> None:
    made = answer()
    shown = streamed(made, text, reason, tokens)
    assert shown[-2]["delta"] == {"stop_reason": expected, "stop_sequence": None}
    message = json.loads(made.whole())
    assert message["stop_reason"] == expected
    if isinstance(content, dict):
        assert message["content"][0]["input"] == content
    elif content is not None:
        assert message["content"] == content


@pytest.mark.parametrize(
    ("sequences", "said", "found"),
    [
        (["STOP", "END"], "Hello END", "END"),
        (["STOP", "END"], "Hello", None),
        (["ND!", "END!"], "x END!", "END!"),
        (["END"], "é" * 3000 + " END", "END"),
    ],
)
def test_the_stop_sequence_that_ended_the_answer(sequences: list[str], said: str, found: str | None) -> None:
    made = answer(StopSequences(sequences, ByteTokenizer(), keep_special=False))
    delta = streamed(made, said)[-2]["delta"]
    reason = "end_turn" if found is None else "stop_sequence"
    assert delta == {"stop_reason": reason, "stop_sequence": found}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidArgumentError("no", field="x"), 400, "invalid_request_error"),
        (UnauthenticatedError("no"), 401, "authentication_error"),
        (PermissionDeniedError("no"), 403, "permission_error"),
        (NotFoundError("no"), 404, "not_found_error"),
        (HttpError(413, "no", "BODY_TOO_LARGE"), 413, "request_too_large"),
        (ResourceExhaustedError("no"), 429, "rate_limit_error"),
        (SplitserveError("no"), 500, "api_error"),
        (UnavailableError("no"), 503, "overloaded_error"),
        (DeadlineExceededError("no"), 504, "timeout_error"),
    ],
)
def test_errors(error: SplitserveError, status: int, kind: str) -> None:
    response = error_response(error)
    expected = {"type": "error", "error": {"type": kind, "message": "no"}}
    assert (response.status, json.loads(error_body(response))) == (status, expected)
    event = answer().failed(response).decode()
    assert event == f"event: error\ndata: {error_body(response).decode()}\n\n"
