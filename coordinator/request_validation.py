"""From a client's request to one that every worker can rely on. Pure; bounds are those of the protos' comments.

Two steps, because tokenizing happens between them: `check_request` before it, `Generation` after it.
Everything that is wrong ends as InvalidArgumentError naming the field and its bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.caller import ANYONE, Caller
from coordinator.pools import Model
from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.generation_checks import between, check_sampling, check_stop, fail, require
from splitserve.v1 import generation_pb2, inference_pb2

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
MAX_MESSAGES = 4096
MAX_PRIORITY = 100
MAX_CHARACTERS_PER_TOKEN = 128
"""No prompt averages more; longer texts are refused before time goes into tokenizing them."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A valid request, tokenized. `sampling` and `stop` have all defaults filled in; do not change them."""

    request_id: str
    model: Model
    prompt: tuple[int, ...]
    sampling: generation_pb2.SamplingParams
    stop: generation_pb2.StopParams
    priority: int
    deadline_s: float
    """On the coordinator's monotonic clock."""
    received_s: float
    """When the coordinator got it, on the same clock."""
    caller: Caller = ANYONE
    session_id: str = ""
    """Requests of one session belong together; empty: none."""
    public_name: str = ""
    """The model's name as clients use it; `model` may be one of several behind it."""
    block_keys: tuple[int, ...] = ()
    """Keys of the prompt's leading full blocks in the prefix index; empty where routing does not ask for them."""

    @property
    def max_tokens(self) -> int:
        """Output tokens at most."""
        return self.stop.max_tokens


def find_model(name: str, models: Mapping[str, Model]) -> Model:
    """The model of that name, or the only one for an empty name.

    Raises NotFoundError (MODEL_NOT_FOUND), which does not tell what else there is.
    """
    if name in models:
        return models[name]
    if not name and len(models) == 1:
        return next(iter(models.values()))
    several = "model must be named: several are served" if models else "no model is served here"
    message = f"model {name[:128]!r} is not served here" if name else several
    raise NotFoundError(message, reason="MODEL_NOT_FOUND", field="model")


def check_request(request: inference_pb2.GenerateRequest, model: Model) -> None:
    """Checks everything that can be checked before the prompt is tokenized."""
    if request.request_id:
        require(
            REQUEST_ID.match(request.request_id) is not None,
            "request_id",
            "at most 128 characters of [A-Za-z0-9._-]",
        )
    if request.session_id:
        require(
            REQUEST_ID.match(request.session_id) is not None,
            "session_id",
            "at most 128 characters of [A-Za-z0-9._-]",
        )
    between("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_prompt_form(request, model)
    check_sampling(request.sampling, model.vocabulary_size)
    check_stop(request.stop, model.vocabulary_size, model.context_tokens)


def timeout_s(request: inference_pb2.GenerateRequest, limit_s: float, call_left_s: float | None) -> float:
    """Seconds for the whole generation: the least of `timeout`, the call's deadline and the server's limit."""
    wanted = limit_s
    if request.HasField("timeout"):
        wanted = request.timeout.seconds + request.timeout.nanos / 1e9
        require(0 < wanted <= limit_s, "timeout", f"above 0 and at most {limit_s:g} s")
    return wanted if call_left_s is None else min(wanted, call_left_s)


def check_prompt(token_ids: Sequence[int], field: str, model: Model, limit: int | None = None) -> None:
    """Checks a tokenized prompt: not empty, shorter than the context, ids of the vocabulary, within the caller's
    `limit`."""
    require(len(token_ids) > 0, field, "at least one token long")
    if limit is not None and len(token_ids) > limit:
        message = f"{field} has {len(token_ids)} tokens; this API key's prompts have at most {limit}"
        raise InvalidArgumentError(message, reason="TENANT_LIMIT", field=field)
    room = model.context_tokens
    if len(token_ids) >= room:
        message = f"{field} has {len(token_ids)} tokens; the context of {room} must also hold the answer"
        raise InvalidArgumentError(message, reason="PROMPT_TOO_LONG", field=field)
    highest = max(token_ids)
    if highest >= model.vocabulary_size:
        fail(field, f"token ids of 0..{model.vocabulary_size - 1}, not {highest}")


def resolved_sampling(sampling: generation_pb2.SamplingParams, seed: int) -> generation_pb2.SamplingParams:
    """A copy with every default filled in; `seed` is used where the client named none."""
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
    """A copy with `max_tokens` filled in: what is left of the context and of the caller's `limit`, unless the client
    named less."""
    room = model.context_tokens - prompt_tokens
    resolved = generation_pb2.StopParams()
    resolved.CopyFrom(stop)
    if not stop.HasField("max_tokens"):
        resolved.max_tokens = room if limit is None else min(room, limit)
    elif limit is not None and stop.max_tokens > limit:
        message = f"stop.max_tokens must be at most {limit} with this API key, not {stop.max_tokens}"
        raise InvalidArgumentError(message, reason="TENANT_LIMIT", field="stop.max_tokens")
    elif stop.max_tokens > room:
        fail(
            "stop.max_tokens",
            f"1..{room}, not {stop.max_tokens}: the context has {model.context_tokens} tokens, "
            f"the prompt {prompt_tokens}",
        )
    between("stop.min_tokens", resolved.min_tokens, 0, resolved.max_tokens)
    return resolved


def _check_prompt_form(request: inference_pb2.GenerateRequest, model: Model) -> None:
    form = request.WhichOneof("prompt")
    characters = 0
    if form is None:
        fail("prompt", "set: one of text, token_ids, chat")
    elif form == "text":
        require(bool(request.text), "prompt.text", "not empty")
        characters = len(request.text)
    elif form == "token_ids":
        check_prompt(request.token_ids.ids, "prompt.token_ids", model)
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
