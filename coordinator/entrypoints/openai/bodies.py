"""What chat and completions have in common: fields of requests, frames of responses, choices, usage.

The request flow checks ranges, so that all entrypoints refuse the same values; `FieldNames` translates its messages.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from typing_extensions import override

from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.arguments import quoted
from coordinator.entrypoints.openai.logprobs import TokenTexts, prompt_logprobs
from coordinator.request.inference_request import MAX_MESSAGES, REQUEST_ID
from coordinator.request.json_bounds import check_structure
from splitserve.client.types import FINISH_REASONS
from splitserve.errors import InvalidArgumentError
from splitserve.generation.bounds import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_PRIORITY,
    MAX_PROMPT_VALUES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from splitserve.generation.output_delta import TokenDelta
from splitserve.runtime.call_thread import SHORT_BYTES
from splitserve.v1 import generation_pb2, inference_pb2

MAX_CHOICES = 128
"""Answers per prompt, as with OpenAI."""
MAX_COPIED_BYTES = 64 * 2**20
"""Most bytes of a request's copies together, one per answer."""
MAX_TOOLS = 1024
MAX_ITEMS: Mapping[str, int] = {
    "messages": MAX_MESSAGES,
    "input": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    "logit_bias": MAX_LOGIT_BIASES,
    "stop": MAX_STOP_STRINGS,
    "stop_sequences": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
}
"""Most items of a field; their number is checked before pydantic looks at the items."""
MAX_ID_DIGITS = 10
"""Most digits of a token id: `int` raises for thousands of digits."""

UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]


def _listed(value: Any) -> Any:
    """Normalizes one stop string, a list of them, or null to a list."""
    return [] if value is None else [value] if isinstance(value, str) else value


class Fields(BaseModel):
    """Strict types: `"0.5"` is not a number. Unknown fields are refused, as by OpenAI."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    max_items: ClassVar[Mapping[str, int]] = MAX_ITEMS


class OpenFields(Fields):
    """Unknown fields are accepted: only rendering the prompt shows whether the chat template reads them."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool | None = None
    """Whether to send the token counts in a separate last event."""
    include_obfuscation: bool | None = None
    """Without effect: nothing is added to events."""
    continuous_usage_stats: bool | None = None
    """Whether each event has the token counts of its choice so far."""


