"""A validated, tokenized request, and the checks that lead to it. Pure; bounds are those in the protos.

Validation takes two steps, because tokenization happens in between: `check_names`, `check_request` and
`check_prompt_form` before it, `check_length`, `check_highest` and `resolved_stop` after it. Every violation is an
InvalidArgumentError naming the field and its bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.request.caller import ANYONE, Caller, RequestTargets
from coordinator.request.request_trace import RequestTrace
from coordinator.workers.catalog import Model
from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.generation.bounds import between, check_sampling, check_stop, fail, require
from splitserve.generation.kv_blocks import NO_BLOCK_KEYS, BlockKeys
from splitserve.v1 import generation_pb2, inference_pb2

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
MAX_MESSAGES = 4096
MAX_PRIORITY = 100
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
    block_keys: BlockKeys = field(default_factory=lambda: NO_BLOCK_KEYS)
    """Prefix index keys of the prompt's leading full blocks, for each block size of the model's workers; empty if there
    are none, or the routing policy does not need them."""
    resumed: tuple[int, ...] = ()
    """Output tokens that the client has from another coordinator; the answer goes on after them."""
    resumed_finish: generation_pb2.FinishReason.ValueType = generation_pb2.FINISH_REASON_UNSPECIFIED
    """How the answer ended, if the client has all of it but the final message."""
    trace: RequestTrace | None = None
    targets: RequestTargets | None = None
    """What it is to be served with: its own targets, its tenant's or those of the settings; None: nothing."""
    slo_ttft_s: float | None = None
    """Time to the first token beyond which admission refuses it; None: never."""

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
    several = "model must be named: several are served" if models else "no model is served here"
    message = f"model {name[:128]!r} is not served here" if name else several
    raise NotFoundError(message, reason="MODEL_NOT_FOUND", field="model")


def check_names(request: inference_pb2.GenerateRequest) -> None:
    """Checks the ids, which are logged and hashed before anything else is looked at."""
    for name, given in (("request_id", request.request_id), ("session_id", request.session_id)):
        if given:
            require(REQUEST_ID.match(given) is not None, name, "at most 128 characters of [A-Za-z0-9._-]")


def check_request(request: inference_pb2.GenerateRequest, model: Model) -> None:
    """Checks everything but the ids and the prompt."""
    between("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.HasField("resume"):
        _check_resume_form(request.resume, model)
    check_sampling(request.sampling, model.vocabulary_size)
    check_stop(request.stop, model.vocabulary_size, model.context_tokens)


def timeout_s(request: inference_pb2.GenerateRequest, limit_s: float, call_left_s: float | None) -> float:
    """Seconds for the whole request: the least of its `timeout`, the call's deadline and the server's limit."""
    requested_s = limit_s
    if request.HasField("timeout"):
        requested_s = request.timeout.seconds + request.timeout.nanos / 1e9
        require(0 < requested_s <= limit_s, "timeout", f"above 0 and at most {limit_s:g} s")
    return requested_s if call_left_s is None else min(requested_s, call_left_s)


def check_length(tokens: int, field: str, model: Model, limit: int | None = None) -> None:
    """Checks a prompt's length in tokens: not 0, less than the context, and at most `limit` for this caller."""
    require(tokens > 0, field, "at least one token long")
    if limit is not None and tokens > limit:
        message = f"{field} has {tokens} tokens; this API key's prompts have at most {limit}"
        raise InvalidArgumentError(message, reason="TENANT_LIMIT", field=field)
    context = model.context_tokens
    if tokens >= context:
        message = f"{field} has {tokens} tokens; the context of {context} must also hold the answer"
        raise InvalidArgumentError(message, reason="PROMPT_TOO_LONG", field=field)


def check_highest(token_id: int, field: str, model: Model) -> None:
    """Checks the highest token id of a prompt: within the vocabulary."""
    if token_id >= model.vocabulary_size:
        fail(field, f"token ids of 0..{model.vocabulary_size - 1}, not {token_id}")


def check_resume(resume: inference_pb2.GenerationResume, max_tokens: int) -> None:
    """Checks that what is resumed is part of an answer of `max_tokens` tokens at most."""
    between("resume.token_ids (count)", len(resume.token_ids), 0, max_tokens)


def resolved_sampling(sampling: generation_pb2.SamplingParams, seed: int) -> generation_pb2.SamplingParams:
    """A copy with every default filled in; `seed` is used if the client gave none."""
    resolved = generation_pb2.SamplingParams()
    resolved.CopyFrom(sampling)
    if not sampling.HasField("temperature"):
        resolved.temperature = 1.0
    if not sampling.HasField("top_p"):
        resolved.top_p = 1.0
    if not sampling.HasField("repetition_penalty"):
        resolved.repetition_penalty = 1.0
    if not sampling.HasField("seed"):
        resolved.seed = seed
    return resolved


def resolved_stop(
    stop: generation_pb2.StopParams, prompt_tokens: int, model: Model, limit: int | None = None
) -> generation_pb2.StopParams:
    """A copy with `max_tokens` filled in: what the context and the caller's `limit` leave, unless the client asked for
    less."""
    context_left = model.context_tokens - prompt_tokens
    resolved = generation_pb2.StopParams()
    resolved.CopyFrom(stop)
    if not stop.HasField("max_tokens"):
        resolved.max_tokens = context_left if limit is None else min(context_left, limit)
    elif limit is not None and stop.max_tokens > limit:
        message = f"stop.max_tokens must be at most {limit} with this API key, not {stop.max_tokens}"
        raise InvalidArgumentError(message, reason="TENANT_LIMIT", field="stop.max_tokens")
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
        fail("prompt", "set: one of text, token_ids, chat")
    elif form == "text":
        require(bool(request.text), "prompt.text", "not empty")
        characters = len(request.text)
    elif form == "token_ids":
        check_length(len(request.token_ids.ids), "prompt.token_ids", model)
    else:
        turns = request.chat.messages
        between("prompt.chat.messages (count)", len(turns), 1, MAX_MESSAGES)
        for position, turn in enumerate(turns):
            require(bool(turn.role), f"prompt.chat.messages[{position}].role", "not empty")
        characters = len(request.chat.tools_json)
        characters += sum(len(turn.content) + len(turn.role) + len(turn.tool_calls_json) for turn in turns)
    limit = model.context_tokens * MAX_CHARACTERS_PER_TOKEN
    if characters > limit:
        message = f"prompt.{form} has {characters} characters; a context of {model.context_tokens} tokens"
        raise InvalidArgumentError(
            f"{message} takes at most {limit}", reason="PROMPT_TOO_LONG", field=f"prompt.{form}"
        )
