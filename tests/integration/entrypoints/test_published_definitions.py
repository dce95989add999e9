"""OpenAI's fields, ranges and nulls, and KServe's, through the doors: served, or refused by name."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, get_type_hints

import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from splitserve.kserve import open_inference_pb2 as pb
from splitserve.kserve.open_inference_pb2_grpc import GRPCInferenceServiceStub
from splitserve.rpc.channel import make_channel
from tests.integration.entrypoints.test_openai_http import CHAT, COMPLETIONS, HI, TEXT, serving
from tests.support.clients.openai_requests import KINDS, Made, documented, normalized

REQUIRED = {"messages", "model", "prompt"}
CHAT_FIELDS = set(get_type_hints(chat_params.CompletionCreateParamsBase)) - REQUIRED
COMPLETION_FIELDS = set(get_type_hints(CompletionCreateParamsBase)) - REQUIRED


async def test_every_field_of_openais_package_may_be_null() -> None:
    async with serving() as http:
        for path, body, fields in ((CHAT, HI, CHAT_FIELDS), (COMPLETIONS, TEXT, COMPLETION_FIELDS)):
            assert len(fields) > 10
            alone = (await http.post(path, body)).json()["choices"]
            nulls = body | dict.fromkeys(fields - {"max_tokens"})
            response = await http.post(path, nulls)
            assert response.status_code == 200, response.text
            assert response.json()["choices"] == alone


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"top_p": 0}),
        (COMPLETIONS, {"top_p": 0}),
        (CHAT, {"temperature": 2, "presence_penalty": -2, "frequency_penalty": 2}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 20}),
        (CHAT, {"seed": -(2**63)}),
        (CHAT, {"logit_bias": {"5": -100, "6": 100}}),
        (CHAT, {"n": 3, "stop": None}),
        (CHAT, {"stop": ["a", "b", "c", "d"]}),
        (CHAT, {"store": False, "metadata": {"a": "b"}, "service_tier": "auto"}),
        (CHAT, {"prediction": {"type": "content", "content": "w5"}, "modalities": ["text"]}),
        (CHAT, {"prompt_cache_retention": "24h", "reasoning_effort": "medium", "verbosity": "medium"}),
        (CHAT, {"response_format": {"type": "text"}, "tools": None, "tool_choice": "none"}),
        (COMPLETIONS, {"logprobs": 5, "best_of": 1, "echo": False}),
        (COMPLETIONS, {"suffix": None, "logprobs": 0}),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}),
    ],
)
async def test_what_the_definitions_allow_is_served(path: str, fields: dict[str, Any]) -> None:
    async with serving() as http:
        response = await http.post(path, (HI if path == CHAT else TEXT) | fields)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(("path", "kind"), [(CHAT, KINDS["chat"]), (COMPLETIONS, KINDS["completion"])])
async def test_requests_made_from_openais_package_are_served_or_refused_as_documented(
    path: str, kind: type[Any]
) -> None:
    refused = documented("Refused with 400")
    async with serving() as http:
        statuses = Counter[int]()
        for seed in range(150):
            body = Made(seed, kind).body
            response = await http.post(path, body)
            statuses[response.status_code] += 1
            if response.status_code == 200:
                assert '"error"' not in response.text
            else:
                assert response.status_code == 400, (body, response.text)
                assert normalized(response.json()["error"]["param"]) in refused, (body, response.text)
        assert statuses[200] > 30


async def test_top_p_0_is_the_likeliest_token_alone() -> None:
    async with serving() as http:
        await http.post(CHAT, HI | {"top_p": 0, "temperature": 2, "top_k": 50})
        sampling = http.cluster.prefills[0].calls.entries[-1].sampling
        assert (sampling.top_p, sampling.top_k) == (1.0, 1)


CALL = {"function": {"name": "f", "arguments": None}}
CALLS = [{"id": None, **CALL}, {"id": "c", "type": "function", **CALL}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "assistant", "content": "w1", "refusal": None, "annotations": [], "audio": None},
        {"role": "assistant", "content": "w1", "function_call": None, "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "refusal": "w7"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "w7"}]},
        {"role": "assistant", "content": "w1", "reasoning_content": "w2", "reasoning": "w3"},
        {"role": "tool", "content": [{"type": "text", "text": "w1"}], "tool_call_id": "c"},
        {"role": "developer", "content": "w1"},
    ],
)
async def test_messages_with_nulls_and_fields_of_answers_are_served(message: dict[str, Any]) -> None:
    async with serving() as http:
        response = await http.post(CHAT, HI | {"messages": [message, *HI["messages"]]})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "contents": "w1"}, "messages[1].contents"),
        ({"role": "user", "content": "w1", "image": "x"}, "messages[1].image"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "messages[1].function_call"),
        ({"role": "assistant", "content": "", "audio": {"id": "x"}}, "messages[1].audio"),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL | {"thought": "w1"}]},
            "messages[1].tool_calls[0].thought",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "argument": "{}"}}]},
            "messages[1].tool_calls[0].function.argument",
        ),
    ],
)
async def test_fields_of_messages_that_would_be_lost_are_refused_by_name(
    message: dict[str, Any], param: str
) -> None:
    async with serving() as http:
        error = await http.error(400, CHAT, HI | {"messages": [*HI["messages"], message]})
        assert (error["param"], error["code"]) == (param, "unsupported_field")
        assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"grammar": "start: x"}, "grammar"),
        ({"max_token": 5}, "max_token"),
        ({"stream_options": {"include_usages": True}, "stream": True}, "stream_options.include_usages"),
    ],
)
async def test_fields_that_would_be_lost_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with serving() as http:
        for path, body in ((CHAT, HI), (COMPLETIONS, TEXT)):
            error = await http.error(400, path, body | fields)
            assert (error["param"], error["code"]) == (param, "unsupported_field")


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": None, "top_k": None, "seed": None, "stop": None, "logit_bias": None},
        {"stop_words": [[""]], "max_tokens": 2},
        {"stop_words": [["w9", ""]]},
        {"stop": "", "min_length": None, "random_seed": None, "top_p": 0},
    ],
)
async def test_nulls_and_empty_stop_words_of_kserve(settings: dict[str, Any]) -> None:
    async with serving() as http, make_channel(http.cluster.address) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        request = pb.ModelInferRequest(model_name="words")
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(b"w1 w2")
        request.parameters["sampling_parameters"].string_param = json.dumps({"max_tokens": 3} | settings)
        response = await infer(request)
        assert response.outputs[0].name == "text_output"
        stops = list(http.cluster.prefills[0].calls.entries[-1].stop.stop_strings)
        assert stops == (["w9"] if "w9" in str(settings) else [])
        request.parameters["sampling_parameters"].string_param = json.dumps({"unknown": None})
        with pytest.raises(Exception, match=r"sampling_parameters\.unknown"):
            await infer(request)
