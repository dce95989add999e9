"""A validated, tokenized request with its caller, targets and trace, and the checks that lead to it.

Bounds are those in the protos. Validation takes two steps, because tokenization happens in between: `check_names`,
`check_request` and `check_prompt_form` before it, `check_length`, `check_highest` and `resolved_stop` after it. Every
violation is an InvalidArgumentError naming the field and its bound.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, Protocol

from typing_extensions import override

from coordinator.workers.snapshot import Model
from splitserve.config.coordinator import AdmissionConfig, OnLate
from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.generation.bounds import (
    LEAST_TARGET_MS,
    MAX_PRIORITY,
    MAX_TPOT_MS,
    MAX_TTFT_MS,
    between,
    check_bad_sequences,
    check_sampling,
    check_stop,
    fail,
    require,
)
from splitserve.tracing.context import TraceContext
from splitserve.v1 import generation_pb2, inference_pb2

PriorityClass = Literal["interactive", "standard", "batch"]


@dataclass(frozen=True, slots=True)
class RequestTargets:
    """Seconds to the first token, and mean seconds a token after it; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_TARGETS = RequestTargets()


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant behind a request. Without configured tenants, every caller is `ANYONE`."""

    tenant: str
    """Name of the tenant. The policy file bounds the set of names, so it may be a metric label."""
    cache_salt: bytes = b""
    """Separates prefix caches: callers share cached KV only if their salts are equal. Derived by the server."""
    is_admin: bool = False
    """Whether the caller may read and change cluster state."""
    priority_class: PriorityClass = "standard"
    """Urgency of this tenant's requests; takes precedence over a request's own priority."""
    weight: float = 1.0
    """Share of a saturated cluster, relative to the other tenants' weights."""
    models: tuple[str, ...] = ("*",)
    """Patterns of the model names that the caller may use; other models do not exist for it."""
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt; None: limited by the context only."""
    max_output_tokens: int | None = None
    """Most output tokens of a request, and the default; None: limited by the context only."""

    targets: RequestTargets = NO_TARGETS
    """The tenant's targets. The settings' targets apply where the tenant has none."""
    on_late: OnLate | None = None
    """What happens to its requests that would miss their TTFT target; None: as in the settings."""
    any_target: bool = False
    """Whether a request may name a target when neither tenant nor settings have one. With it, the request would precede
    other tenants' requests."""

    def may_use(self, model: str) -> bool:
        """Whether the caller may use this model."""
        return "*" in self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


ANYONE = Caller("default", is_admin=True, any_target=True)


CLASS_RANKS: Mapping[PriorityClass, int] = MappingProxyType({"interactive": 1, "standard": 0, "batch": -1})
"""Higher is served first on workers."""


def precedence_of(tenant: str, priority_class: PriorityClass, priority: int) -> generation_pb2.Precedence:
    """The place of a tenant's request with this `priority` in the workers' queues."""
    return generation_pb2.Precedence(
        class_rank=CLASS_RANKS[priority_class], tenant_key=_tenant_key(tenant), within_tenant=priority
    )


@lru_cache(maxsize=4096)
def _tenant_key(tenant: str) -> int:
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "little")


class Authenticator(Protocol):
    """Resolves a credential to a caller."""

    def caller(self, credential: str | None) -> Caller:
        """The holder of an API key; `credential` is None without a key. Raises UnauthenticatedError. Never blocks."""


class AnonymousAuthenticator(Authenticator):
    """The Authenticator without configured tenants: every caller is `ANYONE`."""

    @override
    def caller(self, credential: str | None) -> Caller:
        return ANYONE


