"""What both kinds of completion share: the fields of a request, checked for type, and their way into the protos.

Ranges that the gRPC face checks too are left to it, so that both refuse the same; see `FieldNames` for the words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from coordinator.request_validation import REQUEST_ID
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2

MAX_CHOICES = 128
"""Answers to one prompt, as with OpenAI."""
MAX_COPIED_BYTES = 64 * 2**20
"""Every answer gets its own copy of the request."""

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
    """One stop string or a list of them; null: none."""
    return [] if value is None else [value] if isinstance(value, str) else value


class Fields(BaseModel):
    """Strict: `"0.5"` is no number. Fields that are not known are ignored, as OpenAI and vLLM do."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True
    )


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool | None = None
    """Send the token counts in a last event of their own."""


class GenerationFields(Fields):
    """Fields of `/v1/chat/completions` and `/v1/completions` alike. Null is the same as not given."""

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
    stop: Annotated[list[str], BeforeValidator(_listed)] = Field(default_factory=list)
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
    stop_token_ids: list[UInt32] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    @property
    def choices(self) -> int:
        """How many answers a prompt gets."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def session_id(self) -> str:
        """Whose requests these are; see GenerateRequest.session_id. Hashed where it has other characters."""
        name = self.prompt_cache_key or self.safety_identifier or self.user or ""
        if not name or REQUEST_ID.match(name):
            return name
        return hashlib.sha256(name.encode("utf-8")).hexdigest()

    def sampling(self, choice: int, logprobs: int | None) -> generation_pb2.SamplingParams:
        """How answer number `choice` is sampled; `logprobs` alternatives a token are reported."""
        sampling = generation_pb2.SamplingParams(**self.model_dump(include=_SAMPLING, exclude_none=True))
        sampling.top_k = max(0, self.top_k or 0)
        if self.seed is not None:
            sampling.seed = (self.seed + choice) % 2**64
        if logprobs is not None:
            sampling.logprobs = logprobs
        sampling.logit_bias.extend(_biases(self.logit_bias or {}))
        return sampling

    def stop_params(self, max_tokens: int | None) -> generation_pb2.StopParams:
        """When an answer ends."""
        stop = generation_pb2.StopParams(**self.model_dump(include=_STOP, exclude_none=True))
        stop.stop_strings.extend(self.stop)
        if max_tokens is not None:
            stop.max_tokens = max_tokens
        return stop


F = TypeVar("F", bound=Fields)
Unsupported = dict[str, tuple[Any, ...]]
"""Fields that would change the answer and are not served, each with the values that change nothing."""

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


def parsed(kind: type[F], body: bytes, unsupported: Unsupported) -> F:
    """A request from its JSON text. Raises InvalidArgumentError naming the field."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        message = f"the request's body is not valid JSON: {error}"
        raise InvalidArgumentError(message, reason="MALFORMED_JSON") from None
    if not isinstance(data, dict):
        raise InvalidArgumentError("the request's body must be a JSON object", reason="MALFORMED_JSON")
    refuse_given(data, unsupported)
    return validated(lambda: kind.model_validate(data))


def check_copies(choices: int, body: bytes) -> None:
    """Raises InvalidArgumentError when so many answers to so long a request would take too much memory."""
    if choices * len(body) > MAX_COPIED_BYTES:
        most = max(1, MAX_COPIED_BYTES // len(body))
        raise InvalidArgumentError(f"n must be 1..{most} with a request as long as this", field="n")


def refuse_given(data: Mapping[str, Any], unsupported: Unsupported) -> None:
    """Raises InvalidArgumentError for the first of these fields that is set to something."""
    for name, harmless in unsupported.items():
        value = data.get(name)
        if value is not None and not any(value == same and type(value) is type(same) for same in harmless):
            raise InvalidArgumentError(f"{name} is not supported", reason="UNSUPPORTED_FIELD", field=name)


def validated(make: Callable[[], F]) -> F:
    """What `make` gives; pydantic's first complaint as InvalidArgumentError."""
    try:
        return make()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = dotted(first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise InvalidArgumentError(f"{name}: {what}", field=name) from None


def dotted(path: Iterable[str | int]) -> str:
    """`messages[0].content` of ("messages", 0, "content")."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def compact_json(value: Any) -> str:
    """JSON without spaces, characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _biases(given: Mapping[str, float]) -> Iterable[generation_pb2.LogitBias]:
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and int(key) < 2**32):
            message = f"logit_bias: keys must be token ids, not {key[:32]!r}"
            raise InvalidArgumentError(message, field="logit_bias")
        yield generation_pb2.LogitBias(token_id=int(key), bias=bias)
