"""From a client's request to one that every worker can rely on. Pure; bounds are those of the protos' comments.

Two steps, because tokenizing happens between them: `check_request` before it, `Generation` after it.
Everything that is wrong ends as InvalidArgumentError naming the field and its bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Never

from coordinator.pools import Model
from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.v1 import generation_pb2, inference_pb2

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
MAX_MESSAGES = 4096
MAX_PRIORITY = 100
MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
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
    message = (
        f"model {name[:128]!r} is not served here" if name else "model must be named: several are served"
    )
    raise NotFoundError(message, reason="MODEL_NOT_FOUND", field="model")


def check_request(request: inference_pb2.GenerateRequest, model: Model) -> None:
    """Checks everything that can be checked before the prompt is tokenized."""
    if request.request_id:
        _require(
            REQUEST_ID.match(request.request_id) is not None,
            "request_id",
            "at most 128 characters of [A-Za-z0-9._-]",
        )
    _between("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_prompt_form(request, model)
    _check_sampling(request.sampling, model)
    _check_stop(request.stop, model)


def timeout_s(request: inference_pb2.GenerateRequest, limit_s: float, call_left_s: float | None) -> float:
    """Seconds for the whole generation: the least of `timeout`, the call's deadline and the server's limit."""
    wanted = limit_s
    if request.HasField("timeout"):
        wanted = request.timeout.seconds + request.timeout.nanos / 1e9
        _require(0 < wanted <= limit_s, "timeout", f"above 0 and at most {limit_s:g} s")
    return wanted if call_left_s is None else min(wanted, call_left_s)


def check_prompt(token_ids: Sequence[int], field: str, model: Model) -> None:
    """Checks a tokenized prompt: not empty, shorter than the context, ids of the vocabulary."""
    _require(len(token_ids) > 0, field, "at least one token long")
    room = model.context_tokens
    if len(token_ids) >= room:
        message = f"{field} has {len(token_ids)} tokens; the context of {room} must also hold the answer"
        raise InvalidArgumentError(message, reason="PROMPT_TOO_LONG", field=field)
    highest = max(token_ids)
    if highest >= model.vocabulary_size:
        _fail(field, f"token ids of 0..{model.vocabulary_size - 1}, not {highest}")


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
    stop: generation_pb2.StopParams, prompt_tokens: int, model: Model
) -> generation_pb2.StopParams:
    """A copy with `max_tokens` filled in: what is left of the context, unless the client named less."""
    room = model.context_tokens - prompt_tokens
    resolved = generation_pb2.StopParams()
    resolved.CopyFrom(stop)
    if not stop.HasField("max_tokens"):
        resolved.max_tokens = room
    elif stop.max_tokens > room:
        _fail(
            "stop.max_tokens",
            f"1..{room}, not {stop.max_tokens}: the context has {model.context_tokens} tokens, "
            f"the prompt {prompt_tokens}",
        )
    _between("stop.min_tokens", resolved.min_tokens, 0, resolved.max_tokens)
    return resolved


def _check_prompt_form(request: inference_pb2.GenerateRequest, model: Model) -> None:
    form = request.WhichOneof("prompt")
    characters = 0
    if form is None:
        _fail("prompt", "set: one of text, token_ids, chat")
    elif form == "text":
        _require(bool(request.text), "prompt.text", "not empty")
        characters = len(request.text)
    elif form == "token_ids":
        check_prompt(request.token_ids.ids, "prompt.token_ids", model)
    else:
        turns = request.chat.messages
        _between("prompt.chat.messages (count)", len(turns), 1, MAX_MESSAGES)
        for position, turn in enumerate(turns):
            _require(bool(turn.role), f"prompt.chat.messages[{position}].role", "not empty")
        characters = sum(len(turn.content) + len(turn.role) for turn in turns)
    limit = model.context_tokens * MAX_CHARACTERS_PER_TOKEN
    if characters > limit:
        message = f"prompt.{form} has {characters} characters; a context of {model.context_tokens} tokens"
        raise InvalidArgumentError(
            f"{message} takes at most {limit}", reason="PROMPT_TOO_LONG", field=f"prompt.{form}"
        )


def _check_sampling(sampling: generation_pb2.SamplingParams, model: Model) -> None:
    if sampling.HasField("temperature"):
        _between("sampling.temperature", sampling.temperature, 0, 100)
    _between("sampling.top_k", sampling.top_k, 0, 2**31 - 1)
    if sampling.HasField("top_p"):
        _above_zero("sampling.top_p", sampling.top_p, 1)
    _between("sampling.min_p", sampling.min_p, 0, 1)
    if sampling.HasField("repetition_penalty"):
        _above_zero("sampling.repetition_penalty", sampling.repetition_penalty, 100)
    _between("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    _between("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    _between("sampling.logprobs", sampling.logprobs, 0, 20)
    _between("sampling.logit_bias (count)", len(sampling.logit_bias), 0, MAX_LOGIT_BIASES)
    for entry in sampling.logit_bias:
        _between("sampling.logit_bias.token_id", entry.token_id, 0, model.vocabulary_size - 1)
        _between("sampling.logit_bias.bias", entry.bias, -100, 100)
    ids = {entry.token_id for entry in sampling.logit_bias}
    _require(len(ids) == len(sampling.logit_bias), "sampling.logit_bias", "of distinct token ids")


def _check_stop(stop: generation_pb2.StopParams, model: Model) -> None:
    if stop.HasField("max_tokens"):
        _between("stop.max_tokens", stop.max_tokens, 1, model.context_tokens)
    _between("stop.stop_strings (count)", len(stop.stop_strings), 0, MAX_STOP_STRINGS)
    for position, text in enumerate(stop.stop_strings):
        name = f"stop.stop_strings[{position}]"
        _between(f"{name} (characters)", len(text), 1, MAX_STOP_STRING_CHARACTERS)
    _between("stop.stop_token_ids (count)", len(stop.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
    for token_id in stop.stop_token_ids:
        _between("stop.stop_token_ids", token_id, 0, model.vocabulary_size - 1)


def _between(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if not low <= value <= high:
        _fail(name, f"{low}..{high}, not {f'{value:g}' if isinstance(value, float) else value}")


def _above_zero(name: str, value: float, high: float) -> None:
    if not 0 < value <= high:
        _fail(name, f"above 0 and at most {high}")


def _require(condition: bool, name: str, bound: str) -> None:
    if not condition:
        _fail(name, bound)


def _fail(name: str, bound: str) -> Never:
    raise InvalidArgumentError(f"{name} must be {bound}", field=name.split(" ")[0])
