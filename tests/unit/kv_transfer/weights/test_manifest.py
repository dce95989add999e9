"""The list of tensors: its bounds on the wire, and the pieces."""

from __future__ import annotations

import pytest

from kv_transfer.weights import manifest as module
from kv_transfer.weights.manifest import (
    MAX_AXES,
    MAX_FINGERPRINT,
    MAX_NAME,
    PLAIN,
    Manifest,
    TensorSpec,
    WeightsForm,
    WeightsPiece,
    pieces,
)
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.v1 import weights_pb2 as pb

INT8 = WeightsForm("int8", "configuration")
SPECS = (TensorSpec("a", (3, 5), "float32"), TensorSpec("b", (), "int64"), TensorSpec("c", (0,), "bool"))


def test_the_wire_form_and_back() -> None:
    manifest = Manifest("f" * 64, "agent", SPECS)
    assert Manifest.from_proto(manifest.to_proto()) == manifest
    assert manifest.num_bytes == 68


def test_the_wire_form_of_quantized_weights_and_back() -> None:
    manifest = Manifest("f" * 64, "agent", SPECS, INT8, "c" * 64)
    assert Manifest.from_proto(manifest.to_proto()) == manifest


@pytest.mark.parametrize(
    ("manifest", "form", "why"),
    [
        (Manifest("f", "agent", SPECS), INT8, "quantization is 'none' at the giver, 'int8' here"),
        (Manifest("f", "agent", SPECS, INT8, "content"), PLAIN, "quantization is 'int8' at the giver"),
        (Manifest("f", "agent", SPECS, WeightsForm("int4"), "content"), INT8, "quantization is 'int4'"),
        (Manifest("f", "agent", SPECS, INT8), INT8, "does not say what its quantized weights are"),
        (Manifest("", "agent", SPECS, INT8, "content"), INT8, "does not say what its quantized weights"),
        (Manifest("f", "agent", SPECS, WeightsForm("none", "d")), WeightsForm("none", "c"), "configuration"),
    ],
)
def test_weights_of_another_form_are_refused(manifest: Manifest, form: WeightsForm, why: str) -> None:
    with pytest.raises(FailedPreconditionError, match=why) as caught:
        manifest.require_same(SPECS, form)
    assert caught.value.reason == "WEIGHTS_MISMATCH"


def test_a_configuration_that_is_not_known_is_no_other() -> None:
    Manifest("f", "agent", SPECS).require_same(SPECS, WeightsForm("none", "c"))
    Manifest("f", "agent", SPECS, INT8, "content").require_same(SPECS, INT8)


@pytest.mark.parametrize("field", ["quantization", "configuration_fingerprint"])
def test_a_long_text_is_refused(field: str) -> None:
    message = pb.WeightsManifest(**{field: "x" * (MAX_FINGERPRINT + 1)})
    with pytest.raises(InvalidArgumentError) as caught:
        Manifest.from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "f" * 63, "f" * 65, "F" * 64, "g" * 64, "f" * 64 + "\n", "\0" * 64])
@pytest.mark.parametrize("field", ["model_fingerprint", "content_fingerprint"])
def test_a_fingerprint_that_no_coordinator_takes_is_refused(field: str, text: str) -> None:
    texts = {"model_fingerprint": "f" * 64, "content_fingerprint": "c" * 64} | {field: text}
    message = pb.WeightsManifest(quantization="int8", **texts)  # type: ignore[arg-type]
    if text or field == "model_fingerprint":
        with pytest.raises(InvalidArgumentError) as caught:
            Manifest.from_proto(message)
        assert caught.value.field == field
    else:
        with pytest.raises(FailedPreconditionError, match="does not say what its quantized weights are"):
            Manifest.from_proto(message).require_same((), WeightsForm("int8"))


def test_pieces_are_of_one_tensor_each() -> None:
    assert list(pieces(SPECS, 32)) == [
        WeightsPiece(SPECS[0], 0, 32),
        WeightsPiece(SPECS[0], 32, 28),
        WeightsPiece(SPECS[1], 0, 8),
    ]


@pytest.mark.parametrize(
    ("field", "tensor"),
    [
        ("tensors.name", pb.WeightTensor(dtype="bool")),
        ("tensors.name", pb.WeightTensor(name="n" * (MAX_NAME + 1), dtype="bool")),
        ("tensors.shape", pb.WeightTensor(name="n", shape=[1] * (MAX_AXES + 1), dtype="bool")),
        ("tensors.shape", pb.WeightTensor(name="n", shape=[2**63, 2], dtype="bool")),
        ("tensors.shape", pb.WeightTensor(name="n", shape=[2**40], dtype="float32")),
        ("tensors.dtype", pb.WeightTensor(name="n", dtype="complex64")),
        ("tensors.dtype", pb.WeightTensor(name="n")),
    ],
)
def test_a_tensor_out_of_bounds_is_refused(field: str, tensor: pb.WeightTensor) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Manifest.from_proto(pb.WeightsManifest(model_fingerprint="f" * 64, tensors=[tensor]))
    assert caught.value.field == field


def test_a_huge_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENSORS", 2)
    with pytest.raises(InvalidArgumentError) as caught:
        Manifest.from_proto(Manifest("f", "a", SPECS).to_proto())
    assert caught.value.field == "tensors"
