"""Parses a setting's value, given as a tensor, as a request parameter or in JSON. Pure.

Clients of Triton send numbers as numbers, as tensors with one element and as text. All of these are accepted, but only
if they convert exactly. Errors name the setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

from coordinator.entrypoints.kserve.tensors import Tensor
from splitserve.errors import InvalidArgumentError
from splitserve.generation.bounds import MAX_LOGIT_BIASES
from splitserve.kserve import open_inference_pb2 as pb

WORDS = {"true": True, "1": True, "false": False, "0": False}
MAX_TEXT = 64
"""Characters of an invalid value that are shown to the client."""


def parameter_value(name: str, parameter: pb.InferParameter) -> Any:
    """The value of a request parameter."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        refuse(name, "is a parameter without a value")
    return getattr(parameter, kind)


def tensor_value(tensor: Tensor) -> list[Any]:
    """A tensor's elements, with text decoded. Leading batch dimensions must be 1."""
    if len(tensor.shape) > 1 and any(length != 1 for length in tensor.shape[:-1]):
        refuse(tensor.name, f"must have one row, not the shape {list(tensor.shape)}")
    if tensor.datatype != "BYTES":
        return list(tensor.values)
    try:
        return [value.decode("utf-8") for value in tensor.values]
    except UnicodeDecodeError:
        refuse(tensor.name, "is not valid UTF-8")


def as_int(name: str, value: Any) -> int:
    """An integer."""
    value = _single(name, value)
    if isinstance(value, str):
        value = _parsed(name, value, int)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(name, f"must be a whole number, not {_shown(value)}")
    return value


def as_float(name: str, value: Any) -> float:
    """A number."""
    value = _single(name, value)
    if isinstance(value, str):
        value = _parsed(name, value, float)
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(name, f"must be a number, not {_shown(value)}")
    try:
        return float(value)
    except OverflowError:
        refuse(name, "must be a number of at most 308 digits")


def as_bool(name: str, value: Any) -> bool:
    """A boolean."""
    value = _single(name, value)
    known = WORDS.get(str(value).lower()) if isinstance(value, str | int) else None
    if known is None:
        refuse(name, f"must be true or false, not {_shown(value)}")
    return known


def as_text(name: str, value: Any) -> str:
    """A string."""
    value = _single(name, value)
    if not isinstance(value, str):
        refuse(name, f"must be a text, not {_shown(value)}")
    return value


def as_name(name: str, value: Any) -> str:
    """A name, which may be a number."""
    return str(_single(name, value))


def as_texts(name: str, value: Any) -> list[str]:
    """A list of strings; a single one may be given without a list."""
    return [as_text(name, item) for item in (value if isinstance(value, list) else [value])]


def as_ints(name: str, value: Any) -> list[int]:
    """A list of integers; a single one may be given without a list."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value  # fast path for long prompts
    return [as_int(name, item) for item in (value if isinstance(value, list) else [value])]


def as_biases(name: str, value: Any) -> dict[int, float]:
    """Logit biases by token id."""
    if not isinstance(value, Mapping):
        refuse(name, "must be an object of token ids and biases, in sampling_parameters")
    if len(value) > MAX_LOGIT_BIASES:
        refuse(name, f"must have at most {MAX_LOGIT_BIASES} entries, not {len(value)}")
    return {as_int(name, key): as_float(name, bias) for key, bias in value.items()}


def refuse(name: str, what: str) -> Never:
    """Raises InvalidArgumentError with the message "`name` `what`"."""
    raise InvalidArgumentError(f"{name[:MAX_TEXT]} {what}", field=name[:MAX_TEXT])


def _single(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        refuse(name, f"must have one element, not {len(value)}")
    return value[0]


def _parsed(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    if len(text) > MAX_TEXT:
        refuse(name, f"must be a number, not {_shown(text)}")
    try:
        return kind(text)
    except ValueError:
        refuse(name, f"must be a number, not {_shown(text)}")


def _shown(value: Any) -> str:
    # Cut before it is rendered: a large value takes long, and an integer of thousands of digits cannot be.
    if isinstance(value, int) and value.bit_length() > MAX_TEXT:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value[:MAX_TEXT] if isinstance(value, str | bytes) else value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