def resolved_targets(
    request: inference_pb2.GenerateRequest, caller: Caller, settings: AdmissionConfig
) -> tuple[RequestTargets, float | None]:
    """The targets of a request, and the time to the first token beyond which admission refuses it; None: never.

    Requests are refused only if tenant or settings say so (`on_late`), and not by a target that only the request has.
    Batch tenants have no TTFT target unless they or the request name one, and are not refused. Raises
    InvalidArgumentError for a target that is out of range, is stricter than that of the tenant or the settings, or has
    no such counterpart: it would put the request before others.
    """
    own, batch = caller.targets, caller.priority_class == "batch"
    least_ttft_s = own.ttft_s or settings.ttft_slo_s
    ttft_s = own.ttft_s if batch else least_ttft_s
    tpot_s = own.tpot_s or settings.tpot_slo_s
    refused = not batch and (caller.on_late or settings.on_late) == "refuse"
    slo_ttft_s = ttft_s if refused else None
    if request.HasField("ttft_ms"):
        ttft_s = _checked_s("ttft_ms", request.ttft_ms, MAX_TTFT_MS, least_ttft_s, caller)
        slo_ttft_s = None if slo_ttft_s is None else ttft_s
    if request.HasField("tpot_ms"):
        tpot_s = _checked_s("tpot_ms", request.tpot_ms, MAX_TPOT_MS, tpot_s, caller)
    return RequestTargets(ttft_s, tpot_s), slo_ttft_s


def _checked_s(name: str, value_ms: float, most_ms: int, least_s: float | None, caller: Caller) -> float:
    between(name, value_ms, LEAST_TARGET_MS, most_ms)
    if least_s is None and not caller.any_target:
        fail(name, "left out: this tenant has no such target here that could be exceeded")
    if least_s is not None and value_ms / 1e3 < least_s:
        fail(name, f"at least {least_s * 1e3:g}, the target here, not {value_ms:g}")
    return value_ms / 1e3


Operation = Literal["chat", "text_completion", "embeddings"]
"""Values of `gen_ai.operation.name` in OpenTelemetry's conventions."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The trace of a request, made at receipt by `coordinator.entrypoints.inference_api`."""

    context: TraceContext
    """The request's own span; if this coordinator does not trace, the client's, unsampled."""
    parent_id: str = ""
    """The client's span id; empty: the trace begins here."""
    operation: Operation = "text_completion"
    resumed: TraceContext | None = None
    """The request's span at the coordinator that sent the beginning of the answer."""

    @property
    def exported(self) -> bool:
        """Whether its spans are exported."""
        return self.context.sampled

    def attempt(self) -> TraceContext:
        """The context of a new attempt, with a span of its own if it is exported."""
        return self.context.child() if self.exported else self.context

    def sibling(self) -> RequestTrace:
        """The trace of one more choice of the same call."""
        return replace(self, context=self.attempt())


CHAT_PREFIX, COMPLETION_PREFIX, RESPONSE_PREFIX, MESSAGE_PREFIX = "chatcmpl-", "cmpl-", "resp_", "msg_"
"""Prefixes of the id of an answer over HTTP; the request's id follows."""


def names_of(given: str) -> tuple[str, ...]:
    """The request ids that a client's id may mean: the id itself, the one in an answer's id, or the first choice's."""
    for prefix in (CHAT_PREFIX, COMPLETION_PREFIX, RESPONSE_PREFIX, MESSAGE_PREFIX):
        if given.startswith(prefix):
            inner = given.removeprefix(prefix)
            return given, inner, choice_id(inner, 0)
    return given, choice_id(given, 0)


def choice_id(request_id: str, index: int) -> str:
    """The request id of one of several choices."""
    return f"{request_id}-{index}"


