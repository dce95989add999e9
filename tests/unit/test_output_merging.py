"""Neighbouring pieces of one answer become one, and nothing else does."""

from __future__ import annotations

from typing import Any

from decode_worker.output_streams import OutputStream
from splitserve.output_merging import MERGE_TOKENS, extend_output
from splitserve.v1 import decode_pb2, generation_pb2


def output(position: int, count: int = 1, request_id: str = "r", **fields: Any) -> decode_pb2.SequenceOutput:
    tokens = list(range(position, position + count))
    delta = generation_pb2.OutputDelta(first_position=position, token_ids=tokens, text="x" * count)
    return decode_pb2.SequenceOutput(request_id=request_id, delta=delta, **fields)


def test_neighbours_join_with_the_last_ones_finish_reason() -> None:
    first, second = output(3), output(4, 2)
    second.delta.finish_reason = generation_pb2.FINISH_REASON_LENGTH
    assert extend_output(first, second)
    assert (list(first.delta.token_ids), first.delta.text) == ([3, 4, 5], "xxx")
    assert first.delta.finish_reason == generation_pb2.FINISH_REASON_LENGTH


def test_what_does_not_follow_on_directly_stays_apart() -> None:
    ended = output(3)
    ended.delta.finish_reason = generation_pb2.FINISH_REASON_STOP
    assert not extend_output(output(3), output(5))
    assert not extend_output(output(3), output(3))
    assert not extend_output(ended, output(4))
    assert not extend_output(output(0, MERGE_TOKENS), output(MERGE_TOKENS))


def test_news_besides_tokens_is_not_merged_away() -> None:
    failed = decode_pb2.Failure(reason="LEASE_EXPIRED")
    for news in ({"admit_ms": 1.0}, {"admitted": True}, {"failure": failed}, {"local_prefill": {}}):
        assert not extend_output(output(3), output(4, **news))


async def test_a_stream_that_is_not_read_merges_by_request() -> None:
    stream = OutputStream()
    stream.put([output(1), output(7, request_id="s")])
    stream.put([output(2), output(8, request_id="s")])
    batches = stream.batches()
    assert [list(o.delta.token_ids) for o in await anext(batches)] == [[1, 2], [7, 8]]
    stream.put([output(3)])
    assert [list(o.delta.token_ids) for o in await anext(batches)] == [[3]]
    await batches.aclose()  # type: ignore[attr-defined]
