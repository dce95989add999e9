"""From OpenAI's fields to GenerateRequests: every field, every refusal."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from coordinator.entrypoints.openai.bodies import parsed
from coordinator.entrypoints.openai.chat import CHAT_NOT_SERVED, ChatRequest
from coordinator.entrypoints.openai.completion import COMPLETION_NOT_SERVED, CompletionRequest
from coordinator.entrypoints.openai.formats.table import TOOL_FORMATS, AnswerFormat
from coordinator.entrypoints.openai.tokenization import TokenizeRequest
from coordinator.request.inference_request import REQUEST_ID
from splitserve.errors import InvalidArgumentError
from splitserve.grammars.forms import check_grammar
from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.clients.openai_requests import KINDS, Made, documented, normalized

USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Now.",
        "parameters": {
            "type": "object",
            "$defs": {"City": {"type": "string"}},
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
        },
    },
}


def chat(**fields: Any) -> ChatRequest:
    return parsed(ChatRequest, json.dumps({"messages": [USER]} | fields).encode(), CHAT_NOT_SERVED)


def completion(**fields: Any) -> CompletionRequest:
    body = json.dumps({"prompt": "hi"} | fields).encode()
    return parsed(CompletionRequest, body, COMPLETION_NOT_SERVED)


def refusal(make: Any, **fields: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        make(**fields).generate_requests()
    return caught.value


def test_nothing_given_is_nothing_set() -> None:
    (request,) = chat().generate_requests()
    assert request.model == ""
    assert not request.sampling.HasField("temperature")
    assert not request.sampling.HasField("seed")
    assert not request.sampling.HasField("logprobs")
    assert not request.sampling.HasField("grammar")
    assert not request.stop.HasField("max_tokens")
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "hi")]


def test_null_is_not_given() -> None:
    names = [*ChatRequest.model_fields, "functions", "best_of"]
    nulls = {name: None for name in names if name != "messages"}
    assert chat(**nulls).generate_requests() == chat().generate_requests()


def test_every_sampling_field() -> None:
    fields = {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 2.0,
        "logit_bias": {"5": -100, "6": 3.5},
        "seed": 11,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
        "priority": -3,
        "ttft_ms": 500,
        "tpot_ms": 62.5,
        "n": 2,
        "bad_words": ["x", "y z"],
        "allowed_token_ids": [4, 8],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": -1,
        "return_token_ids": True,
    }
    for requests in (chat(**fields).generate_requests(), completion(**fields).generate_requests()):
        assert [request.sampling.seed for request in requests] == [11, 12]
        request = requests[0]
        sampling, stop = request.sampling, request.stop
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 2.0)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 1.5)
        assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(5, -100.0), (6, 3.5)]
        assert (list(stop.stop_strings), list(stop.stop_token_ids)) == (["a", "b"], [3])
        assert (stop.ignore_eos, stop.min_tokens, stop.max_tokens) == (True, 2, 9)
        assert (request.model, request.priority) == ("m", -3)
        assert (list(sampling.bad_words), list(sampling.allowed_token_ids)) == (["x", "y z"], [4, 8])
        assert (stop.keep_stop, stop.keep_special_tokens) == (True, True)
        assert (request.truncate_prompt_tokens, request.return_prompt_token_ids) == (-1, True)
        assert (request.ttft_ms, request.tpot_ms) == (500.0, 62.5)
    assert not chat().generate_requests()[0].HasField("ttft_ms")


def test_small_differences_in_form() -> None:
    assert chat(stop="x").generate_requests()[0].stop.stop_strings == ["x"]
    assert chat(top_k=-1).generate_requests()[0].sampling.top_k == 0
    assert chat(seed=-1).generate_requests()[0].sampling.seed == 2**64 - 1
    assert chat(max_tokens=5, max_completion_tokens=6).generate_requests()[0].stop.max_tokens == 6
    assert completion().generate_requests()[0].stop.max_tokens == 16
    assert chat(logprobs=True).generate_requests()[0].sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).generate_requests()[0].sampling.logprobs == 4
    assert completion(logprobs=3).generate_requests()[0].sampling.logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).generate_requests() == chat().generate_requests()


def test_fields_without_effect_on_the_answer_are_taken() -> None:
    fields = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "prediction": {"type": "content", "content": "x"},
        "unknown_field": None,
    }
    assert chat(**fields, verbosity="medium").generate_requests() == chat().generate_requests()
    assert completion(**fields).generate_requests() == completion().generate_requests()


def test_the_session_is_the_cache_key_first() -> None:
    assert chat(user="u", safety_identifier="s", prompt_cache_key="k").session_id == "k"
    assert chat(user="u", safety_identifier="s").session_id == "s"
    assert chat(user="u").session_id == "u"
    hashed = chat(user="jörg@example.org").session_id
    assert REQUEST_ID.match(hashed)
    assert hashed == chat(user="jörg@example.org").session_id != chat(user="other@example.org").session_id


STRUCTURAL_TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}


def test_messages() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = chat(
        messages=[
            {"role": "developer", "content": "brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"},
        ]
    ).generate_requests()[0]
    roles = [(turn.role, turn.content) for turn in turns.chat.messages]
    assert roles == [("developer", "brief"), ("user", "a\nb"), ("assistant", ""), ("tool", "7")]
    assert json.loads(turns.chat.messages[2].tool_calls_json) == [call]
    assert (turns.chat.messages[3].tool_call_id, turns.chat.messages[3].name) == ("c1", "f")


def test_all_forms_of_a_prompt() -> None:
    forms = ["a", ["a", "b"], [1, 2], [[1], [2, 3]]]
    shown = [
        [one.text or list(one.token_ids.ids) for one in completion(prompt=form).generate_requests()]
        for form in forms
    ]
    assert shown == [["a"], ["a", "b"], [[1, 2]], [[1], [2, 3]]]
    requests = completion(prompt=["a", "b"], n=2, seed=5).generate_requests()
    assert [(one.text, one.sampling.seed) for one in requests] == [("a", 5), ("a", 6), ("b", 5), ("b", 6)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**32): 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"1": None}}, "logit_bias.1"),
        ({"top_k": -2}, "top_k"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"user": 7}, "user"),
        ({"model": 7}, "model"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1, "stream": True}, "stream"),
        ({"priority": 10**12}, "priority"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": "5"}, "priority"),
        ({"priority": True}, "priority"),
        ({"ttft_ms": "fast"}, "ttft_ms"),
        ({"tpot_ms": True}, "tpot_ms"),
        ({"unknown_field": {"a": 1}}, "unknown_field"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"grammar": "start: x"}, "grammar"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<"]}}, "response_format.structures"),
        ({"response_format": {"type": "text", "triggers": ["<"]}}, "response_format.triggers"),
        ({"response_format": STRUCTURAL_TAG | {"triggers": ["["]}}, "response_format"),
        ({"response_format": STRUCTURAL_TAG | {"triggers": ["<f", "["]}}, "response_format"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag.structures"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 10**5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"guided_json": " " * 2**19}, "guided_json"),
        ({"guided_json": "[" + "1," * 10**5 + "1]"}, "guided_json"),
        ({"guided_json": True}, "guided_json"),
        ({"guided_regex": "a" * (2**18 + 1)}, "guided_regex"),
        ({"structured_outputs": {"grammar": "a" * (2**18 + 1)}}, "structured_outputs.grammar"),
        ({"guided_choice": ["a", "b" * 2**18]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}, "guided_regex": "a"}, "structured_outputs"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_grammar": ["a"]}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"json_object": True}}, "guided_regex"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["a", 1]}, "bad_words[1]"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [2**32]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        (
            {"skip_special_tokens": False, "spaces_between_special_tokens": False},
            "spaces_between_special_tokens",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strictly": True}}},
            "response_format.json_schema.strictly",
        ),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ],
)
def test_refusals_of_both(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields).field == param
    assert refusal(completion, **fields).field == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": 7}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[0].tool_calls[0].type",
        ),
        ({"reasoning_effort": "highest"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{}]}, "functions"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template": {}}, "chat_template"),
        ({"documents": [{}, "text"]}, "documents[1]"),
        ({"documents": {"a": 1}}, "documents"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ],
)
def test_refusals_of_chat(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields).field == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", [4]]}, "prompt"),
        ({"prompt": [[4], "a"]}, "prompt"),
        ({"prompt": ["a", 4]}, "prompt"),
        ({"prompt": [4, [4]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**32]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 600, "n": 2}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 600, "best_of": 2}, "prompt"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"echo": True, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_refusals_of_completions(fields: dict[str, Any], param: str) -> None:
    assert refusal(completion, **fields).field == param


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, 0),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 2}, 2),
        ({"logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"echo": True, "prompt_logprobs": 3}, 3),
        ({"echo": True}, None),
        ({"logprobs": 2}, None),
    ],
)
def test_log_probabilities_of_the_prompt_are_asked_for(fields: dict[str, Any], asked: int | None) -> None:
    (request,) = completion(**fields).generate_requests()
    given = request.sampling.prompt_logprobs if request.sampling.HasField("prompt_logprobs") else None
    assert given == asked
    assert request.stop.max_tokens == fields.get("max_tokens", 16)
    name = "logprobs" if "prompt_logprobs" not in fields else "prompt_logprobs"
    assert completion(**fields).names.http_name("sampling.prompt_logprobs") == name


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "m" * 2**20},
        {"stop": ["s" * 2**17] * 2},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"a": "b" * 2**18}},
            }
        },
    ],
)
def test_settings_are_not_copied_without_bound(settings: dict[str, Any]) -> None:
    few = completion(prompt=["x"] * 2, **settings).generate_requests()
    assert len(few) == 2
    many = completion(prompt=["x"] * 512, n=2, **settings)
    with pytest.raises(InvalidArgumentError, match=r"at most [0-9]+ answers") as caught:
        many.generate_requests()
    assert caught.value.field == "prompt"


def test_choices_differ_in_prompt_and_seed_only() -> None:
    form = {"type": "json_object"}
    asked = completion(prompt=["a", "b"], n=2, seed=2**64 - 1, response_format=form, prompt_logprobs=1)
    requests = asked.generate_requests()
    assert [one.text for one in requests] == ["a", "a", "b", "b"]
    assert [one.sampling.seed for one in requests] == [2**64 - 1, 0] * 2
    assert all(one.sampling.HasField("grammar") for one in requests)
    # The other choices of a prompt show what its first one gets.
    assert [one.sampling.HasField("prompt_logprobs") for one in requests] == [True, False] * 2
    (unseeded,) = completion(prompt="a").generate_requests()
    assert not unseeded.sampling.HasField("seed")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"messages": NaN}', b'{"a": "\\ud800"}']
)
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parsed(ChatRequest, body, CHAT_NOT_SERVED)
    assert caught.value.reason == "MALFORMED_JSON"


@pytest.mark.parametrize("number", ["1e400", "NaN", "Infinity", "-Infinity"])
def test_non_finite_numbers(number: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "temperature": %s}' % number.encode()
    with pytest.raises(InvalidArgumentError):
        parsed(ChatRequest, body, CHAT_NOT_SERVED).generate_requests()


def sent_for(request: ChatRequest | CompletionRequest) -> list[inference_pb2.GenerateRequest]:
    """What is asked of a model that writes calls as Hermes does."""
    if isinstance(request, CompletionRequest):
        return request.generate_requests()
    return request.generate_requests(request.grammar(AnswerFormat(TOOL_FORMATS["hermes"])))


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for make in (chat, completion):
        (request,) = sent_for(make(response_format=wanted))
        sent = json.loads(request.sampling.grammar.json_schema)
        assert sent == schema | {"x-guidance": {"lenient": False}}, "strict is told by the schema"
        (request,) = sent_for(make(response_format={"type": "json_object"}))
        assert request.sampling.grammar.json_object
        (request,) = sent_for(make(response_format={"type": "text"}))
        assert not request.sampling.HasField("grammar")
        (request,) = sent_for(make(response_format={"type": "json_object", "schema": {"properties": {}}}))
        assert json.loads(request.sampling.grammar.json_schema) == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("kind", "value", "grammar"),
    [
        ("json", {"type": "integer"}, {"json_schema": '{"type":"integer"}'}),
        ("json", '{"type": "integer"}', {"json_schema": '{"type":"integer"}'}),
        ("regex", "a|b", {"regex": "a|b"}),
        ("choice", ["a", 'b"'], {"lark": 'start: CHOICE\nCHOICE: "a" | "b\\""'}),
        ("grammar", 'start: "a"', {"lark": 'start: "a"'}),
    ],
)
def test_forms_of_answers(kind: str, value: Any, grammar: dict[str, str]) -> None:
    for make in (chat, completion):
        for fields in ({"structured_outputs": {kind: value}}, {f"guided_{kind}": value}):
            made = make(**fields)
            (request,) = sent_for(made)
            assert request.sampling.grammar == generation_pb2.Grammar(**grammar)
            name = next(iter(fields)) + (f".{kind}" if "structured_outputs" in fields else "")
            assert made.names.http_name(f"sampling.grammar.{next(iter(grammar))}") == name
    (request,) = sent_for(chat(structured_outputs={"json_object": True, "disable_fallback": False}))
    assert request.sampling.grammar.json_object


def test_best_of_asks_for_log_probabilities_of_more_answers() -> None:
    asked = completion(prompt=["a", "b"], best_of=3, n=2, seed=1)
    requests = asked.generate_requests()
    assert [one.sampling.seed for one in requests] == [1, 2, 3] * 2
    assert all(one.sampling.HasField("logprobs") for one in requests)
    assert (asked.choices, asked.kept_choices) == (3, 2)
    assert not completion(best_of=2, n=2).generate_requests()[0].sampling.HasField("logprobs")
    assert completion(add_special_tokens=False).generate_requests()[0].omit_special_tokens


def test_tools_go_to_the_template_as_they_are() -> None:
    odd = {"type": "function", "function": WEATHER["function"] | {"x-extra": 1}}
    (request,) = sent_for(chat(tools=[odd]))
    assert json.loads(request.chat.tools_json) == [odd]
    assert request.sampling.grammar.WhichOneof("kind") == "lark"
    check_grammar(request.sampling.grammar)
    (request,) = sent_for(chat(tools=[odd], tool_choice="none"))
    assert request.chat.tools_json == ""
    assert not request.sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, None),
        ({"chat_template_kwargs": {}, "documents": None, "chat_template": ""}, None),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "x": None}},
            {"enable_thinking": False, "x": None},
        ),
        (
            {"reasoning_effort": "high"},
            {"reasoning_effort": "high", "enable_thinking": True, "thinking": True},
        ),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False, "reasoning_effort": "x"}},
            {"reasoning_effort": "low", "thinking": False},
        ),
        ({"documents": [], "chat_template_kwargs": {"documents": [{}]}}, {"documents": []}),
    ],
)
def test_fields_that_become_variables_of_the_template(
    fields: dict[str, Any], variables: dict[str, Any] | None
) -> None:
    (request,) = chat(**fields).generate_requests()
    text = request.chat.template_kwargs_json
    assert (json.loads(text) if text else None) == variables
    assert not request.chat.HasField("add_generation_prompt")
    (request,) = chat(**fields, add_generation_prompt=False, continue_final_message=True).generate_requests()
    assert request.chat.HasField("add_generation_prompt")
    assert (request.chat.add_generation_prompt, request.chat.continue_final_message) == (False, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [USER]}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"prompt": "x", "tools": [WEATHER]}, "tools"),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [USER], "temperature": 1}, "temperature"),
    ],
)
def test_refusals_of_tokenize(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parsed(TokenizeRequest, json.dumps(fields).encode(), {})
    assert caught.value.field == param


def test_names_in_errors_are_those_of_the_request() -> None:
    names = chat(max_completion_tokens=5).names
    assert names.http_name("stop.max_tokens") == "max_completion_tokens"
    assert names.http_name("stop.stop_strings[2]") == "stop[2]"
    assert names.http_name("sampling.temperature") == "temperature"
    both: dict[str, Any] = {"allowed_token_ids": [97], "bad_words": ["a"]}
    for make in (chat, completion):
        assert make(**both).names.http_name("sampling.grammar") == "allowed_token_ids"
        assert make(bad_words=["a"]).names.http_name("sampling.grammar") == "bad_words"
    assert names.http_name("sampling.logprobs") == "top_logprobs"
    assert names.http_name("prompt.chat.messages[1].role") == "messages[1].role"
    assert names.http_name("prompt.chat") == "messages"
    assert names.http_name("prompt.chat.tools_json") == "tools"
    assert names.http_name("prompt.chat.chat_template") == "chat_template"
    assert names.http_name("prompt.chat.template_kwargs_json.tools") == "chat_template_kwargs.tools"
    assert names.http_name("prompt.chat.template_kwargs_json.documents") == "documents"
    formed = chat(response_format={"type": "json_object"}).names
    assert formed.http_name("sampling.grammar.json_schema") == "response_format.json_schema"
    now = {"type": "function", "function": {"name": "now"}}
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    named = chat(tools=[now, WEATHER], tool_choice=chosen).names
    wrong = InvalidArgumentError("sampling.grammar.lark: arguments_0.not: no", field="sampling.grammar.lark")
    assert named.reworded(wrong) == "tools: get_weather: tools[1].function.parameters.not: no"
    assert completion().names.http_name("prompt.token_ids") == "prompt"
    assert completion().names.http_name("sampling.logprobs") == "logprobs"


PUBLISHED = 400
"""Requests made from OpenAI's own definitions."""


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_published_request_is_served_or_refused_as_documented_and_no_field_is_lost(kind: type[Any]) -> None:
    refused, lost, served = set(), set(), 0
    for seed in range(PUBLISHED):
        made = Made(seed, kind)
        try:
            asked = what_is_asked(made.body)
        except InvalidArgumentError as error:
            refused.add(normalized(error.field))
            continue
        served += 1
        for leaf in range(made.leaves):
            other = Made(seed, kind, twist=leaf)
            with suppress(InvalidArgumentError):
                if other.body != made.body and what_is_asked(other.body) == asked:
                    lost.add(other.twisted)
    assert served > PUBLISHED // 4
    assert refused <= documented("Refused with 400")
    without_effect = documented("Accepted without effect")
    assert {field for field in lost if not any(name in field for name in without_effect)} <= OF_EQUAL_EFFECT
    assert lost


OF_EQUAL_EFFECT = {"user", "prompt_cache_key", "safety_identifier", "reasoning_effort"}
"""The first of the sessions that are given counts; the efforts "none" and "medium" are what the model does."""


def what_is_asked(body: dict[str, Any]) -> Any:
    """All that a request asks for, as far as it can change the answer."""
    if body.get("tool_choice") == "none":
        body = {name: value for name, value in body.items() if name not in ("tools", "parallel_tool_calls")}
    text = json.dumps(body).encode()
    if "prompt" in body:
        completion = parsed(CompletionRequest, text, COMPLETION_NOT_SERVED)
        return (
            completion.generate_requests(),
            bool(completion.stream),
            completion.include_usage,
            completion.echo,
        )
    chat = parsed(ChatRequest, text, CHAT_NOT_SERVED)
    return sent_for(chat), bool(chat.stream), chat.include_usage, chat.uses_tools, chat.must_call
