"""Converts tensors of the Open Inference Protocol from and to Python values. Pure.

Elements of tensors are typed (`contents`) or raw: little-endian in row-major order, BYTES elements with a length prefix
of 4 bytes. Every violation raises InvalidArgumentError, which names the tensor.
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
from splitserve.kserve import open_inference_pb2 as pb

MAX_INPUTS = 64
MAX_RANK = 8
MAX_ELEMENTS = 2**20
"""Most elements of a tensor. It matters for shapes that claim more than was sent: messages are bounded before."""
SLICE_ELEMENTS = 2**16
"""Elements that one call converts: one call for MAX_ELEMENTS would hold the interpreter's lock for 30 ms."""
LENGTH = struct.Struct("<I")

_DATATYPES: Mapping[str, tuple[str, str]] = {
    "BOOL": ("?", "bool_contents"),
    "UINT8": ("<u1", "uint_contents"),
    "UINT16": ("<u2", "uint_contents"),
    "UINT32": ("<u4", "uint_contents"),
    "UINT64": ("<u8", "uint64_contents"),
    "INT8": ("<i1", "int_contents"),
    "INT16": ("<i2", "int_contents"),
    "INT32": ("<i4", "int_contents"),
    "INT64": ("<i8", "int64_contents"),
    "FP16": ("<f2", ""),
    "FP32": ("<f4", "fp32_contents"),
    "FP64": ("<f8", "fp64_contents"),
    "BYTES": ("", "bytes_contents"),
}
"""By datatype, numpy's code of raw elements and the field of typed ones; empty: there is no such form."""


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
        contents = getattr(output.contents, _DATATYPES[tensor.datatype][1])
        contents.extend(tensor.values)
    elif tensor.datatype == "BYTES":
        response.raw_output_contents.append(_packed(tensor.values))
    else:
        elements = np.array(tensor.values, dtype=_DATATYPES[tensor.datatype][0])
        response.raw_output_contents.append(elements.tobytes())


def _read(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    name, datatype = tensor.name, tensor.datatype
    if len(tensor.shape) > MAX_RANK:
        _fail(name, f"input {name[:64]!r} must have a shape of at most {MAX_RANK} dimensions")
    shape, claimed = tuple(tensor.shape), math.prod(tensor.shape)
    if datatype not in _DATATYPES:
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
    field = _DATATYPES[tensor.datatype][1]
    if not field:
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
    kind = np.dtype(_DATATYPES[datatype][0])
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


MAX_TEXT = 64
"""Most characters of a number as text, and of a name in an error."""


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


def refuse(name: str, problem: str) -> Never:
    """Raises InvalidArgumentError for a setting, with its name before the problem, such as "must be a number"."""
    raise InvalidArgumentError(f"{name[:MAX_TEXT]} {problem}", field=name[:MAX_TEXT])
