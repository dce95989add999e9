"""Operations that compute fewer rows than they were captured with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.cpu.graphs.capture import GraphCaptureError
from engine.backends.cpu.graphs.resizable import Chunk, ResizableOps, RowCounts, StepRows
from engine.backends.cpu.ops import OP, Code, Ops

MANY, FEW = StepRows(decodes=32, total=512, sampled=64), StepRows(decodes=4, total=24, sampled=4)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 576, 9, 3, 64
TOKEN = HEADS * HEAD_DIM
"""Elements from one token's query, or result, to the next one's."""


def captured(rows: StepRows) -> Ops:
    """A norm of hidden states, one of all heads, an attention, an addition over heads, and the output layer."""
    ops = np.zeros(6, OP)
    ops["code"] = Code.RMS_NORM, Code.RMS_NORM, Code.ATTEND, Code.PREFILL, Code.BINARY, Code.LINEAR
    ops["number"][0, :2] = rows.total, HIDDEN
    ops["number"][1, :2] = rows.total * HEADS, HEAD_DIM
    for place, tokens in ((2, rows.decodes), (3, rows.total - rows.decodes)):
        ops["number"][place, :4] = tokens, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM
        ops["pointer"][place] = 10_000, 20_000, 30_000, 40_000, 50_000, 60_000
        ops["stride"][place, :, 1] = TOKEN, HEAD_DIM, 7 * HEAD_DIM
    ops["size"][4] = 1, HEADS, rows.total, HEAD_DIM
    ops["stride"][4, 0] = 0, rows.total * HEAD_DIM, HEAD_DIM, 1
    ops["number"][5, :3] = rows.sampled, HIDDEN, 49152
    return ops


def resizable() -> ResizableOps:
    many = captured(MANY)
    return ResizableOps(many, RowCounts.between(many, captured(FEW), MANY, FEW), MANY)


@given(st.integers(1, 32), st.integers(2, 480), st.integers(1, 64))
def test_fewer_rows(decodes: int, tokens: int, sampled: int) -> None:
    rows = StepRows(decodes, decodes + tokens, sampled)
    ops = resizable().of(rows, [Chunk(decodes, tokens, 77)])
    expected = captured(rows)
    assert ops["size"].tolist() == expected["size"].tolist()
    assert ops["number"].tolist() == expected["number"].tolist()
    strides = captured(MANY)["stride"].tolist()
    assert ops["stride"].tolist() == strides, "what is computed lies where it would"


def test_each_chunk_has_its_own_attention() -> None:
    chunks = [Chunk(2, 30, 700), Chunk(32, 5, 800)]
    ops = resizable().of(StepRows(2, 37, 1), chunks)
    assert ops["code"].tolist() == [
        Code.RMS_NORM,
        Code.RMS_NORM,
        Code.ATTEND,
        Code.PREFILL,
        Code.PREFILL,
        Code.BINARY,
        Code.LINEAR,
    ]
    for op, chunk in zip(ops[3:5], chunks, strict=True):
        moved = 2 * (chunk.begin - MANY.decodes)
        assert op["number"][0] == chunk.tokens
        assert op["pointer"].tolist() == [
            10_000 + moved * TOKEN,
            20_000 + moved * HEAD_DIM,
            30_000 + moved * 7 * HEAD_DIM,
            40_000 + moved * TOKEN,
            50_000,
            chunk.step,
        ]


def test_what_a_step_has_not_is_left_out() -> None:
    made = resizable()
    assert Code.ATTEND not in made.of(StepRows(0, 9, 1), [Chunk(0, 9, 1)])["code"]
    assert Code.LINEAR not in made.of(StepRows(0, 9, 0), [Chunk(0, 9, 1)])["code"]
    decoding = made.of(StepRows(3, 3, 3), [])
    assert Code.PREFILL not in decoding["code"]
    assert made.of(StepRows(4, 4, 4), [])["number"][0, 0] == 4
    assert decoding["number"][0, 0] == 3


@pytest.mark.parametrize(
    ("field", "place", "value"),
    [("code", 0, Code.UNARY), ("real", 0, 0.5), ("number", (5, 1), 8), ("size", (4, 1), 8)],
)
def test_other_differences_are_refused(field: str, place: int | tuple[int, int], value: float) -> None:
    """A threshold by which a model chooses, or a size that grows otherwise than rows do."""
    fewer = captured(FEW)
    fewer[field][place] = value
    with pytest.raises(GraphCaptureError):
        RowCounts.between(captured(MANY), fewer, MANY, FEW)
    with pytest.raises(GraphCaptureError):
        RowCounts.between(captured(MANY), fewer[:-1], MANY, FEW)
