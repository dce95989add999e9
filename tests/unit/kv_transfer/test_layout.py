"""Whose KV fits whose, where engines store it in different orders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.layout import KvLayout
from splitserve.errors import FailedPreconditionError

OURS = KvLayout("f" * 64, "bfloat16", block_size_tokens=32, num_layers=2, num_kv_heads=4, head_dim=8)
WHO = "decode worker w"


def refusal(mine: KvLayout, theirs: KvLayout) -> FailedPreconditionError:
    with pytest.raises(FailedPreconditionError) as raised:
        mine.require_fits(theirs, who=WHO)
    assert raised.value.reason == "LAYOUT_MISMATCH"
    assert WHO in raised.value.message
    return raised.value


@pytest.mark.parametrize(
    "changes",
    [
        {"model_fingerprint": "a" * 64},
        {"dtype": "float32"},
        {"block_size_tokens": 64},
        {"num_layers": 3},
        {"num_kv_heads": 2},
        {"head_dim": 16},
        {"engine_version": "vllm-0.32.0"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_field_that_differs_is_refused_by_its_name(changes: dict[str, object]) -> None:
    ((field, value),) = changes.items()
    other = replace(OURS, **changes)  # type: ignore[arg-type]
    for mine, theirs in ((OURS, other), (other, OURS)):
        error = refusal(mine, theirs)
        assert error.field == field
        assert str(value) in error.message


def test_another_order_is_refused_whatever_else_differs() -> None:
    opaque = replace(OURS, model_fingerprint="a" * 64, axis_order="vllm:x", block_size_tokens=64)
    for mine, theirs in ((OURS, opaque), (opaque, OURS)):
        error = refusal(mine, theirs)
        assert error.field == "axis_order"
        assert mine.axis_order in error.message
        assert theirs.axis_order in error.message
