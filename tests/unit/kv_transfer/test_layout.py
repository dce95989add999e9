"""Whose KV fits whose, where engines store it in different orders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.layout import (
    AXIS_ORDER,
    CONVERTED_ORDERS,
    FP8_E4M3,
    HEADS_OUTERMOST,
    INT8,
    KEYS_BY_DIM,
    MAX_NAME,
    KvLayout,
)
from splitserve.errors import FailedPreconditionError

OURS = KvLayout("f" * 64, "bfloat16", block_size_tokens=32, num_layers=2, num_kv_heads=4, head_dim=8)
THEIRS = replace(OURS, axis_order=KEYS_BY_DIM)
WHO = "decode worker w"


def refusal(mine: KvLayout, theirs: KvLayout) -> FailedPreconditionError:
    with pytest.raises(FailedPreconditionError) as raised:
        mine.require_fits(theirs, who=WHO)
    assert raised.value.reason == "LAYOUT_MISMATCH"
    assert WHO in raised.value.message
    return raised.value


def test_orders_that_are_converted_fit_each_other_and_are_names() -> None:
    assert {AXIS_ORDER, KEYS_BY_DIM} == CONVERTED_ORDERS
    assert all(0 < len(order) <= MAX_NAME for order in CONVERTED_ORDERS)
    for mine, theirs in ((OURS, THEIRS), (THEIRS, OURS)):
        mine.require_fits(theirs, who=WHO)
        assert mine.is_converted_for(theirs)
        assert not mine.is_converted_for(mine)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_fingerprint": "a" * 64},
        {"dtype": "float32"},
        {"block_size_tokens": 16},
        {"num_layers": 3},
        {"num_kv_heads": 2},
        {"head_dim": 16},
        {"tensor_parallel_size": 2},
        {"engine_version": "vllm-0.32.0"},
        {"wire_dtype": FP8_E4M3},
        {"quantization": "int8"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_nothing_but_the_order_may_differ_with_it(changes: dict[str, object]) -> None:
    ((field, value),) = changes.items()
    other = replace(THEIRS, **changes)  # type: ignore[arg-type]
    for mine, theirs in ((OURS, other), (other, OURS)):
        error = refusal(mine, theirs)
        assert error.field == field
        assert str(value) in error.message
        assert "another axis_order" in error.message


def test_int8_blocks_hold_a_scale_for_each_vector_and_fit_only_their_like() -> None:
    narrow = replace(OURS, dtype=INT8)
    assert narrow.block_bytes == 2 * 2 * 4 * 32 * (8 + 2)
    assert narrow.block_bytes == OURS.block_bytes // 2 + narrow.block_vectors * 2
    for mine, theirs in ((OURS, narrow), (narrow, OURS)):
        assert refusal(mine, theirs).field == "dtype"
    smaller = refusal(narrow, replace(narrow, block_size_tokens=16))
    assert smaller.field == "block_size_tokens"
    assert "dtype 'int8' cannot be divided by tokens" in smaller.message
    assert refusal(narrow, replace(narrow, axis_order=KEYS_BY_DIM)).field == "axis_order"
    narrow.require_fits(narrow, who=WHO)
    assert KvLayout.from_proto(narrow.to_proto()) == narrow


@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"wire_dtype": FP8_E4M3}])
def test_ranks_and_narrow_blocks_are_not_converted(changes: dict[str, object]) -> None:
    ((field, _),) = changes.items()
    mine, theirs = replace(OURS, **changes), replace(THEIRS, **changes)  # type: ignore[arg-type]
    assert refusal(mine, theirs).field == field
    assert refusal(theirs, mine).field == field


def test_an_order_that_only_its_engine_knows_is_refused_whatever_else_differs() -> None:
    opaque = replace(
        OURS, model_fingerprint="a" * 64, axis_order=f"vllm:x{HEADS_OUTERMOST}", block_size_tokens=64
    )
    for mine in (OURS, THEIRS):
        error = refusal(mine, opaque)
        assert error.field == "axis_order"
        assert mine.axis_order in error.message
        assert opaque.axis_order in error.message
        assert not mine.is_converted_for(opaque)
