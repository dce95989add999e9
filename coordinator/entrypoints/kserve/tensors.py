"""Converts tensors and settings of the Open Inference Protocol from and to Python values. Pure.

Elements of tensors are typed (`contents`) or raw: little-endian in row-major order, BYTES elements with a length prefix
of 4 bytes. A setting is given as a tensor, as a request parameter or in JSON. Clients of Triton send numbers as
numbers, as tensors with one element and as text: all of these are accepted, but only if they convert exactly. Every
violation raises InvalidArgumentError, which names the tensor or the setting.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never

import numpy as np

from splitserve.errors import InvalidArgumentError
from splitserve.generation.bounds import MAX_LOGIT_BIASES
from splitserve.kserve import open_inference_pb2 as pb

MAX_INPUTS = 64
MAX_RANK = 8
MAX_ELEMENTS = 2**20
"""Most elements of a tensor. It matters for shapes that claim more than was sent: messages are bounded before."""
SLICE_ELEMENTS = 2**16
"""Elements that one call converts: one call for MAX_ELEMENTS would hold the interpreter's lock for 30 ms."""
LENGTH = struct.Struct("<I")

_RAW_TYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?",
        "UINT8": "<u1",
        "UINT16": "<u2",
        "UINT32": "<u4",
        "UINT64": "<u8",
        "INT8": "<i1",
        "INT16": "<i2",
        "INT32": "<i4",
        "INT64": "<i8",
        "FP16": "<f2",
        "FP32": "<f4",
        "FP64": "<f8",
    }.items()
}
_CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor with its elements in row-major order: `bytes` for BYTES, otherwise numbers or booleans."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


def read_inputs(request: pb.ModelInferRequest) -> dict[str, Tensor]:
    """The request's tensors by name. Raises InvalidArgumentError."""
    inputs, raw = request.inputs, request.raw_input_contents
    if len(inputs) > MAX_INPUTS:
        _fail("inputs", f"inputs may hold {MAX_INPUTS} tensors, not {len(inputs)}")
    if raw and len(raw) != len(inputs):
        _fail("raw_input_contents", f"raw_input_contents has {len(raw)} entries for {len(inputs)} inputs")
    tensors: dict[str, Tensor] = {}
    for number, tensor in enumerate(inputs):
        if tensor.name in tensors:
            _fail(tensor.name, f"input {tensor.name[:64]!r} is given twice")
        tensors[tensor.name] = _read(tensor, raw[number] if raw else None)
    return tensors


def add_output(response: pb.ModelInferResponse, tensor: Tensor, raw: bool) -> None:
    """Appends a tensor to a response. All outputs of a response must be raw, or all typed."""
    output = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    if not raw:
        contents = getattr(output.contents, _CONTENTS[tensor.datatype])
        contents.extend(tensor.values)
    elif tensor.datatype == "BYTES":
        response.raw_output_contents.append(_packed(tensor.values))
    else:
        elements = np.array(tensor.values, dtype=_RAW_TYPES[tensor.datatype])
        response.raw_output_contents.append(elements.tobytes())


