"""Translates a request of the Open Inference Protocol into a GenerateRequest. Pure.

Names follow Triton's vLLM and TensorRT-LLM backends. A setting may be an input tensor, a request parameter or an entry
of `sampling_parameters`, but only one of them. Unknown names are refused, so that a misspelt setting is not silently
replaced by the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import from_json

from coordinator.entrypoints.kserve.tensors import (
    MAX_TEXT,
    parameter_value,
    read_inputs,
    refuse,
    tensor_value,
)
from coordinator.request.inference_request import REQUEST_ID
from splitserve.client.request_builder import build_request
from splitserve.client.types import GenerateOptions
from splitserve.generation.bounds import MAX_LOGIT_BIASES, MAX_PRIORITY
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.v1 import inference_pb2


def _single(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"must have one element, not {len(value)}")
        value = value[0]
    return value


def _number(value: Any) -> Any:
    value = _single(value)
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise ValueError(f"must have at most {MAX_TEXT} characters")
    return value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _texts(value: Any) -> Any:
    # As in Triton's `stop_words`, it may be a list in a list. Empty strings are padding.
    texts = _listed(value[0] if isinstance(value, list) and len(value) == 1 else value)
    return [text for text in texts if text != ""]


def _fast_ints(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    value = _listed(value)
    # In Python, so that other threads may run meanwhile: a prompt may have a million tokens.
    return value if all(type(item) is int for item in value) else validate(value)


Int = Annotated[int, Field(ge=-(2**63), lt=2**64), BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
Bool = Annotated[bool, BeforeValidator(_single)]
Text = Annotated[str, BeforeValidator(_single)]
PaddedText = Annotated[str, BeforeValidator(_single), AfterValidator(lambda text: text or None)]
"""An empty text is padding, and sets nothing."""
Texts = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_texts)]
Ints = Annotated[list[Int], Field(fail_fast=True), WrapValidator(_fast_ints)]
Biases = Annotated[dict[Int, Float], Field(max_length=MAX_LOGIT_BIASES)]
Name = Annotated[str, Field(coerce_numbers_to_str=True), BeforeValidator(_single)]


class KserveSampling(BaseModel):
    """The entries of `sampling_parameters`. Clients of Triton send numbers as numbers, as tensors with one element and
    as text: all of these are accepted, but only if they convert exactly."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: Float | None = None
    top_k: Int | None = None
    top_p: Float | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    seed: Int | None = None
    stop: Texts | None = None
    stop_token_ids: Ints | None = None
    ignore_eos: Bool | None = None
    logprobs: Int | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Ints | None = None
    bad_words: Texts | None = None


class KserveSettings(KserveSampling):
    """All that a tensor or a parameter may set."""

    text_input: Text | None = None
    prompt: Text | None = None
    input_ids: Ints | None = None
    stream: Bool = False
    exclude_input_in_output: Bool = True
    return_finish_reason: Bool = False
    return_num_input_tokens: Bool = False
    return_num_output_tokens: Bool = False
    json_schema: PaddedText | None = None
    json_object: Bool | None = None
    regex: PaddedText | None = None
    lark: PaddedText | None = None
    priority: Annotated[Int, Field(ge=0)] = 0
    """A level from 1, the highest; 0: none."""
    ttft_ms: Float | None = None
    tpot_ms: Float | None = None
    timeout: Annotated[Int, Field(ge=0, le=10**15)] = 0
    """Microseconds; 0: the server's."""
    session_id: Text = ""
    sequence_id: Name = ""
    sequence_start: Bool = False
    sequence_end: Bool = False
    triton_enable_empty_final_response: Bool = False


