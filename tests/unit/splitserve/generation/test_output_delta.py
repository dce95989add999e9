"""Contiguous deltas of one answer are merged, and nothing else is."""

from __future__ import annotations

from collections import deque

from splitserve.generation.output_delta import MERGE_TOKENS, TokenDelta, news_of, take_merged
from splitserve.v1 import decode_pb2, generation_pb2, inference_pb2

LENGTH, STOP = generation_pb2.FINISH_REASON_LENGTH, generation_pb2.FINISH_REASON_STOP


def delta(position: int, count: int = 1) -> TokenDelta:
    return TokenDelta(position, list(range(position, position + count)), "x" * count)


def test_neighbours_join_with_the_last_ones_finish_reason() -> None:
    first, second = delta(3), delta(4, 2)
    second.finish_reason = LENGTH
    second.logprobs = [generation_pb2.TokenLogprob(token_id=4), generation_pb2.TokenLogprob(token_id=5)]
    assert first.extend(second)
    assert (first.token_ids, first.text, first.finish_reason) == ([3, 4, 5], "xxx", LENGTH)
    assert len(first.logprobs) == 2


def test_what_does_not_follow_on_directly_stays_apart() -> None:
    ended = delta(3)
    ended.finish_reason = STOP
    assert not delta(3).extend(delta(5))
    assert not delta(3).extend(delta(3))
    assert not ended.extend(delta(4))
    assert not delta(0, MERGE_TOKENS).extend(delta(MERGE_TOKENS))


def test_a_message_that_says_more_than_a_delta_stays_one() -> None:
    failure = decode_pb2.Failure(reason="DEADLINE_EXCEEDED")
    for more in ({"admit_ms": 1.0}, {"admitted": True}, {"failure": failure}, {"local_prefill": {}}):
        message = decode_pb2.SequenceOutput(delta=delta(4).to_proto(), **more)
        assert news_of(message) is message
    plain = decode_pb2.SequenceOutput(delta=delta(4, 2).to_proto())
    assert news_of(plain) == delta(4, 2)
    plain.delta.finish_reason = generation_pb2.FINISH_REASON_ABORT
    assert news_of(plain) is plain


def test_a_delta_and_its_message_are_the_same() -> None:
    scored = TokenDelta(
        7,
        [1],
        "é",
        STOP,
        [generation_pb2.TokenLogprob(token_id=1, logprob=-0.5)],
        generation_pb2.PromptLogprobs(token_ids=[3], logprobs=[-1.0]),
    )
    for one in (delta(0), scored, TokenDelta(0, [])):
        assert TokenDelta.of(one.to_proto()) == one
        response = inference_pb2.GenerateResponse()
        one.write_to(response.delta)
        assert response == inference_pb2.GenerateResponse(delta=one.to_proto())
        assert response.HasField("delta")


def test_a_run_is_taken_off_the_front_as_one() -> None:
    last = delta(3)
    last.finish_reason = STOP
    pending = deque([delta(0), delta(1, 2), last, delta(9)])
    taken = take_merged(pending)
    assert (taken.token_ids, taken.text, taken.finish_reason) == ([0, 1, 2, 3], "xxxx", STOP)
    assert [waiting.first_position for waiting in pending] == [9]


def test_a_run_is_no_longer_than_it_may_be() -> None:
    pending = deque([delta(0, 3), delta(3, 3), delta(6, 3)])
    assert len(take_merged(pending, max_tokens=7).token_ids) == 6
    assert len(take_merged(pending, max_tokens=7).token_ids) == 3
    assert not pending