def _read(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    name, datatype = tensor.name, tensor.datatype
    if len(tensor.shape) > MAX_RANK:
        _fail(name, f"input {name[:64]!r} must have a shape of at most {MAX_RANK} dimensions")
    shape, claimed = tuple(tensor.shape), math.prod(tensor.shape)
    if datatype not in _RAW_TYPES and datatype != "BYTES":
        _fail(name, f"input {name[:64]!r} has an unknown datatype: {datatype[:16]!r}")
    if any(key.startswith("shared_memory") for key in tensor.parameters):
        _fail(name, f"input {name[:64]!r}: shared memory is not supported")
    if any(length < 0 for length in shape) or claimed > MAX_ELEMENTS:
        _fail(name, f"input {name[:64]!r} must have a shape of at most {MAX_ELEMENTS} elements")
    if raw is not None and tensor.HasField("contents"):
        _fail(name, f"input {name[:64]!r} has both contents and an entry in raw_input_contents")
    values = _typed(tensor, claimed) if raw is None else _unpacked(name, datatype, raw, claimed)
    return Tensor(name, datatype, shape, values)


def _typed(tensor: pb.ModelInferRequest.InferInputTensor, claimed: int) -> Sequence[Any]:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        _fail(tensor.name, f"input {tensor.name[:64]!r}: {tensor.datatype} must come in raw_input_contents")
    elements = getattr(tensor.contents, field)
    _require_count(tensor.name, len(elements), claimed)
    values: list[Any] = []
    for start in range(0, claimed, SLICE_ELEMENTS):
        values += elements[start : start + SLICE_ELEMENTS]
    return values


def _unpacked(name: str, datatype: str, raw: bytes, claimed: int) -> Sequence[Any]:
    if datatype == "BYTES":
        strings = list(itertools.islice(_strings(name, raw), claimed + 1))
        _require_count(name, len(strings), claimed)
        return strings
    kind = _RAW_TYPES[datatype]
    if len(raw) % kind.itemsize:
        _fail(name, f"input {name[:64]!r}: {len(raw)} bytes are no whole number of {datatype}")
    elements = np.frombuffer(raw, dtype=kind)
    _require_count(name, len(elements), claimed)
    values: list[Any] = []
    for start in range(0, claimed, SLICE_ELEMENTS):
        values += elements[start : start + SLICE_ELEMENTS].tolist()
    return values


def _require_count(name: str, count: int, claimed: int) -> None:
    if count != claimed:
        _fail(name, f"input {name[:64]!r} must have the {claimed} elements of its shape, not {count}")


def _strings(name: str, raw: bytes) -> Iterable[bytes]:
    start = 0
    while start < len(raw):
        body = start + LENGTH.size
        end = body + LENGTH.unpack_from(raw, start)[0] if body <= len(raw) else body
        if end > len(raw):
            _fail(name, f"input {name[:64]!r}: an element is longer than what was sent")
        yield raw[body:end]
        start = end


def _packed(values: Sequence[bytes]) -> bytes:
    return b"".join(LENGTH.pack(len(value)) + value for value in values)


def _fail(field: str, message: str) -> Never:
    raise InvalidArgumentError(message, reason="BAD_TENSOR", field=field[:64])


WORDS = {"true": True, "1": True, "false": False, "0": False}
MAX_TEXT = 64
"""Most characters of an invalid value in an error."""


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


def as_stops(name: str, value: Any) -> list[str]:
    """Stop strings: one, a list, or a list in a list, as in Triton's `stop_words`. Empty strings are padding."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    texts = [as_text(name, item) for item in (value if isinstance(value, list) else [value])]
    return [text for text in texts if text]


def as_ints(name: str, value: Any) -> list[int]:
    """A list of integers; a single one may be given without a list."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value  # as `as_int` of each, but fast for long prompts
    return [as_int(name, item) for item in (value if isinstance(value, list) else [value])]


def as_biases(name: str, value: Any) -> dict[int, float]:
    """Logit biases by token id."""
    if not isinstance(value, Mapping):
        refuse(name, "must be an object of token ids and biases, in sampling_parameters")
    if len(value) > MAX_LOGIT_BIASES:
        refuse(name, f"must have at most {MAX_LOGIT_BIASES} entries, not {len(value)}")
    return {as_int(name, key): as_float(name, bias) for key, bias in value.items()}


def refuse(name: str, problem: str) -> Never:
    """Raises InvalidArgumentError for a setting, with its name before the problem, such as "must be a number"."""
    raise InvalidArgumentError(f"{name[:MAX_TEXT]} {problem}", field=name[:MAX_TEXT])


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
    # The value is cut first: a large one takes long to render, and Python renders no integer of thousands of digits.
    if isinstance(value, int) and value.bit_length() > MAX_TEXT:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value[:MAX_TEXT] if isinstance(value, str | bytes) else value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
