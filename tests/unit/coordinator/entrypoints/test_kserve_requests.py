"""Requests of the Open Inference Protocol: tensors, settings and what they become."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from coordinator.entrypoints.kserve.requests import ParsedRequest, read_request
from coordinator.entrypoints.kserve.responses import Responses, failure
from coordinator.entrypoints.kserve.tensors import Tensor, add_output, read_inputs
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.generation.output_delta import TokenDelta
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.v1 import generation_pb2, inference_pb2

DUMP = """
import json
import re
from google.protobuf.descriptor_pool import Default
from tritonclient.grpc import service_pb2
def dump(message):
    fields = {f.name: [f.number, f.type, f.is_repeated, f.message_type.full_name if f.message_type else ""]
              for f in message.fields}
    found = {message.full_name: fields}
    for nested in message.nested_types:
        found |= dump(nested)
    return found
found = {}
for name in service_pb2.DESCRIPTOR.dependencies:
    for message in name.message_types_by_name.values():
        found |= dump(message)
for message in service_pb2.DESCRIPTOR.message_types_by_name.values():
    found |= dump(message)
service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
calls = {m.name: [m.input_type.full_name, m.output_type.full_name, m.client_streaming, m.server_streaming]
         for m in service.methods}
print(json.dumps([found, calls]))
"""


def all_messages() -> list[Descriptor]:
    def below(message: Descriptor) -> list[Descriptor]:
        return [message, *(inner for nested in message.nested_types for inner in below(nested))]

    return [m for message in pb.DESCRIPTOR.message_types_by_name.values() for m in below(message)]


def test_the_wire_is_that_of_tritonclient() -> None:
    dumped = subprocess.run([sys.executable, "-c", DUMP], check=True, capture_output=True, text=True)
    theirs, their_calls = json.loads(dumped.stdout)
    for message in all_messages():
        for field in message.fields:
            nested = field.message_type.full_name if field.message_type else ""
            ours = [field.number, field.type, field.is_repeated, nested]
            assert theirs[message.full_name][field.name] == ours, f"{message.full_name}.{field.name}"
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        types = [method.input_type.full_name, method.output_type.full_name]
        assert their_calls[method.name] == [*types, method.client_streaming, method.server_streaming]


def tensor(name: str, datatype: str, *values: Any, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(name, datatype, (len(values),) if shape is None else shape, values)


def request(*tensors: Tensor, raw: bool = False, **parameters: Any) -> pb.ModelInferRequest:
    # Inputs and outputs have the same form on the wire, so what writes one can write the other.
    response = pb.ModelInferResponse()
    for one in tensors:
        add_output(response, one, raw)
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=response.raw_output_contents)
    for output in response.outputs:
        message.inputs.add().MergeFromString(output.SerializeToString())
    for name, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(message.parameters[name], kinds[type(value)], value)
    return message


PROMPT = tensor("text_input", "BYTES", b"hi")
ELEMENTS = st.one_of(
    st.tuples(st.just("BYTES"), st.lists(st.binary(max_size=20), max_size=5)),
    st.tuples(st.just("INT64"), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)),
    st.tuples(st.just("UINT8"), st.lists(st.integers(0, 255), max_size=5)),
    st.tuples(st.just("BOOL"), st.lists(st.booleans(), max_size=5)),
    st.tuples(st.just("FP32"), st.lists(st.floats(width=32, allow_nan=False), max_size=5)),
)


@given(st.lists(ELEMENTS, min_size=1, max_size=4), st.booleans())
def test_tensors_survive_both_forms(given_: list[tuple[str, list[Any]]], raw: bool) -> None:
    tensors = [tensor(f"t{n}", kind, *values) for n, (kind, values) in enumerate(given_)]
    found = read_inputs(request(*tensors, raw=raw))
    assert [list(found[t.name].values) for t in tensors] == [list(t.values) for t in tensors]


@given(
    st.binary(max_size=60),
    st.sampled_from(["BYTES", "INT32", "FP16", "BOOL"]),
    st.lists(st.integers(-2, 9), max_size=3),
)
def test_no_raw_bytes_do_harm(data: bytes, kind: str, shape: list[int]) -> None:
    message = pb.ModelInferRequest(raw_input_contents=[data])
    message.inputs.add(name="x", datatype=kind, shape=shape)
    with suppress(InvalidArgumentError):
        found = read_inputs(message)["x"]
        assert len(found.values) == np.prod(shape)


def test_a_huge_claimed_shape_is_refused_before_anything_is_made_of_it() -> None:
    message = pb.ModelInferRequest(raw_input_contents=[b""])
    message.inputs.add(name="x", datatype="INT32", shape=[2**62, 2**62])
    with pytest.raises(InvalidArgumentError, match="shape"):
        read_inputs(message)


def test_a_shape_of_many_dimensions_is_refused_by_their_number() -> None:
    message = pb.ModelInferRequest(raw_input_contents=[b"\1"])
    message.inputs.add(name="x", datatype="INT8", shape=[1] * 9)
    with pytest.raises(InvalidArgumentError, match="at most 8 dimensions"):
        read_inputs(message)


def test_sessions_are_cut_before_anything_is_made_of_them() -> None:
    assert read(PROMPT, session_id="a!" * 10**6).generate.session_id == "a-" * 64
    assert read(PROMPT, tensor("sequence_id", "INT8", 5)).generate.session_id == "5"
    assert read(PROMPT, sequence_id=7).generate.session_id == "7"


def test_more_elements_than_claimed_are_refused_before_anything_is_made_of_them() -> None:
    for kind, raw in (("INT32", bytes(4_000_000)), ("BYTES", bytes(4_000_000))):
        message = pb.ModelInferRequest(raw_input_contents=[raw])
        message.inputs.add(name="x", datatype=kind, shape=[1])
        with pytest.raises(InvalidArgumentError, match="elements of its shape"):
            read_inputs(message)


@pytest.mark.parametrize("digits", [65, 400, 4300, 5000])
@pytest.mark.parametrize("name", ["max_tokens", "temperature", "logit_bias", "priority"])
def test_numbers_of_many_digits_are_refused_by_name(name: str, digits: int) -> None:
    number = "9" * digits
    value = f'{{"{number}": 1}}' if name == "logit_bias" else number
    with pytest.raises(InvalidArgumentError):
        read(PROMPT, sampling_parameters=f'{{"{name}": {value}}}')
    if name != "logit_bias":
        with pytest.raises(InvalidArgumentError) as caught:
            read(PROMPT, **{name: number})
        assert caught.value.field == name
        assert len(caught.value.message) < 200


def test_texts_that_every_response_or_parser_would_pay_for_are_bounded() -> None:
    for fields in ({"id": "a" * 1025}, {}):
        message = request(PROMPT, **({} if fields else {"sampling_parameters": " " * 70_000}))
        message.MergeFrom(pb.ModelInferRequest(**fields))  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="characters"):
            read_request(message)


def read(*tensors: Tensor, **parameters: Any) -> ParsedRequest:
    return read_request(request(*tensors, **parameters))


def test_one_setting_in_three_forms() -> None:
    forms = [
        read(PROMPT, tensor("temperature", "FP32", 0.5)),
        read(PROMPT, temperature=0.5),
        read(PROMPT, temperature="0.5"),
        read(PROMPT, sampling_parameters='{"temperature": 0.5}'),
        read(PROMPT, tensor("sampling_parameters", "BYTES", b'{"temperature": "0.5"}')),
        read(tensor("text_input", "BYTES", b"hi", shape=(1, 1)), temperature=0.5),
    ]
    assert all(form.generate == forms[0].generate for form in forms)
    assert forms[0].generate.sampling.temperature == 0.5


def test_everything_that_can_be_set() -> None:
    asked = read(
        tensor("input_ids", "INT32", 1, 2, 3, shape=(1, 3)),
        tensor("stop_words", "BYTES", b"a", b"b"),
        request_output_len=7,
        min_length=2,
        random_seed=9,
        sampling_parameters='{"logit_bias": {"5": 1.5}, "stop_token_ids": [4], "logprobs": 2, "bad_words": ["x"]}',
        allowed_token_ids=5,
        stream=True,
        session_id="s 1",
        timeout=1_500_000,
        json_schema="{}",
        return_num_input_tokens=True,
    )
    generate = asked.generate
    assert list(generate.token_ids.ids) == [1, 2, 3]
    assert (generate.stop.max_tokens, generate.stop.min_tokens) == (7, 2)
    assert list(generate.stop.stop_strings) == ["a", "b"]
    assert list(generate.stop.stop_token_ids) == [4]
    assert (generate.sampling.seed, generate.sampling.logprobs) == (9, 2)
    assert generate.sampling.logit_bias[0] == generation_pb2.LogitBias(token_id=5, bias=1.5)
    assert (generate.sampling.bad_words, generate.sampling.allowed_token_ids) == (["x"], [5])
    assert generate.sampling.grammar.json_schema == "{}"
    assert generate.session_id == "s-1"
    assert generate.timeout.ToMicroseconds() == 1_500_000
    assert asked.stream
    assert asked.outputs == ("text_output", "output_ids", "finish_reason", "num_input_tokens", "logprobs")


@pytest.mark.parametrize(("level", "priority"), [(0, 0), (1, 100), (101, 0), (201, -100), (2**40, -100)])
def test_priority_levels(level: int, priority: int) -> None:
    assert read(PROMPT, priority=level).generate.priority == priority


def test_targets() -> None:
    generate = read(PROMPT, ttft_ms=500, tpot_ms=62.5).generate
    assert (generate.ttft_ms, generate.tpot_ms) == (500.0, 62.5)
    assert not read(PROMPT).generate.HasField("tpot_ms")


def test_empty_texts_of_optional_settings_are_padding() -> None:
    generate = read(PROMPT, tensor("regex", "BYTES", b""), lark="", json_schema="").generate
    assert not generate.sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("tensors", "parameters", "field"),
    [
        ([PROMPT], {"ttft_ms": 0}, "ttft_ms"),
        ([PROMPT], {"tpot_ms": "fast"}, "tpot_ms"),
        ([], {}, "text_input"),
        ([PROMPT, tensor("prompt", "BYTES", b"x")], {}, "text_input"),
        ([tensor("text_input", "BYTES", b"a", b"b")], {}, "text_input"),
        ([tensor("text_input", "BYTES", b"")], {}, "prompt.text"),
        ([tensor("text_input", "FP32", 1.0)], {}, "text_input"),
        ([tensor("input_ids", "INT32", 1, 2, 3, 4, shape=(2, 2))], {}, "input_ids"),
        ([tensor("input_ids", "FP32", 1.5)], {}, "input_ids"),
        ([tensor("input_ids", "INT32", -1)], {}, "prompt.token_ids"),
        ([PROMPT], {"temprature": 1.0}, "temprature"),
        ([PROMPT], {"temperature": True}, "temperature"),
        ([PROMPT], {"temperature": "warm"}, "temperature"),
        ([PROMPT], {"temperature": float("nan")}, "sampling.temperature"),
        ([PROMPT], {"max_tokens": 0}, "stop.max_tokens"),
        ([PROMPT], {"max_tokens": 2.5}, "max_tokens"),
        ([PROMPT], {"request_output_len": 2.5}, "request_output_len"),
        ([PROMPT], {"stream": "perhaps"}, "stream"),
        ([PROMPT], {"seed": -1}, "sampling.seed"),
        ([PROMPT, tensor("max_tokens", "INT32", 1)], {"max_tokens": 1}, "max_tokens"),
        ([PROMPT], {"max_tokens": 1, "sampling_parameters": '{"max_tokens": 1}'}, "max_tokens"),
        ([PROMPT], {"sampling_parameters": "[]"}, "sampling_parameters"),
        ([PROMPT], {"sampling_parameters": '{"beam": 3}'}, "sampling_parameters.beam"),
        ([PROMPT], {"sampling_parameters": '{"\\ud800": 1}'}, "sampling_parameters"),
        ([PROMPT], {"sampling_parameters": '{"stop": ["\\ud800"]}'}, "sampling_parameters"),
        ([PROMPT], {"sampling_parameters": "[" * 60_000}, "sampling_parameters"),
        ([PROMPT, tensor("sequence_id", "INT8", *range(9))], {}, "sequence_id"),
        ([PROMPT], {"logit_bias": 3}, "logit_bias"),
        ([PROMPT], {"timeout": -3}, "timeout"),
        ([PROMPT], {"priority": -3}, "priority"),
        ([PROMPT], {"priority": -(2**63)}, "priority"),
        ([PROMPT], {"priority": 1.5}, "priority"),
        ([PROMPT], {"priority": "high"}, "priority"),
        ([PROMPT], {"priority": True}, "priority"),
        ([PROMPT], {"regex": "a", "lark": "b"}, "sampling.grammar"),
        ([PROMPT], {"exclude_input_in_output": False, "stream": True}, "exclude_input_in_output"),
    ],
)
def test_what_is_wrong_is_named(tensors: list[Tensor], parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read(*tensors, **parameters)
    assert caught.value.field == field


def test_unknown_outputs_and_shared_memory_are_refused() -> None:
    message = request(PROMPT)
    message.outputs.add(name="logits")
    with pytest.raises(InvalidArgumentError, match=r"outputs\.logits"):
        read_request(message)
    message = request(PROMPT)
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(InvalidArgumentError, match="shared memory"):
        read_request(message)


@given(st.binary(max_size=200))
def test_arbitrary_messages_end_as_a_request_or_as_a_named_field(data: bytes) -> None:
    with suppress(DecodeError, InvalidArgumentError):
        assert read_request(pb.ModelInferRequest.FromString(data)).generate.WhichOneof("prompt")


def test_log_probabilities_come_as_json_and_the_version_as_model_version() -> None:
    message = request(PROMPT, logprobs=1)
    delta = generation_pb2.OutputDelta(token_ids=[5], text="x", finish_reason=1)
    delta.logprobs.add(token_id=5, logprob=-0.5).top.add(token_id=5, logprob=-0.5)
    served = inference_pb2.ServedBy(model="m-v2")
    done = inference_pb2.GenerationDone(finish_reason=1, model="m", served_by=served)
    response = Responses(message, read_request(message)).whole([delta], done)
    found = json.loads(response.outputs[-1].contents.bytes_contents[0])
    assert found == [{"token_id": 5, "logprob": -0.5, "top": [{"token_id": 5, "logprob": -0.5}]}]
    assert (response.model_name, response.model_version) == ("m", "m-v2")


@pytest.mark.parametrize(
    "delta", [TokenDelta(1, [5], " x"), TokenDelta(2, [6, 7], "é"), TokenDelta(4, [], "")]
)
def test_a_piece_of_a_stream_has_the_deltas_text_and_tokens(delta: TokenDelta) -> None:
    message = request(PROMPT, stream=True)
    responses = Responses(message, read_request(message))
    asked = request(PROMPT, stream=True, return_num_output_tokens=True)
    slowly = Responses(asked, read_request(asked)).piece(delta)  # not the usual outputs
    del slowly.infer_response.outputs[3:]
    for _ in range(2):
        piece = responses.piece(delta)
        assert piece == slowly
        text, ids, reason = piece.infer_response.outputs
        assert (text.contents.bytes_contents[0].decode(), list(ids.contents.int_contents)) == (
            delta.text,
            delta.token_ids,
        )
        assert (list(ids.shape), reason.contents.bytes_contents[0]) == ([len(delta.token_ids)], b"")


def test_a_failure_says_what_a_program_needs() -> None:
    error = ResourceExhaustedError("full", reason="QUEUE_FULL", retry_after_s=1.5)
    response = failure("r1", error)
    parameters = response.infer_response.parameters
    assert response.error_message == "[request id: r1] full"
    assert parameters["error_code"].string_param == "RESOURCE_EXHAUSTED"
    assert parameters["error_reason"].string_param == "QUEUE_FULL"
    assert parameters["retry_after_ms"].int64_param == 1500
    assert failure("", error).error_message == "full"


def test_the_examples_of_the_documentation_are_valid_requests() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "guides" / "grpc-kserve.md").read_text(
        encoding="utf-8"
    )
    calls = re.findall(r"-d '(\{.*?\})' *\\?\s*\S+ (\S+)/(\w+)\n", page, re.DOTALL)
    assert len(calls) == 4
    for body, service, method in calls:
        descriptor = Default().FindServiceByName(service).FindMethodByName(method)
        message = json_format.Parse(body, GetMessageClass(descriptor.input_type)())
        if method == "ModelInfer":
            asked = read_request(message)  # type: ignore[arg-type]
            assert (asked.generate.text, asked.generate.stop.max_tokens) == ("Once upon a time", 20)
