"""Joins neighbouring pieces of one answer, wherever they gather: at the worker, at the coordinator."""

from __future__ import annotations

from splitserve.v1 import decode_pb2, generation_pb2

MERGE_TOKENS = 128
"""Tokens of one merged piece at most, for each addition copies its text."""


def extend_delta(
    into: generation_pb2.OutputDelta, delta: generation_pb2.OutputDelta, max_tokens: int = MERGE_TOKENS
) -> bool:
    """Appends `delta` if it follows on directly and there is room; whether it did."""
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


def extend_output(into: decode_pb2.SequenceOutput, output: decode_pb2.SequenceOutput) -> bool:
    """Appends plain output to the output before it, of the same request; whether it could."""
    if output.admitted or into.admitted or output.HasField("failure") or into.HasField("failure"):
        return False
    if output.HasField("admit_ms") or output.HasField("local_prefill"):
        return False
    return extend_delta(into.delta, output.delta)
