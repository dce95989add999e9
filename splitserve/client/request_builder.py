"""Builds the request message from a prompt and options. Pure.

Values that no model accepts are refused here, by the server's own bounds: the message's unsigned fields cannot
represent all of them. The server validates everything again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from splitserve.client.types import ChatMessage, GenerateOptions, Prompt
from splitserve.errors import InvalidArgumentError
from splitserve.generation.bounds import (
    LEAST_TARGET_MS,
    MAX_PRIORITY,
    MAX_TPOT_MS,
    MAX_TTFT_MS,
    between,
    check_sampling,
    check_stop,
)
from splitserve.grammars.forms import check_grammar
from splitserve.v1 import inference_pb2

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
)
_GRAMMARS = ("json_schema", "json_object", "regex", "lark")
_TARGETS: Mapping[str, float] = {"ttft_ms": MAX_TTFT_MS, "tpot_ms": MAX_TPOT_MS}
_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1, FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1}
"""The largest number of each unsigned type."""
_SLICE_TOKENS = 2**16
"""Tokens of a prompt that one call converts: one call for a million would hold the interpreter's lock for 30 ms."""
_MOST_TOKENS = 2**32 - 1
"""Upper bound of a vocabulary and of a context, from the type of the message's fields. The server knows the model's."""


def build_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The message for a prompt and its options. Raises InvalidArgumentError naming field and bound."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        request = inference_pb2.GenerateRequest(
            model=given.get("model", ""), request_id=given.get("request_id", "")
        )
        _set_prompt(request, prompt)
        if variables := given.get("chat_template_kwargs"):
            if not request.HasField("chat"):
                raise InvalidArgumentError("chat_template_kwargs needs ChatMessages", field="prompt.chat")
            request.chat.template_kwargs_json = json.dumps(dict(variables), ensure_ascii=False)
        _set_sampling(request, given)
        _set_stop(request, given)
        for name, maximum in _TARGETS.items():
            if name in given:
                between(name, given[name], LEAST_TARGET_MS, maximum)
                setattr(request, name, given[name])
        between("priority", given.get("priority", 0), -MAX_PRIORITY, MAX_PRIORITY)
        request.priority = given.get("priority", 0)
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"request: text is not valid Unicode ({error.reason})") from None
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"request: {error}") from None
    return request


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidArgumentError("prompt.text must not be empty", field="prompt.text")
        request.text = prompt
    elif not prompt:
        raise InvalidArgumentError("prompt is empty; give at least one token or message", field="prompt")
    else:
        _set_items(request, prompt)


def _set_items(request: inference_pb2.GenerateRequest, prompt: Sequence[int] | Sequence[ChatMessage]) -> None:
    token_ids = [item for item in prompt if isinstance(item, int)]
    turns = [item for item in prompt if isinstance(item, ChatMessage)]
    if len(token_ids) == len(prompt):
        for start in range(0, len(token_ids), _SLICE_TOKENS):
            part = token_ids[start : start + _SLICE_TOKENS]
            for token_id in (min(part), max(part)):
                between("prompt.token_ids", token_id, 0, _MOST_TOKENS)
            request.token_ids.ids.extend(part)
    elif len(turns) == len(prompt):
        for turn in turns:
            request.chat.messages.add(role=turn.role, content=turn.content)
    else:
        raise InvalidArgumentError("prompt must be text, token ids or ChatMessages", field="prompt")


def _set_sampling(request: inference_pb2.GenerateRequest, given: Mapping[str, Any]) -> None:
    _set_fields("sampling", request.sampling, _SAMPLING, given)
    for token_id, bias in given.get("logit_bias", {}).items():
        between("sampling.logit_bias.token_id", token_id, 0, _MOST_TOKENS)
        request.sampling.logit_bias.add(token_id=token_id, bias=bias)
    for token_id in given.get("allowed_token_ids", ()):
        between("sampling.allowed_token_ids", token_id, 0, _MOST_TOKENS)
        request.sampling.allowed_token_ids.append(token_id)
    words = given.get("bad_words", ())
    request.sampling.bad_words.extend([words] if isinstance(words, str) else words)
    check_sampling(request.sampling, _MOST_TOKENS + 1)
    _set_grammar(request, given)


def _set_grammar(request: inference_pb2.GenerateRequest, given: Mapping[str, Any]) -> None:
    forms = [name for name in _GRAMMARS if given.get(name, False) is not False]
    if not forms:
        return
    if len(forms) > 1:
        message = f"sampling.grammar must be one of {', '.join(forms)}, not several"
        raise InvalidArgumentError(message, field="sampling.grammar")
    value = given[forms[0]]
    if isinstance(value, Mapping):
        value = json.dumps(dict(value), ensure_ascii=False)
    setattr(request.sampling.grammar, forms[0], value)
    check_grammar(request.sampling.grammar)


def _set_stop(request: inference_pb2.GenerateRequest, given: Mapping[str, Any]) -> None:
    _set_fields("stop", request.stop, ("max_tokens", "min_tokens", "ignore_eos"), given)
    stop = given.get("stop", ())
    request.stop.stop_strings.extend([stop] if isinstance(stop, str) else stop)
    for token_id in given.get("stop_token_ids", ()):
        between("stop.stop_token_ids", token_id, 0, _MOST_TOKENS)
        request.stop.stop_token_ids.append(token_id)
    check_stop(request.stop, _MOST_TOKENS + 1, _MOST_TOKENS)


def _set_fields(section: str, message: Any, names: Iterable[str], given: Mapping[str, Any]) -> None:
    """Sets the options that are given. Raises InvalidArgumentError for a number that the field's type cannot
    represent."""
    for name in names:
        if name in given:
            maximum = _UNSIGNED.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
            if maximum is not None:
                between(f"{section}.{name}", given[name], 0, maximum)
            setattr(message, name, given[name])
