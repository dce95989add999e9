"""What chat and completions have in common: fields of requests, frames of responses, choices, usage.

Ranges that the request flow checks too are left to it, so that all entrypoints refuse the same; `FieldNames` translates
its messages.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from coordinator.entrypoints.openai.logprobs import TokenTexts
from coordinator.request.inference_request import MAX_MESSAGES, REQUEST_ID
from coordinator.request.json_bounds import check_structure
from splitserve.errors import InvalidArgumentError
from splitserve.generation.bounds import MAX_LOGIT_BIASES, MAX_PRIORITY, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from splitserve.runtime.call_thread import SHORT_BYTES
from splitserve.v1 import generation_pb2, inference_pb2

MAX_CHOICES = 128
"""Answers per prompt, as with OpenAI."""
MAX_COPIED_BYTES = 64 * 2**20
"""Total size of a request's copies, one per answer."""
MAX_TOOLS = 1024
MAX_ITEMS: Mapping[str, int] = {
    "messages": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    "logit_bias": MAX_LOGIT_BIASES,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
}
"""Items of a field, checked before each of them is."""
MAX_ID_DIGITS = 10
"""Digits of a token id; Python takes no number of thousands of them."""

_SAMPLING = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
}
_STOP = {"stop_token_ids", "ignore_eos", "min_tokens"}

UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]


def _listed(value: Any) -> Any:
    """Normalizes one stop string, a list of them, or null to a list."""
    return [] if value is None else [value] if isinstance(value, str) else value


class Fields(BaseModel):
    """Strict types: `"0.5"` is not a number. Unknown fields are refused, as by OpenAI."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool | None = None
    """Whether to send the token counts in a separate last event."""
    include_obfuscation: bool | None = None
    """Without effect: nothing is added to events."""


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
    stop_token_ids: Annotated[list[UInt32], Field(fail_fast=True)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    ttft_ms: float | None = None
    """Target time to the first token, in milliseconds."""
    tpot_ms: float | None = None
    """Target time per output token after the first, in milliseconds."""

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def session_id(self) -> str:
        """Hashed if it contains characters that are not allowed there."""
        name = self.prompt_cache_key or self.safety_identifier or self.user or ""
        if not name or REQUEST_ID.match(name):
            return name
        return hashlib.sha256(name.encode("utf-8")).hexdigest()

    def seed_of(self, choice: int) -> int:
        """The seed of answer number `choice`, where there is one."""
        return ((self.seed or 0) + choice) % 2**64

    def sampling(self, choice: int, logprobs: int | None) -> generation_pb2.SamplingParams:
        """Sampling parameters of answer number `choice`, with `logprobs` alternatives per token."""
        sampling = generation_pb2.SamplingParams(**self._given(_SAMPLING))
        sampling.top_k = max(0, self.top_k or 0)
        if self.seed is not None:
            sampling.seed = self.seed_of(choice)
        if logprobs is not None:
            sampling.logprobs = logprobs
        sampling.logit_bias.extend(_biases(self.logit_bias or {}))
        return sampling

    def _given(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def stop_params(self, max_tokens: int | None) -> generation_pb2.StopParams:
        """Stop parameters of each answer."""
        stop = generation_pb2.StopParams(**self._given(_STOP))
        stop.stop_strings.extend(self.stop)
        if max_tokens is not None:
            stop.max_tokens = max_tokens
        return stop


F = TypeVar("F", bound=Fields)
Unsupported = dict[str, tuple[Any, ...]]
"""Fields that are not supported, each with the values that have no effect and are therefore accepted."""

NOT_SERVED: Unsupported = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (False,),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "spaces_between_special_tokens": (True,),
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
    """Parses a request's JSON. Raises InvalidArgumentError naming the field, or the bound of the whole that it exceeds;
    `most_values`: see `check_structure`."""
    if len(body) > SHORT_BYTES:
        check_structure(body, most_values)
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        message = f"the request's body is not valid JSON: {error}"
        raise InvalidArgumentError(message, reason="MALFORMED_JSON") from None
    if not isinstance(data, dict):
        raise InvalidArgumentError("the request's body must be a JSON object", reason="MALFORMED_JSON")
    refuse_given(data, unsupported)
    refuse_too_many(data)
    ignored = WITHOUT_EFFECT | unsupported.keys()
    given = {name: value for name, value in data.items() if value is not None and name not in ignored}
    return validated(lambda: kind.model_validate(given))


def check_copies(choices: int, body: bytes) -> None:
    """Raises InvalidArgumentError if the copies of the request for all choices would take too much memory."""
    if choices * len(body) > MAX_COPIED_BYTES:
        most = max(1, MAX_COPIED_BYTES // len(body))
        raise InvalidArgumentError(f"n must be 1..{most} with a request as long as this", field="n")


def check_answers(answers: int, shared_bytes: int) -> None:
    """Raises InvalidArgumentError if what so many answers have in common would take too much memory."""
    if answers * shared_bytes > MAX_COPIED_BYTES:
        most = max(1, MAX_COPIED_BYTES // shared_bytes)
        message = f"prompt: at most {most} answers, n times prompts, with settings as long as these"
        raise InvalidArgumentError(message, field="prompt")


def refuse_given(data: Mapping[str, Any], unsupported: Unsupported) -> None:
    """Raises InvalidArgumentError for the first unsupported field with a value that has an effect."""
    for name, harmless in unsupported.items():
        value = data.get(name)
        if value is not None and not any(value == same and type(value) is type(same) for same in harmless):
            raise InvalidArgumentError(f"{name} is not supported", reason="UNSUPPORTED_FIELD", field=name)


def refuse_too_many(data: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError for the first field with more items than it may have."""
    for name, most in MAX_ITEMS.items():
        value = data.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise InvalidArgumentError(f"{name} must have at most {most} items, not {len(value)}", field=name)


