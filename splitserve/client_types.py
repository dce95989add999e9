"""What a client gives and gets: plain frozen values, with no protobuf in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from splitserve.errors import SplitserveError
from splitserve.v1 import generation_pb2, inference_pb2

FinishReason = Literal["stop", "length", "abort"]
_FINISH_REASONS: dict[int, FinishReason] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. `role` is "system", "user", "assistant" or another that the template knows."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text (tokenized as it is), token ids (used as they are) or a conversation (the model's chat template)."""


class GenerateOptions(TypedDict, total=False):
    """What `AsyncClient.generate` and `stream` take besides the prompt. None or absent: the server's default."""

    model: str
    """Name from `models()`. Default: the only model served."""
    max_tokens: int | None
    """Output tokens at most, from 1. Default: what is left of the context."""
    temperature: float | None
    """0..100; 0 is greedy. Default 1."""
    top_k: int
    """Keep the k most likely tokens; 0, the default, keeps all."""
    top_p: float | None
    """Keep the smallest set of tokens with at least this probability, above 0 and at most 1. Default 1."""
    min_p: float
    """Drop tokens less likely than this share of the likeliest, 0..1. Default 0."""
    repetition_penalty: float | None
    """Above 0 and at most 100. Default 1."""
    presence_penalty: float
    """-2..2. Default 0."""
    frequency_penalty: float
    """-2..2. Default 0."""
    logit_bias: dict[int, float]
    """Added to the logits of single tokens, -100..100 each."""
    stop: str | Sequence[str]
    """End, without emitting it, when the text contains one of these."""
    stop_token_ids: Sequence[int]
    """End when one of these is produced."""
    ignore_eos: bool
    """Go on past the model's end-of-sequence tokens."""
    min_tokens: int
    """No end before so many output tokens."""
    seed: int | None
    """0..2^64-1. Makes sampling reproducible. Default: drawn by the server."""
    json_schema: str | Mapping[str, Any]
    """The answer is one JSON value that satisfies this JSON Schema. At most one of these four may be given."""
    json_object: bool
    """The answer is a JSON object."""
    regex: str
    """The whole answer matches this regular expression."""
    lark: str
    """The answer is of this context-free grammar, in Lark's notation."""
    logprobs: int | None
    """Alternatives reported a token, 0..20. Default: no log-probabilities."""
    priority: int
    """-100..100; higher is served first. Default 0."""
    request_id: str
    """Name for logs, at most 128 characters of [A-Za-z0-9._-]. Default: made by the server."""
    timeout_s: float | None
    """Time for the whole generation, in seconds. Default: the client's."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one emitted token; `top` holds (token id, log-probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of output. `first_position` is the place of `token_ids[0]` in the output, counted from 0.

    `text` became certain with these tokens; it may be empty, and never ends within a character.
    """

    first_position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. The cached ones are parts of `prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    decode_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Time per phase in milliseconds, and the KV bytes shipped; `PhaseTimings` of the protos says exactly what."""

    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_admit_ms: float
    ttft_ms: float
    tpot_ms: float
    reserve_ms: float
    transfer_bytes: int


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Who did the work. `decode_worker` and `transport` are empty where none was needed."""

    prefill_worker: str
    decode_worker: str
    transport: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `model` is the name that was asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    served_by: ServedBy
    request_id: str
    model: str
    seed: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Answer:
    """Collects an answer's messages. Fails closed: pieces must follow one another without gap or overlap."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, message: generation_pb2.OutputDelta) -> Delta:
        """Takes one piece. Raises SplitserveError (STREAM_GAP) when it is not the next one."""
        expected = len(self._token_ids)
        if message.token_ids and message.first_position != expected:
            raise SplitserveError(
                f"the server sent position {message.first_position} where {expected} was due",
                reason="STREAM_GAP",
            )
        logprobs = tuple(_token_logprob(entry) for entry in message.logprobs)
        self._token_ids.extend(message.token_ids)
        self._text.append(message.text)
        self._logprobs.extend(logprobs)
        return Delta(expected, tuple(message.token_ids), message.text, logprobs)

    def finish(self, done: inference_pb2.GenerationDone) -> Completion:
        """The whole answer. Raises SplitserveError (BAD_ANSWER) without a known finish reason."""
        reason = _FINISH_REASONS.get(done.finish_reason)
        if reason is None:
            raise SplitserveError("the server did not say why the answer ended", reason="BAD_ANSWER")
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            usage=_usage(done.usage),
            timings=_timings(done.timings),
            served_by=_served_by(done.served_by),
            request_id=done.request_id,
            model=self._model,
            seed=done.seed,
            logprobs=tuple(self._logprobs),
        )


def _token_logprob(entry: generation_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        entry.token_id, entry.logprob, tuple((other.token_id, other.logprob) for other in entry.top)
    )


def _usage(usage: inference_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        decode_cached_tokens=usage.decode_cached_tokens,
    )


def _timings(timings: inference_pb2.PhaseTimings) -> Timings:
    return Timings(
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
        transfer_ms=timings.transfer_ms,
        decode_admit_ms=timings.decode_admit_ms,
        ttft_ms=timings.ttft_ms,
        tpot_ms=timings.tpot_ms,
        reserve_ms=timings.reserve_ms,
        transfer_bytes=timings.transfer_bytes,
    )


def _served_by(served: inference_pb2.ServedBy) -> ServedBy:
    return ServedBy(
        prefill_worker=served.prefill_worker,
        decode_worker=served.decode_worker,
        transport=served.transport,
        attempts=served.attempts,
    )
