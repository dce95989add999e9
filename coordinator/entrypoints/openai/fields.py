"""Request fields common to chat and completions: type checks and translation into the protos.

Ranges that the request flow checks too are left to it, so that all entrypoints refuse the same; `FieldNames` translates
its messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from coordinator.request.inference_request import MAX_MESSAGES, MAX_PRIORITY, REQUEST_ID
from coordinator.request.json_bounds import check_structure
from splitserve.errors import InvalidArgumentError
from splitserve.generation.bounds import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from splitserve.runtime.calls.parser_thread import SHORT_BYTES
from splitserve.v1 import generation_pb2

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
    """Strict types: `"0.5"` is not a number. Unknown fields are ignored, as by OpenAI and vLLM."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True
    )


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool | None = None
    """Whether to send the token counts in a separate last event."""


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
    """See GenerateRequest.ttft_ms, and tpot_ms."""
    tpot_ms: float | None = None

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
        """See GenerateRequest.session_id. Hashed if it contains characters that are not allowed there."""
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
}


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
    return validated(lambda: kind.model_validate(data))


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