def validated(make: Callable[[], F]) -> F:
    """The result of `make`; pydantic's first error is raised as InvalidArgumentError."""
    try:
        return make()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = dotted(first["loc"])
        if first["type"] == "extra_forbidden":
            message = f"{name} is not a field of this API"
            raise InvalidArgumentError(message, reason="UNSUPPORTED_FIELD", field=name) from None
        what = first["msg"].removeprefix("Value error, ")
        raise InvalidArgumentError(f"{name}: {what}", field=name) from None


def dotted(path: Iterable[str | int]) -> str:
    """A pydantic location as a path: ("messages", 0, "content") is `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def compact_json(value: Any) -> str:
    """JSON without spaces or \\u escapes for non-ASCII characters."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _biases(given: Mapping[str, float]) -> Iterable[generation_pb2.LogitBias]:
    for key, bias in given.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS
        if not (is_id and int(key) < 2**32):
            message = f"logit_bias: keys must be token ids, not {key[:32]!r}"
            raise InvalidArgumentError(message, field="logit_bias")
        yield generation_pb2.LogitBias(token_id=int(key), bias=bias)


quoted = json.encoder.encode_basestring
"""Encodes a text as a JSON string without ASCII escapes: the C function below `json.dumps`, and 20 times faster."""

FINISH_REASONS: Mapping[int, str] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}
SLICE_ITEMS = 64
"""Items of a list that are rendered at once; each may hold the logprobs of 21 tokens."""
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


class ChoiceStream(Protocol):
    """One choice of a streamed response, rendered delta by delta."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far; None where there is no telling."""
        return None

    def delta(self, delta: generation_pb2.OutputDelta) -> bytes:
        """The events for this delta; may be empty."""

    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        """The remaining events; may be empty."""


class ChoiceBuilder(ABC):
    """One choice of a response that is sent at once. Its text begins with `echo`; `texts` is given if logprobs were
    requested."""

    def __init__(self, index: int, *, echo: str = "", texts: TokenTexts | None = None) -> None:
        self._index, self._texts = index, texts
        self._pieces = [echo]
        self._logprobs: list[generation_pb2.TokenLogprob] = []

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far; None where there is no telling."""
        return None

    def delta(self, delta: generation_pb2.OutputDelta) -> None:
        """Appends a delta."""
        self._pieces.append(delta.text)
        if self._texts is not None:
            self._logprobs.extend(delta.logprobs)

    @abstractmethod
    def to_json(self, done: inference_pb2.GenerationDone) -> dict[str, Any]:
        """The choice as a JSON object."""


class ChunkFrame:
    """The constant parts of a streamed chunk with one choice, before and after what changes per token."""

    def __init__(self, frame: Frame, index: int, has_usage: bool) -> None:
        answer_id, model = quoted(frame.answer_id), quoted(frame.model)
        head = f'"id":{answer_id},"object":"{frame.object}","created":{frame.created},"model":{model}'
        self.before = f'data: {{{head},"choices":[{{"index":{index},'
        self.after = '}],"usage":null}\n\n' if has_usage else "}]}\n\n"

    def chunk(self, fields: Mapping[str, Any]) -> str:
        """An event whose choice has these fields."""
        shown = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        return f"{self.before}{shown[1:-1]}{self.after}"


def usage_event(frame: Frame, usage: Mapping[str, Any]) -> bytes:
    """The event with the token counts, sent last if `stream_options.include_usage` is set."""
    return b"data: %s\n\n" % json.dumps(frame.head() | {"choices": [], "usage": usage}).encode()


def dumped(value: Any) -> str:
    """Renders as `json.dumps` does, long lists in slices: one call for all would keep the interpreter to itself."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(name)}: {dumped(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        slices = [value[start : start + SLICE_ITEMS] for start in range(0, len(value), SLICE_ITEMS)]
        return "[" + ", ".join(json.dumps(part, ensure_ascii=False)[1:-1] for part in slices) + "]"
    return json.dumps(value, ensure_ascii=False)


class UsageSum:
    """Token counts of a response. A prompt counts once, however many answers it gets; all answers count."""

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._prompt = self._completion = self._cached = 0
        self._reasoning: int | None = None

    def add(
        self, choice: int, done: inference_pb2.GenerationDone, reasoning_tokens: int | None = None
    ) -> None:
        """Adds a finished answer."""
        if reasoning_tokens is not None:
            self._reasoning = (self._reasoning or 0) + reasoning_tokens
        self._completion += done.usage.completion_tokens
        if choice % self._choices_per_prompt == 0:
            self._prompt += done.usage.prompt_tokens
            self._cached += done.usage.cached_prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers."""
        return self._completion

    def to_json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }
        if self._reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reasoning}
        return usage
