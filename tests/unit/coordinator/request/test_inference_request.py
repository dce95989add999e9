"""Every bound of a request, named by field."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.request.inference_request import (
    check_highest,
    check_length,
    check_names,
    check_prompt_form,
    check_request,
    find_model,
    resolved_sampling,
    resolved_stop,
    timeout_s,
)
from coordinator.workers.snapshot import Model
from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.generation.bounds import check_stop
from splitserve.v1 import generation_pb2, inference_pb2

MODEL = Model("m", "source", context_tokens=100, vocabulary_size=50)
NAN, INF = float("nan"), float("inf")


def check(**fields: Any) -> None:
    request = inference_pb2.GenerateRequest(**({"text": "hello"} | fields))
    check_names(request)
    check_request(request, MODEL)
    check_prompt_form(request, MODEL)


def refused(field: str, **fields: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        check(**fields)
    assert caught.value.field == field, caught.value.message
    return caught.value


HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("chat_template", {"messages": [HI], "chat_template": "x" * 32_769}),
        ("continue_final_message", {"messages": [HELLO, HI], "continue_final_message": True}),
        (
            "continue_final_message",
            {"messages": [HELLO], "continue_final_message": True, "add_generation_prompt": True},
        ),
        ("", {"messages": [HI], "template_kwargs_json": '{"a": "' + "x" * 12_800 + '"}'}),
        ("", {"messages": [HI | {"name": "x" * 6400}, HI | {"tool_call_id": "x" * 6400}]}),
    ],
)
def test_fields_of_the_template(field: str, fields: Any) -> None:
    refused("prompt.chat" + (field and f".{field}"), text=None, chat=inference_pb2.ChatMessages(**fields))


def test_a_final_message_that_goes_on() -> None:
    fields: Any = {"messages": [HI, HELLO], "continue_final_message": True, "add_generation_prompt": False}
    check(text=None, chat=inference_pb2.ChatMessages(**fields))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, 100.5, NAN, INF, -INF]),
        ("top_k", [2**31]),
        ("top_p", [-0.5, 1.1, NAN]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0.0, -1.0, 101.0, NAN, INF]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("logprobs", [21]),
    ],
)
def test_sampling_out_of_range(name: str, values: list[float]) -> None:
    for value in values:
        error = refused(f"sampling.{name}", sampling={name: value})
        assert f"sampling.{name} must be" in error.message


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 1.0, "min_p": 1.0, "top_k": 2**31 - 1},
        {"top_p": 1e-6, "repetition_penalty": 100.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "logprobs": 20},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"logit_bias": [{"token_id": n, "bias": 100.0} for n in range(50)]},
    ],
)
def test_sampling_in_range(sampling: dict[str, Any]) -> None:
    check(sampling=sampling)


def test_logit_bias() -> None:
    refused("sampling.logit_bias.token_id", sampling={"logit_bias": [{"token_id": 50}]})
    refused("sampling.logit_bias.bias", sampling={"logit_bias": [{"token_id": 1, "bias": 100.5}]})
    refused("sampling.logit_bias.bias", sampling={"logit_bias": [{"token_id": 1, "bias": NAN}]})
    refused("sampling.logit_bias", sampling={"logit_bias": [{"token_id": 1}, {"token_id": 1}]})
    refused("sampling.logit_bias", sampling={"logit_bias": [{"token_id": 1}] * 1025})


def test_stop() -> None:
    refused("stop.max_tokens", stop={"max_tokens": 0})
    refused("stop.max_tokens", stop={"max_tokens": 101})
    check(stop={"max_tokens": 0}, sampling={"prompt_logprobs": 0})
    refused("sampling.prompt_logprobs", sampling={"prompt_logprobs": 21})
    refused("stop.stop_strings", stop={"stop_strings": ["x"] * 17})
    refused("stop.stop_strings[1]", stop={"stop_strings": ["x", ""]})
    refused("stop.stop_strings[0]", stop={"stop_strings": ["x" * 257]})
    refused("stop.stop_token_ids", stop={"stop_token_ids": [1] * 65})
    refused("stop.stop_token_ids", stop={"stop_token_ids": [50]})
    check(stop={"max_tokens": 1, "stop_strings": ["ä" * 256] * 16, "stop_token_ids": [49] * 64})


def test_prompt_forms() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_prompt_form(inference_pb2.GenerateRequest(), MODEL)
    assert caught.value.field == "prompt"
    refused("prompt.text", text="")
    assert refused("prompt.text", text="x" * 12_801).reason == "PROMPT_TOO_LONG"
    refused("prompt.token_ids", token_ids={})
    assert refused("prompt.token_ids", token_ids={"ids": [1] * 100}).reason == "PROMPT_TOO_LONG"
    refused("prompt.chat.messages", chat={})
    refused("prompt.chat.messages", chat={"messages": [{"role": "user"}] * 4097})
    refused("prompt.chat.messages[1].role", chat={"messages": [{"role": "user"}, {"content": "x"}]})
    check(chat={"messages": [{"role": "user"}]})
    check(token_ids={"ids": [0, 49]})


def test_the_rest() -> None:
    refused("request_id", request_id="a b")
    refused("request_id", request_id="x" * 129)
    refused("request_id", request_id="x\n")
    refused("priority", priority=101)
    refused("priority", priority=-101)
    check(request_id="A-z.0_9" * 18, priority=-100)


def test_tokenized_prompts_name_both_numbers() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_length(120, "prompt.text", MODEL)
    assert "120" in caught.value.message
    assert "100" in caught.value.message
    with pytest.raises(InvalidArgumentError):
        check_length(0, "prompt.text", MODEL)
    check_length(99, "prompt.text", MODEL)


def test_token_ids_lie_within_the_vocabulary() -> None:
    check_highest(MODEL.vocabulary_size - 1, "prompt.token_ids", MODEL)
    with pytest.raises(InvalidArgumentError, match="token ids of"):
        check_highest(MODEL.vocabulary_size, "prompt.token_ids", MODEL)


def test_max_tokens_is_clamped_only_when_unset() -> None:
    stop = generation_pb2.StopParams()
    assert resolved_stop(stop, 90, MODEL).max_tokens == 10
    assert not stop.HasField("max_tokens")
    assert resolved_stop(generation_pb2.StopParams(max_tokens=10), 90, MODEL).max_tokens == 10
    with pytest.raises(InvalidArgumentError, match=r"1\.\.10, not 11") as caught:
        resolved_stop(generation_pb2.StopParams(max_tokens=11), 90, MODEL)
    assert caught.value.field == "stop.max_tokens"
    fitting = generation_pb2.StopParams(max_tokens=2**32 - 1, fit_max_tokens=True)
    check_stop(fitting, MODEL.vocabulary_size, MODEL.context_tokens)
    assert resolved_stop(fitting, 90, MODEL).max_tokens == 10
    with pytest.raises(InvalidArgumentError) as caught:
        resolved_stop(generation_pb2.StopParams(max_tokens=5, min_tokens=6), 90, MODEL)
    assert caught.value.field == "stop.min_tokens"


def test_sampling_defaults_are_filled_in() -> None:
    resolved = resolved_sampling(generation_pb2.SamplingParams(), seed=7)
    values = resolved.temperature, resolved.top_p, resolved.repetition_penalty, resolved.seed
    assert values == (1.0, 1.0, 1.0, 7)
    given = generation_pb2.SamplingParams(temperature=0.0, top_p=0.5, seed=0)
    resolved = resolved_sampling(given, seed=7)
    assert (resolved.temperature, resolved.top_p, resolved.seed) == (0.0, 0.5, 0)


def test_the_shortest_deadline_wins() -> None:
    request = inference_pb2.GenerateRequest
    assert timeout_s(request(), 600, None) == 600
    assert timeout_s(request(), 600, 30) == 30
    assert timeout_s(request(timeout={"seconds": 5}), 600, 30) == 5
    assert timeout_s(request(timeout={"seconds": 50}), 600, 30) == 30
    for bad in ({"seconds": 0}, {"seconds": -1}, {"seconds": 601}, {"seconds": 2**62}):
        with pytest.raises(InvalidArgumentError) as caught:
            timeout_s(request(timeout=bad), 600, None)
        assert caught.value.field == "timeout"


def test_models_are_found_by_name_or_by_being_alone() -> None:
    other = Model("o", "source", 10, 10)
    assert find_model("", {"m": MODEL}) is MODEL
    assert find_model("o", {"m": MODEL, "o": other}) is other
    for name, models in (("x", {"m": MODEL}), ("", {"m": MODEL, "o": other})):
        with pytest.raises(NotFoundError) as caught:
            find_model(name, models)
        assert (caught.value.reason, caught.value.field) == ("MODEL_NOT_FOUND", "model")
        assert "'m'" not in caught.value.message
