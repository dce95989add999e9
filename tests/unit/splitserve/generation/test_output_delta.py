"""Contiguous deltas of one answer are merged, and nothing else is."""

from __future__ import annotations

from collections import deque
from typing import Any

from splitserve.generation.output_delta import MERGE_TOKENS, extend_output, take_merged
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
    failed = decode_pb2.Failure(reason="DEADLINE_EXCEEDED")
    for news in ({"admit_ms": 1.0}, {"admitted": True}, {"failure": failed}, {"local_prefill": {}}):
        assert not extend_output(output(3), output(4, **news))


def deltas(*outputs: decode_pb2.SequenceOutput) -> deque[generation_pb2.OutputDelta]:
    return deque(made.delta for made in outputs)


def test_a_run_is_taken_off_the_front_as_one() -> None:
    last = output(3)
    last.delta.finish_reason = generation_pb2.FINISH_REASON_STOP
    pending = deltas(output(0), output(1, 2), last, output(9))
    taken = take_merged(pending)
    assert (list(taken.token_ids), taken.text) == ([0, 1, 2, 3], "xxxx")
    assert taken.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert [delta.first_position for delta in pending] == [9]


def test_a_run_is_no_longer_than_it_may_be() -> None:
    pending = deltas(output(0, 3), output(3, 3), output(6, 3))
    assert len(take_merged(pending, max_tokens=7).token_ids) == 6
    assert len(take_merged(pending, max_tokens=7).token_ids) == 3
    assert not pending
