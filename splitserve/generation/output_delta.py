"""Merges contiguous output deltas of one request, on workers and coordinators."""

from __future__ import annotations

from collections import deque

from splitserve.v1 import decode_pb2, generation_pb2

MERGE_TOKENS = 128
"""Maximum number of tokens in a merged delta; each merge copies its text."""


def extend_delta(
    into: generation_pb2.OutputDelta, delta: generation_pb2.OutputDelta, max_tokens: int = MERGE_TOKENS
) -> bool:
    """Appends `delta` to `into` if it is contiguous and fits in `max_tokens`; returns whether it did."""
    count = len(into.token_ids)
    if delta.first_position != into.first_position + count or into.finish_reason:
        return False
    if count + len(delta.token_ids) > max_tokens:
        return False
    into.token_ids.extend(delta.token_ids)
    into.text += delta.text
    if delta.logprobs:
        into.logprobs.extend(delta.logprobs)
    into.finish_reason = delta.finish_reason
    return True


def without_output(delta: generation_pb2.OutputDelta) -> generation_pb2.OutputDelta:
    """The first delta of an answer as the only one of an answer of no tokens."""
    reason = generation_pb2.FINISH_REASON_LENGTH
    return generation_pb2.OutputDelta(finish_reason=reason, prompt_logprobs=delta.prompt_logprobs)


def extend_output(into: decode_pb2.SequenceOutput, output: decode_pb2.SequenceOutput) -> bool:
    """Appends an output to the previous one of the same request if both hold only a delta; returns whether it did."""
    if output.admitted or into.admitted or output.HasField("failure") or into.HasField("failure"):
        return False
    if output.HasField("admit_ms") or output.HasField("local_prefill"):
        return False
    return extend_delta(into.delta, output.delta)


def take_merged(
    pending: deque[generation_pb2.OutputDelta], max_tokens: int = MERGE_TOKENS
) -> generation_pb2.OutputDelta:
    """Removes the leading contiguous deltas and returns them merged. `pending` must not be empty."""
    merged = pending.popleft()
    while pending and extend_delta(merged, pending[0], max_tokens):
        pending.popleft()
    return merged
