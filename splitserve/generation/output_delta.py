"""A piece of an answer as workers and coordinators hold it, and how contiguous pieces are merged.

Reading a field of a protobuf message costs as much as making a small object, so a token's way through a process is in
plain objects: a step's tokens arrive and leave in columns, `decode_pb2.StepTokens`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from splitserve.v1 import decode_pb2, generation_pb2

MERGE_TOKENS = 128
"""Maximum number of tokens in a merged delta; each merge copies its text."""


@dataclass(slots=True)
class TokenDelta:
    """Tokens at consecutive positions of an output. The fields are those of `generation_pb2.OutputDelta`."""

    first_position: int
    token_ids: list[int]
    text: str = ""
    finish_reason: generation_pb2.FinishReason.ValueType = generation_pb2.FINISH_REASON_UNSPECIFIED
    logprobs: Sequence[generation_pb2.TokenLogprob] = ()
    prompt_logprobs: generation_pb2.PromptLogprobs | None = None
    pooled: Sequence[float] = ()

    @classmethod
    def of(cls, message: generation_pb2.OutputDelta) -> TokenDelta:
        """The delta of a message."""
        return cls(
            message.first_position,
            list(message.token_ids),
            message.text,
            message.finish_reason,
            list(message.logprobs) if message.logprobs else (),
            message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            list(message.pooled) if message.pooled else (),
        )

    def to_proto(self) -> generation_pb2.OutputDelta:
        """The delta as a message."""
        message = generation_pb2.OutputDelta()
        self.write_to(message)
        return message

    def write_to(self, message: generation_pb2.OutputDelta) -> None:
        """Fills an empty message, which may be a field of another one: in half of the time that copying takes."""
        message.first_position = self.first_position
        message.token_ids.extend(self.token_ids)
        message.text = self.text
        if self.is_plain:
            return
        message.finish_reason = self.finish_reason
        message.logprobs.extend(self.logprobs)
        message.pooled.extend(self.pooled)
        if self.prompt_logprobs is not None:
            message.prompt_logprobs.CopyFrom(self.prompt_logprobs)

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing but tokens and text."""
        return not (self.finish_reason or self.logprobs or self.prompt_logprobs is not None)

    def extend(self, delta: TokenDelta, max_tokens: int = MERGE_TOKENS) -> bool:
        """Appends `delta` if it is contiguous and fits in `max_tokens`; returns whether it did."""
        count = len(self.token_ids)
        if delta.first_position != self.first_position + count or self.finish_reason:
            return False
        if count + len(delta.token_ids) > max_tokens:
            return False
        self.token_ids += delta.token_ids
        self.text += delta.text
        if delta.logprobs:
            self.logprobs = [*self.logprobs, *delta.logprobs]
        self.finish_reason = delta.finish_reason
        return True

    def without_output(self) -> TokenDelta:
        """The first delta of an answer as the only one of an answer of no tokens."""
        reason = generation_pb2.FINISH_REASON_LENGTH
        return TokenDelta(0, [], finish_reason=reason, prompt_logprobs=self.prompt_logprobs)


News = TokenDelta | decode_pb2.SequenceOutput
"""Progress of one request: a delta alone, or a message that says more."""


def news_of(output: decode_pb2.SequenceOutput) -> News:
    """The progress in a message. A failure stays a message."""
    says_more = output.admitted or output.delta.finish_reason == generation_pb2.FINISH_REASON_ABORT
    says_more |= any(output.HasField(field) for field in ("admit_ms", "failure", "local_prefill"))
    return output if says_more else TokenDelta.of(output.delta)


def output_of(name: str, news: News) -> decode_pb2.SequenceOutput:
    """The progress of a request as a message."""
    if not isinstance(news, TokenDelta):
        return news
    return decode_pb2.SequenceOutput(request_id=name, delta=news.to_proto())


def rows_of(message: decode_pb2.StreamOutputsResponse) -> Iterator[tuple[str, News]]:
    """The progress in a message of an output stream, with the request's id. Raises ValueError for columns that do
    not fit each other."""
    for output in message.outputs:
        yield output.request_id, news_of(output)
    columns = message.tokens
    names, token_ids, end = columns.request_ids, list(columns.token_ids), 0
    counts = columns.counts or [1] * len(names)
    if sum(counts) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens came for counts of {sum(counts)}")
    for name, position, count, text in zip(
        names, columns.first_positions, counts, columns.texts, strict=True
    ):
        end += count
        yield name, TokenDelta(position, token_ids[end - count : end], text)


def take_merged(pending: deque[TokenDelta], max_tokens: int = MERGE_TOKENS) -> TokenDelta:
    """Removes the leading contiguous deltas and returns them merged. `pending` must not be empty."""
    merged = pending.popleft()
    while pending and merged.extend(pending[0], max_tokens):
        pending.popleft()
    return merged