class GenerationFields(Fields):
    """Fields of both `/v1/chat/completions` and `/v1/completions`. Null is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_listed)] = Field(default_factory=list)
    max_tokens: UInt32 | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0: all."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    prompt_logprobs: UInt32 | None = None
    """Number of alternatives per token of the prompt."""
    stop_token_ids: Annotated[list[UInt32], Field(fail_fast=True)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    ttft_ms: float | None = None
    """Target time to the first token, in milliseconds."""
    tpot_ms: float | None = None
    """Target time per output token after the first, in milliseconds."""
    bad_words: Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    allowed_token_ids: Annotated[list[UInt32], Field(min_length=1, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """How many of the prompt's last tokens are kept; -1: as many as the context has room for."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether logprobs name tokens by their ids, `token_id:7`."""

    @model_validator(mode="after")
    def _options_have_their_effect(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options needs stream: true", field="stream_options")
        if self.counts_continuously and not self.include_usage:
            field = "stream_options.continuous_usage_stats"
            raise InvalidArgumentError(f"{field} needs include_usage: true", field=field)
        if self.keeps_special and self.spaces_between_special_tokens is False:
            message = (
                "spaces_between_special_tokens: false is not supported beside skip_special_tokens: false"
            )
            raise InvalidArgumentError(
                message, reason="UNSUPPORTED_FIELD", field="spaces_between_special_tokens"
            )
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be -1 or at least 1, not 0"
            raise InvalidArgumentError(message, field="truncate_prompt_tokens")
        if self.stream and self.prompt_alternatives is not None:
            message = "stream: log-probabilities of the prompt are not streamed"
            raise InvalidArgumentError(message, field="stream")
        return self

    @property
    def prompt_alternatives(self) -> int | None:
        """Number of alternatives per token of the prompt that the workers report; None: no log-probabilities of it."""
        return self.prompt_logprobs

    @property
    def kept_choices(self) -> int:
        """Answers per prompt in the response."""
        return self.n or 1

    @property
    def choices(self) -> int:
        """Answers per prompt that are generated."""
        return self.kept_choices

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def narrowing_field(self) -> str:
        """The field to blame if no token can be chosen in an answer that need not have a form."""
        if self.allowed_token_ids is not None:
            return "allowed_token_ids"
        return "bad_words" if self.bad_words else "tools"

    @property
    def counts_continuously(self) -> bool:
        """Whether each event of a stream has the token counts so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def keeps_special(self) -> bool:
        """Whether the text includes special tokens."""
        return self.skip_special_tokens is False

    @property
    def session_id(self) -> str:
        """The session that the request belongs to. A name that is no valid id is hashed."""
        name = self.prompt_cache_key or self.safety_identifier or self.user or ""
        if not name or REQUEST_ID.match(name):
            return name
        return hashlib.sha256(name.encode("utf-8")).hexdigest()

    def shared_request(self, max_tokens: int | None, logprobs: int | None) -> inference_pb2.GenerateRequest:
        """What the requests of all answers have in common: everything but prompt and seed.

        `logprobs` is the number of alternatives per token. Raises InvalidArgumentError for a wrong `logit_bias`.
        """
        return inference_pb2.GenerateRequest(
            model=self.model or "",
            sampling=generation_pb2.SamplingParams(
                temperature=self.temperature,
                top_k=max(0, self.top_k or 0),
                top_p=self.top_p,
                min_p=self.min_p or 0.0,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                logprobs=logprobs,
                prompt_logprobs=self.prompt_alternatives,
                logit_bias=_biases(self.logit_bias or {}),
                bad_words=self.bad_words,
                allowed_token_ids=self.allowed_token_ids,
            ),
            stop=generation_pb2.StopParams(
                max_tokens=max_tokens,
                min_tokens=self.min_tokens or 0,
                stop_strings=self.stop,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=bool(self.ignore_eos),
                keep_special_tokens=self.keeps_special,
                keep_stop=bool(self.include_stop_str_in_output),
            ),
            priority=self.priority or 0,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            session_id=self.session_id,
            truncate_prompt_tokens=self.truncate_prompt_tokens or 0,
            return_prompt_token_ids=bool(self.return_token_ids),
        )

    def choice_requests(self, shared: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateRequest]:
        """A copy of the request for each choice, with a seed of its own if the client has set one. The first one alone
        asks for log-probabilities of the prompt."""
        requests = []
        for choice in range(self.choices):
            request = inference_pb2.GenerateRequest()
            request.CopyFrom(shared)
            if choice:
                request.sampling.ClearField("prompt_logprobs")
            if self.seed is not None:
                request.sampling.seed = (self.seed + choice) % 2**64
            requests.append(request)
        return requests


F = TypeVar("F", bound=Fields)
M = TypeVar("M", bound=BaseModel)
Unsupported = dict[str, tuple[Any, ...]]
"""Fields that are not supported, each with the values that have no effect and are therefore accepted."""

NOT_SERVED: Unsupported = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "kv_transfer_params": (),
}
WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "store",
    }
)
"""Fields of OpenAI's API that do not change the answer: whatever they hold is ignored."""


def parsed(kind: type[F], body: bytes, unsupported: Unsupported, most_values: int = 0) -> F:
    """Parses a request's JSON. Raises InvalidArgumentError that names the wrong field, or the exceeded bound of the
    whole body. `most_values`: as of `check_structure`."""
    if len(body) > SHORT_BYTES:
        check_structure(body, most_values)
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        message = f"the request's body is not valid JSON: {error}"
        raise InvalidArgumentError(message, reason="MALFORMED_JSON") from None
    if not isinstance(data, dict):
        raise InvalidArgumentError("the request's body must be a JSON object", reason="MALFORMED_JSON")
    _refuse_unsupported(data, unsupported)
    _refuse_too_many_items(data, kind.max_items)
    known = kind.model_fields
    fields = {
        name: value
        for name, value in data.items()
        if value is not None and (name in known or name not in WITHOUT_EFFECT) and name not in unsupported
    }
    return validated(kind, fields)


def validated(kind: type[M], fields: Mapping[str, Any]) -> M:
    """The fields of a request. Raises InvalidArgumentError that names the first wrong one."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = dotted(first["loc"])
        if first["type"] == "extra_forbidden":
            message = f"{name} is not a field of this API"
            raise InvalidArgumentError(message, reason="UNSUPPORTED_FIELD", field=name) from None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidArgumentError(f"{name}: {message}", field=name) from None


def check_copies(choices: int, body: bytes) -> None:
    """Raises InvalidArgumentError if the copies of the request for all choices would take too much memory."""
    if choices * len(body) > MAX_COPIED_BYTES:
        most = max(1, MAX_COPIED_BYTES // len(body))
        raise InvalidArgumentError(f"n must be 1..{most} with a request as long as this", field="n")


def _refuse_unsupported(data: Mapping[str, Any], unsupported: Unsupported) -> None:
    for name, harmless in unsupported.items():
        value = data.get(name)
        if value is not None and not any(value == same and type(value) is type(same) for same in harmless):
            raise InvalidArgumentError(f"{name} is not supported", reason="UNSUPPORTED_FIELD", field=name)


def _refuse_too_many_items(data: Mapping[str, Any], max_items: Mapping[str, int]) -> None:
    for name, most in max_items.items():
        value = data.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise InvalidArgumentError(f"{name} must have at most {most} items, not {len(value)}", field=name)


def dotted(path: Iterable[str | int]) -> str:
    """A pydantic location as a path: ("messages", 0, "content") is `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def compact_json(value: Any) -> str:
    """JSON without spaces or \\u escapes for non-ASCII characters."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _biases(biases: Mapping[str, float]) -> Iterable[generation_pb2.LogitBias]:
    for key, bias in biases.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS
        if not (is_id and int(key) < 2**32):
            message = f"logit_bias: keys must be token ids, not {key[:32]!r}"
            raise InvalidArgumentError(message, field="logit_bias")
        yield generation_pb2.LogitBias(token_id=int(key), bias=bias)


SLICE_ITEMS = 64
"""Items of a list that are rendered at once. An item may hold the logprobs of 21 tokens."""
DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Frame:
    """The fields around the choices of one response."""

    answer_id: str
    object: str
    created: int
    """Seconds since 1970."""
    model: str

    def head(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {"id": self.answer_id, "object": self.object, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class Extras:
    """What a response shows beside texts."""

    has_usage: bool = False
    """Whether a stream ends with the token counts."""
    counts_continuously: bool = False
    """Whether each event has them."""
    token_ids: bool = False
    """Whether the tokens of prompt and output are in it."""
    texts: TokenTexts | None = None
    """Renders log-probabilities; None: the request asks for none."""
    prompt_texts: TokenTexts | None = None
    """Renders log-probabilities of the prompt as vLLM does; None: the request asks for none."""


NO_EXTRAS = Extras()


class Choice(ABC):
    """One answer to a request, as the client sees it."""

    streams: bool
    """Whether the client sees the answer grow."""
    size = 0
    """Characters that the first events repeat."""

    def __init__(self, parser: AnswerParser | None) -> None:
        """`parser`: finds reasoning and calls; None: the answer has neither."""
        self._parser = parser

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far; None if they cannot be told from others."""
        return self._parser.reasoning_tokens if self._parser is not None else None

    @abstractmethod
    def begin(self, started: inference_pb2.GenerationStart) -> bytes:
        """Takes what is known of the prompt, before the first delta. Returns events, as the next two do: none unless
        the choice `streams`."""

    @abstractmethod
    def delta(self, delta: TokenDelta) -> bytes:
        """Takes the next delta."""

    @abstractmethod
    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        """Takes the end."""


class ChoiceStream(Choice):
    """One choice of a streamed response, rendered as server-sent events delta by delta.

    `_head` and `_tail` are an event's text before and after the fields of its choice.
    """

    streams = True

    def __init__(self, frame: Frame, index: int, extras: Extras, parser: AnswerParser | None = None) -> None:
        super().__init__(parser)
        fields = compact_json(frame.head())[1:-1]
        self._head = f'data: {{{fields},"choices":[{{"index":{index},'
        self._tail = '}],"usage":null}\n\n' if extras.has_usage else "}]}\n\n"
        self._ended = False
        self.frame, self.extras = frame, extras
        self._prompt_tokens = self._tokens = 0
        self._prompt_json = ""
        """The tokens of the prompt, until an event has them."""

    @override
    def begin(self, started: inference_pb2.GenerationStart) -> bytes:
        self._prompt_tokens = started.prompt_tokens
        if self.extras.token_ids:
            self._prompt_json = dumped(list(started.prompt_token_ids))
        return b""

    @override
    def delta(self, delta: TokenDelta) -> bytes:
        if self.extras.counts_continuously:
            self._tokens += len(delta.token_ids)
            usage = compact_json(token_counts(self._prompt_tokens, self._tokens))
            self._tail = f'}}],"usage":{usage}}}\n\n'
        events = self._events(delta)
        if delta.finish_reason:
            self._ended = True
            events += self._end(FINISH_REASONS[delta.finish_reason])
        return events.encode()

    @override
    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        # A delta may have ended the choice.
        return b"" if self._ended else self._end(FINISH_REASONS[done.finish_reason]).encode()

    @abstractmethod
    def _events(self, delta: TokenDelta) -> str:
        """The events of the delta's tokens."""

    @abstractmethod
    def _end(self, finish_reason: str) -> str:
        """The events that end the choice."""

    def _extra_fields(self, delta: TokenDelta) -> dict[str, Any]:
        """Further fields of the event with a delta's first text."""
        has_ids = self.extras.token_ids and delta.token_ids
        return {"token_ids": list(delta.token_ids)} if has_ids else {}

    def _event(self, fields: Mapping[str, Any]) -> str:
        """An event whose choice has these fields beside its index."""
        return f"{self._head}{compact_json(fields)[1:-1]}{self._tail}"


class ChoiceBuilder(Choice):
    """One choice of a response that is sent whole."""

    streams = False

    def __init__(self, frame: Frame, index: int, extras: Extras, parser: AnswerParser | None = None) -> None:
        super().__init__(parser)
        self.frame, self.extras = frame, extras
        self._index = index
        self._pieces: list[str] = []
        self._logprobs: list[generation_pb2.TokenLogprob] = []
        self._prompt = generation_pb2.PromptLogprobs()
        self._token_ids: list[int] = []
        self._logprob_sum, self._logprob_count = 0.0, 0
        self._started = inference_pb2.GenerationStart()
        self._finish_reason = ""

    @override
    def begin(self, started: inference_pb2.GenerationStart) -> bytes:
        self._started = started
        return b""

    @override
    def delta(self, delta: TokenDelta) -> bytes:
        self._read(delta)
        self._logprob_sum += sum(token.logprob for token in delta.logprobs)
        self._logprob_count += len(delta.logprobs)
        if self.extras.texts is not None:
            self._logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self._prompt = delta.prompt_logprobs
        if self.extras.token_ids:
            self._token_ids.extend(delta.token_ids)
        return b""

    @override
    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        self._finish_reason = FINISH_REASONS[done.finish_reason]
        return b""

    def _read(self, delta: TokenDelta) -> None:
        """Appends the delta's text."""
        self._pieces.append(delta.text)

    def _extra_fields(self) -> dict[str, Any]:
        """Further fields of the choice."""
        return {"token_ids": self._token_ids} if self.extras.token_ids else {}

    def share_prompt(self, first: ChoiceBuilder) -> None:
        """Takes the log-probabilities of the prompt from its first choice, which alone asks for them."""
        self._prompt = first._prompt

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of a token, of an answer with log-probabilities."""
        return self._logprob_sum / max(1, self._logprob_count)

    def _prompt_fields(self) -> dict[str, Any]:
        """vLLM's fields about the prompt that the request asks for."""
        fields: dict[str, Any] = {}
        if self.extras.prompt_texts is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.extras.prompt_texts, self._prompt)
        if self.extras.token_ids:
            fields["prompt_token_ids"] = list(self._started.prompt_token_ids)
        return fields

    def beside_choices(self) -> dict[str, Any]:
        """Fields of the response to which this is the first choice."""
        return {}

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The choice as a JSON object. Call it after `done`."""


def usage_event(frame: Frame, usage: Mapping[str, Any]) -> bytes:
    """The event with the token counts, sent last if `stream_options.include_usage` is set."""
    return b"data: %s\n\n" % json.dumps(frame.head() | {"choices": [], "usage": usage}).encode()


def dumped(value: Any) -> str:
    """Renders as `json.dumps` does, but a long list in slices: one call would hold the interpreter's lock for long."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(name)}: {dumped(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        slices = [value[start : start + SLICE_ITEMS] for start in range(0, len(value), SLICE_ITEMS)]
        return "[" + ", ".join(json.dumps(part, ensure_ascii=False)[1:-1] for part in slices) + "]"
    return json.dumps(value, ensure_ascii=False)


MAX_RESPONSE_VALUES = 4 * MAX_PROMPT_VALUES
"""Most log-probabilities of prompts in one response."""


def token_counts(prompt: int, completion: int) -> dict[str, Any]:
    """The sums of `usage`."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class UsageSum:
    """Token counts of a response. A prompt counts once, however many answers it gets; all answers count."""

    def __init__(self, choices_per_prompt: int) -> None:
        self.completion_tokens = 0
        """Tokens of all answers."""
        self.prompt_values = 0
        """Log-probabilities of all prompts."""
        self.prompt_tokens = 0
        """Tokens of all prompts."""
        self._choices_per_prompt = choices_per_prompt
        self._cached = 0
        self._reasoning: int | None = None

    def add(
        self, choice: int, done: inference_pb2.GenerationDone, reasoning_tokens: int | None = None
    ) -> None:
        """Adds a finished answer."""
        if reasoning_tokens is not None:
            self._reasoning = (self._reasoning or 0) + reasoning_tokens
        self.completion_tokens += done.usage.completion_tokens
        if choice % self._choices_per_prompt == 0:
            self.prompt_tokens += done.usage.prompt_tokens
            self._cached += done.usage.cached_prompt_tokens

    def add_prompt_logprobs(self, prompt: generation_pb2.PromptLogprobs) -> None:
        """Counts the log-probabilities of one prompt for each of its choices. Raises InvalidArgumentError for more than
        one response takes."""
        self.prompt_values += self._choices_per_prompt * (len(prompt.logprobs) + len(prompt.top_logprobs))
        if self.prompt_values > MAX_RESPONSE_VALUES:
            message = f"prompt: a response has at most {MAX_RESPONSE_VALUES} log-probabilities of prompts"
            raise InvalidArgumentError(message, field="prompt")

    def to_json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        usage = token_counts(self.prompt_tokens, self.completion_tokens)
        usage["prompt_tokens_details"] = {"cached_tokens": self._cached}
        if self._reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reasoning}
        return usage