TASKS: Mapping[int, str] = MappingProxyType(
    {
        generation_pb2.POOLING_UNSPECIFIED: "generates text",
        generation_pb2.POOLING_EMBED: "computes embeddings and generates no text",
        generation_pb2.POOLING_SCORE: "scores pairs of texts and generates no text",
        generation_pb2.POOLING_SCORE_JOINED: "scores pairs of texts and generates no text",
    }
)
"""What a model does, by its `Pooling`."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
MAX_MESSAGES = 4096
MAX_TEMPLATE_CHARACTERS = 2**15
"""Of a chat template that a request brings. To compile a template of this length takes 2 s at most."""
MAX_CHARACTERS_PER_TOKEN = 128
"""No real prompt averages more characters per token; longer texts are refused before they are tokenized."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A valid request, tokenized. `sampling` and `stop` have all defaults filled in and must not be mutated."""

    request_id: str
    model: Model
    prompt: tuple[int, ...]
    sampling: generation_pb2.SamplingParams
    stop: generation_pb2.StopParams
    priority: int
    deadline_s: float
    """On the coordinator's monotonic clock."""
    received_s: float
    """When the coordinator received it, on the same clock."""
    caller: Caller = ANYONE
    session_id: str = ""
    """Groups requests that should share workers; empty: no session."""
    public_name: str = ""
    """The model name that the client used; `model` may be one of several behind that route."""
    block_keys: tuple[int, ...] = ()
    """Prefix index keys of the prompt's leading full blocks; empty if there are none, or routing needs none."""
    resumed: tuple[int, ...] = ()
    """Output tokens that the client has from another coordinator; the answer goes on after them."""
    resumed_finish: generation_pb2.FinishReason.ValueType = generation_pb2.FINISH_REASON_UNSPECIFIED
    """How the answer ended, if the client has all of it but the final message."""
    trace: RequestTrace | None = None
    targets: RequestTargets = NO_TARGETS
    """Its own targets, its tenant's or those of the settings."""
    slo_ttft_s: float | None = None
    """Predicted time to the first token beyond which admission refuses the request, in seconds; None: never."""
    prompt_only: bool = False
    """Whether the log-probabilities of the prompt are the whole answer. A worker samples a token, which is dropped."""
    returns_prompt: bool = False
    """Whether the client gets the prompt's tokens."""
    pooling: generation_pb2.PoolingParams | None = None
    """How a pooling model computes its result; None: the model generates."""
    second_begins: int = 0
    """Where the second text of a pair begins; 0: the model does not tell texts apart."""

    @property
    def max_tokens(self) -> int:
        """Output tokens, at most, resumed ones included."""
        return self.stop.max_tokens


def find_model(name: str, models: Mapping[str, Model]) -> Model:
    """The model of that name, or the only model for an empty name.

    Raises NotFoundError (MODEL_NOT_FOUND), whose message does not reveal other models.
    """
    if name in models:
        return models[name]
    if not name and len(models) == 1:
        return next(iter(models.values()))
    unnamed = "model must be named: several are served" if models else "no model is served here"
    message = f"model {name[:128]!r} is not served here" if name else unnamed
    raise NotFoundError(message, reason="MODEL_NOT_FOUND", field="model")


def check_names(request: inference_pb2.GenerateRequest) -> None:
    """Checks the ids, which are logged and hashed before any other check."""
    for name, value in (("request_id", request.request_id), ("session_id", request.session_id)):
        if value:
            require(REQUEST_ID.match(value) is not None, name, "at most 128 characters of [A-Za-z0-9._-]")


