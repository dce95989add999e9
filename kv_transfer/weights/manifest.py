"""What weights are sent, and in which pieces. Pure.

The taker knows from its own configuration which tensors its model has. It allocates nothing until the giver's list is
exactly that, so no list can make it take more memory than its model does.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from kv_transfer.layout import NO_QUANTIZATION, KvLayout
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.v1 import weights_pb2 as pb

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
MAX_TENSORS = 2**17
MAX_NAME = 512
MAX_FINGERPRINT = 128
DIGEST = re.compile(r"[0-9a-f]{64}\Z")
MAX_AXES = 8
MAX_TENSOR_BYTES = 2**40
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2**12, 2**24
MAX_WINDOW_BLOCKS = 64
PULL_S = 6 * 3600.0
"""Longest time in seconds of all attempts of a taker, and of one pull at its giver. Both end what makes no progress."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name in the model, its shape, and its element type, a key of `ELEMENT_BYTES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightsForm:
    """What weights are besides names, shapes and types."""

    quantization: str = NO_QUANTIZATION
    """As `KvLayout.quantization`."""
    configuration: str = ""
    """Fingerprint of the model's configuration; empty: not known."""


PLAIN = WeightsForm()


class WeightsReader(ABC):
    """The weights of a running model. For one thread at a time, whichever that is; nobody changes them meanwhile."""

    fingerprint: str
    """As `KvLayout.model_fingerprint`."""
    form: WeightsForm = PLAIN
    content: str = ""
    """Fingerprint of quantized weights, from which that of the model cannot be computed; empty: they are not."""
    specs: Sequence[TensorSpec]
    """All of them, in the order in which they are sent."""

    @abstractmethod
    def read(self, spec: TensorSpec, start: int, count: int) -> memoryview:
        """`count` bytes of a tensor from byte `start` on, in host memory; valid until the next call."""

    @abstractmethod
    def rest(self) -> None:
        """Frees what it keeps from one read to the next: a pull has ended."""


class WeightsPiece(NamedTuple):
    """What one write carries: `size` bytes from byte `start` of a tensor."""

    spec: TensorSpec
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one pull carries."""

    fingerprint: str
    agent_id: str
    """Of the transport that writes."""
    specs: tuple[TensorSpec, ...]
    form: WeightsForm = PLAIN
    content: str = ""
    """As of `WeightsReader`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)

    def to_proto(self) -> pb.WeightsManifest:
        """The wire form."""
        tensors = [pb.WeightTensor(name=spec.name, shape=spec.shape, dtype=spec.dtype) for spec in self.specs]
        return pb.WeightsManifest(
            model_fingerprint=self.fingerprint,
            agent_id=self.agent_id,
            tensors=tensors,
            quantization="" if self.form.quantization == NO_QUANTIZATION else self.form.quantization,
            configuration_fingerprint=self.form.configuration,
            content_fingerprint=self.content,
        )

    @classmethod
    def from_proto(cls, message: pb.WeightsManifest) -> Manifest:
        """The inverse of `to_proto`. Raises InvalidArgumentError naming field and bound."""
        _bound(len(message.tensors) <= MAX_TENSORS, "tensors", f"at most {MAX_TENSORS}")
        texts = {
            "quantization": message.quantization,
            "configuration_fingerprint": message.configuration_fingerprint,
        }
        for field, text in texts.items():
            _bound(len(text) <= MAX_FINGERPRINT, field, f"at most {MAX_FINGERPRINT} characters")
        # The taker of quantized weights registers with them: no coordinator takes other texts.
        model, content = message.model_fingerprint, message.content_fingerprint
        _bound(bool(DIGEST.match(model)), "model_fingerprint", "64 hex digits")
        _bound(not content or bool(DIGEST.match(content)), "content_fingerprint", "empty or 64 hex digits")
        return cls(
            model,
            message.agent_id,
            tuple(map(_spec, message.tensors)),
            WeightsForm(message.quantization or NO_QUANTIZATION, message.configuration_fingerprint),
            content,
        )

    def require_same(self, expected: Sequence[TensorSpec], form: WeightsForm = PLAIN) -> None:
        """Raises FailedPreconditionError (WEIGHTS_MISMATCH), naming the quantization, the configuration, or the first
        tensor that is missing, unexpected, or differs from what the taker's own settings demand. The order is the
        giver's. A giver that does not know its configuration's fingerprint is of an older version."""
        own_kind, kind = form.quantization, self.form.quantization
        if own_kind != kind:
            raise _mismatch(f"quantization is {kind!r} at the giver, {own_kind!r} here")
        if kind != NO_QUANTIZATION and not (self.fingerprint and self.content):
            raise _mismatch("the giver does not say what its quantized weights are")
        configurations = {self.form.configuration, form.configuration} - {""}
        if len(configurations) > 1:
            raise _mismatch("the model's configuration is another one at the giver")
        wanted = {spec.name: spec for spec in expected}
        seen = set[str]()
        for spec in self.specs:
            own = wanted.get(spec.name)
            if own is None:
                raise _mismatch(f"the giver has a tensor {spec.name!r}, this model has none")
            if spec.name in seen:
                raise _mismatch(f"the giver names tensor {spec.name!r} twice")
            seen.add(spec.name)
            if own != spec:
                raise _mismatch(
                    f"tensor {spec.name!r} is {spec.dtype} {list(spec.shape)} at the giver, "
                    f"{own.dtype} {list(own.shape)} here"
                )
        for name in wanted:
            if name not in seen:
                raise _mismatch(f"the giver lacks tensor {name!r}")


def pieces(specs: Sequence[TensorSpec], piece_bytes: int) -> Iterator[WeightsPiece]:
    """The pieces of tensors, in order, each of `piece_bytes` at most and of one tensor. Empty tensors have none."""
    for spec in specs:
        for start in range(0, size := spec.num_bytes, piece_bytes):
            yield WeightsPiece(spec, start, min(piece_bytes, size - start))


def window_layout(piece_bytes: int) -> KvLayout:
    """The layout of memory through which weights pass: blocks of `piece_bytes`, an even number. It is no KV's, so that
    a transport connects it with nothing else."""
    return KvLayout("weights", "uint8", 1, 1, 1, piece_bytes // 2, axis_order="weights")


def _spec(tensor: pb.WeightTensor) -> TensorSpec:
    _bound(1 <= len(tensor.name) <= MAX_NAME, "tensors.name", f"1..{MAX_NAME} characters")
    _bound(len(tensor.shape) <= MAX_AXES, "tensors.shape", f"at most {MAX_AXES} axes")
    _bound(tensor.dtype in ELEMENT_BYTES, "tensors.dtype", f"one of {', '.join(ELEMENT_BYTES)}")
    spec = TensorSpec(tensor.name, tuple(tensor.shape), tensor.dtype)
    _bound(spec.num_bytes <= MAX_TENSOR_BYTES, "tensors.shape", f"at most {MAX_TENSOR_BYTES} bytes")
    return spec


def _bound(holds: bool, field: str, bound: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{field} must be {bound}", field=field)


def _mismatch(why: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"weights of a peer: {why}", reason="WEIGHTS_MISMATCH")