ALIASES: Mapping[str, str] = {
    "request_output_len": "max_tokens",
    "min_length": "min_tokens",
    "random_seed": "seed",
    "stop_words": "stop",
}
PROMPTS = ("text_input", "prompt", "input_ids")
GRAMMARS = ("json_schema", "json_object", "regex", "lark")
OPTIONS = {*KserveSampling.model_fields, *GRAMMARS, "ttft_ms", "tpot_ms"}
"""Settings with the same name as an option of our client."""
RETURNS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
"""Settings that each ask for an output, which they name."""
ANY_LENGTH = -1
Shape = tuple[str, int]
"""(datatype, length)."""
INPUTS: Mapping[Shape, tuple[str, ...]] = {
    ("BYTES", 1): ("text_input", "sampling_parameters"),
    ("BYTES", ANY_LENGTH): ("stop",),
    ("INT32", ANY_LENGTH): ("input_ids", "stop_token_ids"),
    ("INT32", 1): ("max_tokens", "min_tokens", "top_k", "logprobs"),
    ("UINT64", 1): ("seed",),
    ("FP32", 1): (
        *("temperature", "top_p", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ),
    ("BOOL", 1): ("stream", "ignore_eos", "exclude_input_in_output", *RETURNS),
}
"""The tensors that metadata name, by their shapes. A tensor of any other setting is taken, too."""
OUTPUTS: Mapping[str, Shape] = {
    "text_output": ("BYTES", 1),
    "output_ids": ("INT32", ANY_LENGTH),
    "finish_reason": ("BYTES", 1),
    "num_input_tokens": ("UINT32", 1),
    "num_output_tokens": ("UINT32", 1),
    "logprobs": ("BYTES", 1),
}
USUAL_OUTPUTS = ("text_output", "output_ids", "finish_reason")
MAX_ID = 1024
"""Most characters of a request's id, which each response repeats."""
MAX_SETTINGS = 64 * 2**10
"""Most characters of `sampling_parameters`."""
MAX_SESSION = 128
"""Leading characters of a session's name that count."""
NOT_A_SESSION = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request. `generate.model` is still the name that the client gave."""

    generate: inference_pb2.GenerateRequest
    outputs: tuple[str, ...]
    raw: bool
    """Whether outputs are raw; they are if the inputs are."""
    stream: bool = False
    """Whether to send one response per delta instead of one for the whole answer."""
    empty_final: bool = False
    """Whether a stream ends with a response without outputs."""
    prefix: str = ""
    """Text before the output: the prompt if `exclude_input_in_output` is false."""


def read_request(request: pb.ModelInferRequest) -> ParsedRequest:
    """Parses a request. Raises InvalidArgumentError naming the input, parameter or output."""
    if len(request.id) > MAX_ID:
        refuse("id", f"must have at most {MAX_ID} characters, not {len(request.id)}")
    settings = _read_settings(request)
    prompts = [value for name in PROMPTS if (value := getattr(settings, name)) is not None]
    if len(prompts) != 1:
        refuse(
            "text_input", f"or one of {', '.join(PROMPTS[1:])} must be given, once; there are {len(prompts)}"
        )
    prompt: str | list[int] = prompts[0]
    options = GenerateOptions(model=request.model_name, priority=_priority(settings.priority))
    options.update(settings.model_dump(include=OPTIONS))  # type: ignore[typeddict-item]
    if REQUEST_ID.match(request.id):
        options["request_id"] = request.id
    generate = build_request(prompt, options)
    if settings.timeout:
        generate.timeout.FromMicroseconds(settings.timeout)
    session = settings.session_id or settings.sequence_id
    generate.session_id = NOT_A_SESSION.sub("-", session[:MAX_SESSION])
    return ParsedRequest(
        generate,
        _outputs(request, settings),
        raw=bool(request.raw_input_contents),
        stream=settings.stream,
        empty_final=settings.triton_enable_empty_final_response,
        prefix=_prefix(prompt, settings),
    )


def _read_settings(request: pb.ModelInferRequest) -> KserveSettings:
    """All settings. Each may be given once."""
    given: dict[str, tuple[str, Any]] = {}
    for name, tensor in read_inputs(request).items():
        _put(given, name, tensor_value(tensor))
    for name, parameter in request.parameters.items():
        _put(given, name, parameter_value(name, parameter))
    if "sampling_parameters" in given:
        for name, value in _json_object(given.pop("sampling_parameters")[1]).items():
            if ALIASES.get(name, name) not in KserveSampling.model_fields:
                refuse(f"sampling_parameters.{name}", "is not known")
            if value is not None:
                _put(given, name, value)
    try:
        return KserveSettings.model_validate({setting: value for setting, (_, value) in given.items()})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        refuse(given[str(first["loc"][0])][0], first["msg"].removeprefix("Value error, "))


def _put(given: dict[str, tuple[str, Any]], name: str, value: Any) -> None:
    """Adds a setting to those that are `given`, by setting: the name that the client writes, and the value."""
    setting = ALIASES.get(name, name)
    if setting not in KserveSettings.model_fields and setting != "sampling_parameters":
        refuse(name, "is not known; see ModelMetadata")
    if setting in given:
        refuse(name, "is given twice")
    given[setting] = name, value


def _json_object(text: Any) -> Mapping[str, Any]:
    text = text[0] if isinstance(text, list) and len(text) == 1 else text
    if not isinstance(text, str):
        refuse("sampling_parameters", "must be a text")
    if len(text) > MAX_SETTINGS:
        refuse("sampling_parameters", f"must have at most {MAX_SETTINGS} characters, not {len(text)}")
    try:
        value = from_json(text or "{}")  # unlike `json`, it refuses halves of surrogate pairs
    except ValueError:
        value = None
    if not isinstance(value, dict):
        refuse("sampling_parameters", "must be a JSON object")
    return value


def _priority(level: int) -> int:
    """The priority, which grows with urgency, for a level of Triton."""
    return max(-MAX_PRIORITY, MAX_PRIORITY + 1 - level) if level else 0


def _prefix(prompt: str | list[int], settings: KserveSettings) -> str:
    if settings.exclude_input_in_output or not isinstance(prompt, str):
        return ""
    if settings.stream:
        refuse("exclude_input_in_output", "cannot be false on a stream")
    return prompt


def _outputs(request: pb.ModelInferRequest, settings: KserveSettings) -> tuple[str, ...]:
    for output in request.outputs:
        if output.name not in OUTPUTS:
            refuse(f"outputs.{output.name}", f"is not known; there are {', '.join(OUTPUTS)}")
        if any(key.startswith("shared_memory") or key == "classification" for key in output.parameters):
            refuse(f"outputs.{output.name}", "can come neither in shared memory nor as classes")
    requested = [output.name for output in request.outputs] or list(USUAL_OUTPUTS)
    requested += [name.removeprefix("return_") for name in RETURNS if getattr(settings, name)]
    requested += ["logprobs"] if settings.logprobs is not None else []
    return tuple(name for name in OUTPUTS if name in requested)
