"""Translates a request of the Open Inference Protocol into a GenerateRequest. Pure.

Names follow Triton's vLLM and TensorRT-LLM backends. A setting may be an input tensor, a request parameter or an entry
of `sampling_parameters`, but only one of them. Unknown names are refused, so that a misspelt setting is not silently
replaced by the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from coordinator.entrypoints.kserve.tensors import (
    SLICE_ELEMENTS,
    as_biases,
    as_bool,
    as_float,
    as_int,
    as_ints,
    as_name,
    as_stops,
    as_text,
    parameter_value,
    read_inputs,
    refuse,
    tensor_value,
)
from coordinator.request.inference_request import REQUEST_ID
from splitserve.client.request_builder import build_request
from splitserve.client.types import GenerateOptions
from splitserve.generation.bounds import MAX_PRIORITY
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.v1 import inference_pb2

Reader = Callable[[str, Any], Any]

PROMPTS = ("text_input", "prompt", "input_ids")
SAMPLING: Mapping[str, Reader] = {
    "max_tokens": as_int,
    "min_tokens": as_int,
    "temperature": as_float,
    "top_k": as_int,
    "top_p": as_float,
    "min_p": as_float,
    "repetition_penalty": as_float,
    "presence_penalty": as_float,
    "frequency_penalty": as_float,
    "seed": as_int,
    "stop": as_stops,
    "stop_token_ids": as_ints,
    "ignore_eos": as_bool,
    "logprobs": as_int,
    "logit_bias": as_biases,
    "allowed_token_ids": as_ints,
    "bad_words": as_stops,
}
ALIASES: Mapping[str, str] = {
    "request_output_len": "max_tokens",
    "min_length": "min_tokens",
    "random_seed": "seed",
    "stop_words": "stop",
}
GRAMMARS: Mapping[str, Reader] = {
    "json_schema": as_text,
    "json_object": as_bool,
    "regex": as_text,
    "lark": as_text,
}
RETURNS: Mapping[str, str] = {
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
"""Boolean settings, each with the output that it requests."""
READERS: Mapping[str, Reader] = {
    **SAMPLING,
    **GRAMMARS,
    **dict.fromkeys(RETURNS, as_bool),
    "text_input": as_text,
    "prompt": as_text,
    "input_ids": as_ints,
    "stream": as_bool,
    "exclude_input_in_output": as_bool,
    "sampling_parameters": as_text,
    "priority": as_int,
    "ttft_ms": as_float,
    "tpot_ms": as_float,
    "timeout": as_int,
    "sequence_id": as_name,
    "sequence_start": as_bool,
    "sequence_end": as_bool,
    "session_id": as_text,
    "triton_enable_empty_final_response": as_bool,
}

USUAL_OUTPUTS = ("text_output", "output_ids", "finish_reason")
OUTPUTS = (*USUAL_OUTPUTS, "num_input_tokens", "num_output_tokens", "logprobs")
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
    prompts = [name for name in PROMPTS if name in settings]
    if len(prompts) != 1:
        refuse(
            "text_input", f"or one of {', '.join(PROMPTS[1:])} must be given, once; there are {len(prompts)}"
        )
    prompt: str | list[int] = settings[prompts[0]]
    options = GenerateOptions(model=request.model_name)
    for name in (*SAMPLING, "ttft_ms", "tpot_ms"):
        if name in settings:
            options[name] = settings[name]  # type: ignore[literal-required]
    if "priority" in settings:
        options["priority"] = _priority(settings["priority"])
    if REQUEST_ID.match(request.id):
        options["request_id"] = request.id
    generate = build_request(prompt if isinstance(prompt, str) else prompt[:1], options)
    if not isinstance(prompt, str):
        # The same result as from build_request, but fast for a million tokens.
        del generate.token_ids.ids[:]
        for start in range(0, len(prompt), SLICE_ELEMENTS):
            part = prompt[start : start + SLICE_ELEMENTS]
            if not 0 <= min(part) <= max(part) < 2**32:
                refuse("prompt.token_ids", f"must be 0..{2**32 - 1} each")
            generate.token_ids.ids.extend(part)
    _set_others(generate, settings)
    stream = settings.get("stream", False)
    return ParsedRequest(
        generate,
        _outputs(request, settings),
        raw=bool(request.raw_input_contents),
        stream=stream,
        empty_final=settings.get("triton_enable_empty_final_response", False),
        prefix=_prefix(prompt, settings, stream),
    )


def _read_settings(request: pb.ModelInferRequest) -> dict[str, Any]:
    """All settings by name, parsed. Each may be given once."""
    settings: dict[str, Any] = {}
    for name, tensor in read_inputs(request).items():
        _put(settings, name, tensor_value(tensor))
    for name, parameter in request.parameters.items():
        _put(settings, name, parameter_value(name, parameter))
    if "sampling_parameters" in settings:
        for name, value in _json_object(settings.pop("sampling_parameters")).items():
            if ALIASES.get(name, name) not in SAMPLING:
                refuse(f"sampling_parameters.{name}", "is not known")
            if value is not None:
                _put(settings, name, value)
    return settings


def _put(settings: dict[str, Any], name: str, value: Any) -> None:
    setting = ALIASES.get(name, name)
    if setting not in READERS:
        refuse(name, "is not known; see ModelMetadata")
    if setting in settings:
        refuse(name, "is given twice")
    settings[setting] = READERS[setting](name, value)


def _json_object(text: str) -> Mapping[str, Any]:
    if len(text) > MAX_SETTINGS:
        refuse("sampling_parameters", f"must have at most {MAX_SETTINGS} characters, not {len(text)}")
    try:
        value = from_json(text or "{}")  # unlike `json`, it refuses halves of surrogate pairs
    except ValueError:
        value = None
    if not isinstance(value, dict):
        refuse("sampling_parameters", "must be a JSON object")
    return value


def _set_others(generate: inference_pb2.GenerateRequest, settings: Mapping[str, Any]) -> None:
    if timeout_us := settings.get("timeout", 0):
        if not 0 < timeout_us <= 10**15:
            refuse("timeout", "must be 1..10^15 microseconds")
        generate.timeout.FromMicroseconds(timeout_us)
    session = settings.get("session_id") or settings.get("sequence_id", "")
    generate.session_id = NOT_A_SESSION.sub("-", session[:MAX_SESSION])
    grammars = [name for name in GRAMMARS if settings.get(name)]
    if len(grammars) > 1:
        refuse(grammars[1], f"cannot be given together with {grammars[0]}")
    for name in grammars:
        setattr(generate.sampling.grammar, name, settings[name])


def _priority(level: int) -> int:
    """The priority, which grows with urgency, for a level of Triton: 1 is the highest level, 0 the default."""
    if level < 0:
        refuse("priority", "must be 0 (default) or a level from 1, the highest")
    return max(-MAX_PRIORITY, MAX_PRIORITY + 1 - level) if level else 0


def _prefix(prompt: str | list[int], settings: Mapping[str, Any], stream: bool) -> str:
    if settings.get("exclude_input_in_output", True) or not isinstance(prompt, str):
        return ""
    if stream:
        refuse("exclude_input_in_output", "cannot be false on a stream")
    return prompt


def _outputs(request: pb.ModelInferRequest, settings: Mapping[str, Any]) -> tuple[str, ...]:
    for output in request.outputs:
        if output.name not in OUTPUTS:
            refuse(f"outputs.{output.name}", f"is not known; there are {', '.join(OUTPUTS)}")
        if any(key.startswith("shared_memory") or key == "classification" for key in output.parameters):
            refuse(f"outputs.{output.name}", "can come neither in shared memory nor as classes")
    requested = [output.name for output in request.outputs] or list(USUAL_OUTPUTS)
    requested += [name for flag, name in RETURNS.items() if settings.get(flag)]
    requested += ["logprobs"] if "logprobs" in settings else []
    return tuple(name for name in OUTPUTS if name in requested)