def check_request(request: inference_pb2.GenerateRequest, model: Model) -> None:
    """Checks everything but the ids and the prompt."""
    between("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.HasField("resume"):
        _check_resume_form(request.resume, model)
    check_sampling(request.sampling, model.vocabulary_size)
    least_tokens = 0 if request.sampling.HasField("prompt_logprobs") else 1
    check_stop(request.stop, model.vocabulary_size, model.context_tokens, least_tokens)


def check_task(request: inference_pb2.GenerateRequest, model: Model) -> None:
    """Checks that the request asks for what the model does (reason WRONG_TASK), and that only models with a form for
    pairs get one."""
    pools = request.HasField("pooling")
    if pools != bool(model.pooling):
        raise wrong_task(
            request.model or model.name, model, "an embedding or a score" if pools else "an answer"
        )
    if request.HasField("pair") and model.pooling != generation_pb2.POOLING_SCORE:
        fail("prompt.pair", "left out: this model takes no pairs")
    if pools and request.truncate_prompt_tokens:
        fail("truncate_prompt_tokens", "left out for a pooling model")


def wrong_task(name: str, model: Model, wanted: str) -> InvalidArgumentError:
    """The error of a request for what the model of this public name does not do."""
    message = f"model {name[:128]!r} {TASKS[model.pooling]}; the request asks for {wanted}"
    return InvalidArgumentError(message, reason="WRONG_TASK", field="model")


def timeout_s(request: inference_pb2.GenerateRequest, limit_s: float, call_left_s: float | None) -> float:
    """Seconds for the whole request: the least of its `timeout`, the call's deadline and the server's limit."""
    requested_s = limit_s
    if request.HasField("timeout"):
        requested_s = request.timeout.seconds + request.timeout.nanos / 1e9
        require(0 < requested_s <= limit_s, "timeout", f"above 0 and at most {limit_s:g} s")
    return requested_s if call_left_s is None else min(requested_s, call_left_s)


def kept_tokens(request: inference_pb2.GenerateRequest, model: Model) -> int | None:
    """How many of the prompt's last tokens are kept; None: all. Call it after `check_request`."""
    asked = request.truncate_prompt_tokens
    between("truncate_prompt_tokens", asked, -1, model.context_tokens - 1)
    if asked == -1:
        return max(1, model.context_tokens - (request.stop.max_tokens or 1))
    return asked or None


def check_length(tokens: int, field: str, model: Model, limit: int | None = None) -> None:
    """Checks a prompt's length in tokens: not 0, less than the context, and at most `limit` for this caller."""
    require(tokens > 0, field, "at least one token long")
    check_not_longer(tokens, f"{field} has {tokens} tokens", field, model, limit)


def check_not_longer(tokens: int, has: str, field: str, model: Model, limit: int | None) -> None:
    """Checks that `tokens` are less than the context, and at most `limit` for this caller. `has` begins the error."""
    if limit is not None and tokens > limit:
        message = f"{has}; this API key's prompts have at most {limit}"
        raise InvalidArgumentError(message, reason="TENANT_LIMIT", field=field)
    if tokens > model.prompt_tokens:
        message = f"{has}; the context of {model.context_tokens} must also hold the answer"
        if model.pooling:
            message = f"{has}; the context has {model.context_tokens}"
        raise InvalidArgumentError(message, reason="PROMPT_TOO_LONG", field=field)


def check_highest(token_id: int, field: str, model: Model) -> None:
    """Checks the highest token id of a prompt: within the vocabulary."""
    if token_id >= model.vocabulary_size:
        fail(field, f"token ids of 0..{model.vocabulary_size - 1}, not {token_id}")


def check_resume(resume: inference_pb2.GenerationResume, max_tokens: int) -> None:
    """Checks that the resumed output is part of an answer of `max_tokens` tokens at most."""
    between("resume.token_ids (count)", len(resume.token_ids), 0, max_tokens)


def resolved_sampling(
    sampling: generation_pb2.SamplingParams, seed: int, bad_sequences: Sequence[Sequence[int]] = ()
) -> generation_pb2.SamplingParams:
    """A copy with every default filled in; `seed` is used if the client gave none. `bad_sequences`: the tokens of its
    `bad_words`.

    Raises InvalidArgumentError for more of them than are allowed.
    """
    resolved = generation_pb2.SamplingParams()
    resolved.CopyFrom(sampling)
    if not sampling.HasField("temperature"):
        resolved.temperature = 1.0
    if not sampling.HasField("top_p"):
        resolved.top_p = 1.0
    elif not sampling.top_p:  # 0 means the likeliest token alone, and engines refuse 0
        resolved.top_p, resolved.top_k = 1.0, 1
    if not sampling.HasField("repetition_penalty"):
        resolved.repetition_penalty = 1.0
    if not sampling.HasField("seed"):
        resolved.seed = seed
    if sampling.bad_words:
        del resolved.bad_words[:]
        resolved.bad_sequences.extend(generation_pb2.TokenIds(ids=ids) for ids in bad_sequences)
        require(all(bad_sequences), "sampling.bad_words", "of at least one token each")
        check_bad_sequences(resolved, "sampling.bad_words")
    return resolved


def resolved_stop(
    stop: generation_pb2.StopParams, prompt_tokens: int, model: Model, limit: int | None = None
) -> generation_pb2.StopParams:
    """A copy with `max_tokens` filled in: the room that the context and the caller's `limit` leave, unless the client
    asked for less."""
    context_left = model.context_tokens - prompt_tokens
    resolved = generation_pb2.StopParams()
    resolved.CopyFrom(stop)
    if not stop.HasField("max_tokens"):
        resolved.max_tokens = context_left if limit is None else min(context_left, limit)
    elif limit is not None and stop.max_tokens > limit:
        message = f"stop.max_tokens must be at most {limit} with this API key, not {stop.max_tokens}"
        raise InvalidArgumentError(message, reason="TENANT_LIMIT", field="stop.max_tokens")
    elif stop.max_tokens > context_left and stop.fit_max_tokens:
        resolved.max_tokens = context_left
    elif stop.max_tokens > context_left:
        fail(
            "stop.max_tokens",
            f"1..{context_left}, not {stop.max_tokens}: the context has {model.context_tokens} tokens, "
            f"the prompt {prompt_tokens}",
        )
    between("stop.min_tokens", resolved.min_tokens, 0, resolved.max_tokens)
    return resolved


def _check_resume_form(resume: inference_pb2.GenerationResume, model: Model) -> None:
    between("resume.token_ids (count)", len(resume.token_ids), 0, model.context_tokens)
    if resume.token_ids and max(resume.token_ids) >= model.vocabulary_size:
        fail("resume.token_ids", f"token ids of 0..{model.vocabulary_size - 1}, not {max(resume.token_ids)}")
    known = resume.finish_reason in generation_pb2.FinishReason.values()
    require(known, "resume.finish_reason", "a FinishReason")


def check_prompt_form(request: inference_pb2.GenerateRequest, model: Model) -> None:
    """Checks a prompt before it is tokenized. Takes milliseconds for a long conversation."""
    form = request.WhichOneof("prompt")
    characters = 0
    if form is None:
        fail("prompt", "set: one of text, token_ids, chat, pair")
    elif form == "text":
        require(bool(request.text), "prompt.text", "at least one character long")
        characters = len(request.text)
    elif form == "pair":
        characters = len(request.pair.first) + len(request.pair.second)
    elif form == "token_ids":
        require(bool(request.token_ids.ids), "prompt.token_ids", "at least one token long")
        if not request.truncate_prompt_tokens:
            check_length(len(request.token_ids.ids), "prompt.token_ids", model)
    else:
        turns = request.chat.messages
        between("prompt.chat.messages (count)", len(turns), 1, MAX_MESSAGES)
        for position, turn in enumerate(turns):
            require(bool(turn.role), f"prompt.chat.messages[{position}].role", "at least one character long")
        _check_template_fields(request.chat)
        characters = len(request.chat.tools_json) + len(request.chat.template_kwargs_json)
        characters += sum(len(turn.content) + len(turn.role) + len(turn.tool_calls_json) for turn in turns)
        characters += sum(len(turn.further_json) + len(turn.tool_call_id) + len(turn.name) for turn in turns)
    limit = model.context_tokens * MAX_CHARACTERS_PER_TOKEN
    if characters > limit:
        message = f"prompt.{form} has {characters} characters; a context of {model.context_tokens} tokens"
        raise InvalidArgumentError(
            f"{message} takes at most {limit}", reason="PROMPT_TOO_LONG", field=f"prompt.{form}"
        )


def _check_template_fields(chat: inference_pb2.ChatMessages) -> None:
    count = len(chat.chat_template)
    between("prompt.chat.chat_template (characters)", count, 0, MAX_TEMPLATE_CHARACTERS)
    if chat.continue_final_message:
        name = "prompt.chat.continue_final_message"
        require(not chat.add_generation_prompt, name, "false beside add_generation_prompt")
        last = chat.messages[-1].role
        require(last == "assistant", name, "false where the last message is not the assistant's")
