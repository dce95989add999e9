"""Converts tensors of the Open Inference Protocol from and to Python values. Pure.

Elements are typed (`contents`) or raw: little-endian in row-major order, BYTES elements with a length prefix of 4
bytes. Every violation is an InvalidArgumentError naming the tensor.
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
"""Elements per tensor. The message limit comes first, except for shapes that claim more than was sent."""
SLICE_ELEMENTS = 2**16
"""Elements that are converted at once: one call for all would keep the interpreter to itself for 30 ms."""
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
    found: dict[str, Tensor] = {}
    for number, tensor in enumerate(inputs):
        if tensor.name in found:
            _fail(tensor.name, f"input {tensor.name[:64]!r} is given twice")
        found[tensor.name] = _read(tensor, raw[number] if raw else None)
    return found


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
    shape = tuple(tensor.shape)
    if datatype not in _RAW_TYPES and datatype != "BYTES":
        _fail(name, f"input {name[:64]!r} has an unknown datatype: {datatype[:16]!r}")
    if any(key.startswith("shared_memory") for key in tensor.parameters):
        _fail(name, f"input {name[:64]!r}: shared memory is not supported")
    if any(length < 0 for length in shape) or math.prod(shape) > MAX_ELEMENTS:
        _fail(name, f"input {name[:64]!r} must have a shape of at most {MAX_ELEMENTS} elements")
    if raw is not None and tensor.HasField("contents"):
        _fail(name, f"input {name[:64]!r} has both contents and an entry in raw_input_contents")
    claimed = math.prod(shape)
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
