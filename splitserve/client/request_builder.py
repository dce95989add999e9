"""Builds the request message from a prompt and options. Pure.

Values that no model accepts are refused here, before they reach the server or the wire format, whose unsigned
fields cannot represent them. The server validates everything again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from splitserve.client.types import ChatMessage, GenerateOptions, Prompt
from splitserve.errors import InvalidArgumentError
from splitserve.generation.bounds import LEAST_TARGET_MS, MAX_TPOT_MS, MAX_TTFT_MS
from splitserve.generation.grammar import check_grammar
from splitserve.v1 import inference_pb2

_UINT32 = (0, 2**32 - 1)
_SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, 20),
}
_ABOVE_ZERO = frozenset({"top_p", "repetition_penalty"})
_STOP: Mapping[str, tuple[float, float]] = {"max_tokens": (1, _UINT32[1]), "min_tokens": _UINT32}
_GRAMMARS = ("json_schema", "json_object", "regex", "lark")
_MAX_PRIORITY = 100
_TARGETS: Mapping[str, float] = {"ttft_ms": MAX_TTFT_MS, "tpot_ms": MAX_TPOT_MS}


def build_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The message for a prompt and its options. Raises InvalidArgumentError naming field and bound."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        request = inference_pb2.GenerateRequest(
            model=given.get("model", ""), request_id=given.get("request_id", "")
        )
        _set_prompt(request, prompt)
        _set_scalars("sampling", request.sampling, _SAMPLING, given)
        for token_id, bias in given.get("logit_bias", {}).items():
            _check("sampling.logit_bias.token_id", token_id, *_UINT32)
            _check("sampling.logit_bias.bias", bias, -100, 100)
            request.sampling.logit_bias.add(token_id=token_id, bias=bias)
        _set_grammar(request, given)
        _set_stop(request, given)
        for name, most in _TARGETS.items():
            if name in given:
                _check(name, given[name], LEAST_TARGET_MS, most)
                setattr(request, name, given[name])
        request.priority = _checked("priority", given.get("priority", 0), -_MAX_PRIORITY, _MAX_PRIORITY)
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
        for token_id in token_ids:
            _check("prompt.token_ids", token_id, *_UINT32)
        request.token_ids.ids.extend(token_ids)
    elif len(turns) == len(prompt):
        for turn in turns:
            request.chat.messages.add(role=turn.role, content=turn.content)
    else:
        raise InvalidArgumentError("prompt must be text, token ids or ChatMessages", field="prompt")


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
    _set_scalars("stop", request.stop, _STOP, given)
    stop = given.get("stop", ())
    request.stop.stop_strings.extend([stop] if isinstance(stop, str) else stop)
    for token_id in given.get("stop_token_ids", ()):
        request.stop.stop_token_ids.append(_checked("stop.stop_token_ids", token_id, *_UINT32))
    request.stop.ignore_eos = given.get("ignore_eos", False)


def _set_scalars(
    section: str, message: Any, bounds: Mapping[str, tuple[float, float]], given: Mapping[str, Any]
) -> None:
    for name, (low, high) in bounds.items():
        if name not in given:
            continue
        field = f"{section}.{name}"
        _check(field, given[name], low, high)
        if name in _ABOVE_ZERO and given[name] == 0:
            raise InvalidArgumentError(f"{field} must be above 0 and at most {high}, not 0", field=field)
        setattr(message, name, given[name])


def _check(field: str, value: float, low: float, high: float) -> None:
    # NaN fails this comparison and is refused.
    if not low <= value <= high:
        raise InvalidArgumentError(f"{field} must be {low}..{high}, not {value}", field=field)


def _checked(field: str, value: int, low: int, high: int) -> int:
    _check(field, value, low, high)
    return value
