"""vLLM's gRPC contract: requests and answers, translated."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2, inference_pb2

pytest.importorskip("smg_grpc_proto", reason="needs the extra vllm-grpc")
from smg_grpc_proto import vllm_engine_pb2 as pb

from coordinator.entrypoints.vllm.messages import VllmResponses, read_request

IDS = pb.TokenizedInput(input_ids=[1, 2, 3])


def asked(**params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="r-1", tokenized=IDS, sampling_params=pb.SamplingParams(**params))


def test_a_request_with_everything() -> None:
    params: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 5,
        "min_p": 0.25,
        "frequency_penalty": 0.5,
        "max_tokens": 7,
        "min_tokens": 2,
        "stop": ["end"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "n": 1,
        "logprobs": 0,
        "seed": 4,
        "logit_bias": {3: 1.5},
        "include_stop_str_in_output": True,
        "regex": "a+",
    }
    generate = read_request(asked(**params))
    assert (generate.request_id, list(generate.token_ids.ids)) == ("r-1", [1, 2, 3])
    sampling, stop = generate.sampling, generate.stop
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.logprobs) == (0.0, 5, 4, 0)
    assert (sampling.min_p, sampling.frequency_penalty) == (0.25, 0.5)
    assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(3, 1.5)]
    assert sampling.grammar.regex == "a+"
    assert (stop.max_tokens, stop.min_tokens, list(stop.stop_strings)) == (7, 2, ["end"])
    assert (list(stop.stop_token_ids), stop.ignore_eos, stop.keep_special_tokens) == ([9], True, True)


def test_what_is_not_given_has_our_defaults() -> None:
    generate = read_request(pb.GenerateRequest(text="a", request_id="not ours/allowed"))
    assert (generate.text, generate.request_id) == ("a", "")
    for optional in ("temperature", "top_p", "repetition_penalty", "seed", "logprobs", "grammar"):
        assert not generate.sampling.HasField(optional)
    assert not generate.stop.HasField("max_tokens")


@pytest.mark.parametrize(
    ("params", "kind", "text"),
    [
        ({"json_schema": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"json_object": True}, "json_object", True),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"choice": {"choices": ["a b", 'c"\n']}}, "lark", 'start: CHOICE\nCHOICE: "a b" | "c\\"\\n"'),
    ],
)
def test_forms_of_answers(params: dict[str, Any], kind: str, text: Any) -> None:
    grammar = read_request(asked(**params)).sampling.grammar
    assert (grammar.WhichOneof("kind"), getattr(grammar, kind)) == (kind, text)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids"),
        (pb.GenerateRequest(text="a", request_id="x" * 1025), "request_id"),
        (pb.GenerateRequest(text="a", mm_inputs=pb.MultimodalInputs(mm_hashes=["a"])), "mm_inputs"),
        (pb.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (pb.GenerateRequest(text="a", media_refs=pb.MediaRefs()), "media_refs"),
        (asked(n=2), "sampling_params.n"),
        (asked(prompt_logprobs=1), "sampling_params.prompt_logprobs"),
        (asked(truncate_prompt_tokens=5), "sampling_params.truncate_prompt_tokens"),
        (asked(structural_tag="{}"), "sampling_params.structural_tag"),
        (asked(choice={}), "sampling_params.choice"),
        (asked(choice={"choices": ["a"] * 1025}), "sampling_params.choice"),
        (asked(logprobs=-1), "sampling_params.logprobs"),
        (asked(seed=-1), "sampling_params.seed"),
        (asked(temperature=float("nan")), "sampling_params.temperature"),
        (asked(max_tokens=0), "sampling_params.max_tokens"),
        (asked(logit_bias={-1: 1.0}), "sampling_params.logit_bias.token_id"),
        (asked(stop=["x"] * 17), "sampling_params.stop"),
        (asked(json_schema="no"), "sampling_params.json_schema"),
    ],
)
def test_what_is_refused_names_its_field(request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_request(request_)
    assert caught.value.field == field
    assert field in caught.value.message


def delta(ids: list[int]) -> generation_pb2.OutputDelta:
    top = [generation_pb2.TopLogprob(token_id=8, logprob=-0.5)]
    logprobs = [generation_pb2.TokenLogprob(token_id=token, logprob=-1.0, top=top) for token in ids]
    return generation_pb2.OutputDelta(token_ids=ids, logprobs=logprobs)


@pytest.mark.parametrize("stream", [True, False])
def test_answers(stream: bool) -> None:
    request = asked(stop_token_ids=[7])
    request.stream = stream
    responses = VllmResponses(request)
    chunks = [responses.chunk(delta([4, 5]), 3), responses.chunk(delta([6, 7]))]
    usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=4, cached_prompt_tokens=2)
    done = inference_pb2.GenerationDone(finish_reason=generation_pb2.FINISH_REASON_STOP, usage=usage)
    complete = responses.complete(done).complete
    if stream:
        assert [list(one.chunk.token_ids) for one in chunks if one] == [[4, 5], [6, 7]]
        assert all(one.chunk.prompt_tokens == 3 and one.chunk.completion_tokens == 2 for one in chunks if one)
    else:
        assert chunks == [None, None]
    expected = [6, 7] if stream else [4, 5, 6, 7]
    assert list(complete.output_ids) == list(complete.output_logprobs.token_ids) == expected
    assert [list(top.token_ids) for top in complete.output_logprobs.top_logprobs] == [[8]] * len(expected)
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", 7)
    assert (complete.prompt_tokens, complete.cached_tokens) == (3, 2)
