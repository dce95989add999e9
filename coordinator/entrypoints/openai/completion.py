"""`/v1/completions`: the request's fields, the GenerateRequests that it asks for, and its responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SkipValidation, model_validator
from typing_extensions import override

from coordinator.entrypoints.http.exchange import FieldNames
from coordinator.entrypoints.openai.bodies import (
    MAX_CHOICES,
    MAX_COPIED_BYTES,
    NO_EXTRAS,
    NOT_SERVED,
    ChoiceBuilder,
    ChoiceStream,
    Extras,
    Frame,
    GenerationFields,
    UInt32,
)
from coordinator.entrypoints.openai.formats.arguments import quoted
from coordinator.entrypoints.openai.logprobs import CompletionLogprobs
from coordinator.entrypoints.openai.tools import FORM_FIELDS, FormFields
from splitserve.errors import InvalidArgumentError
from splitserve.generation.output_delta import TokenDelta
from splitserve.v1 import inference_pb2

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
MAX_ANSWERS = 1024
"""Most answers of a request to all of its prompts."""
COMPLETION_NOT_SERVED = NOT_SERVED | {
    "suffix": ("",),
    "prompt_embeds": (),
}

Prompt = str | list[int]


def as_prompts(value: Any) -> list[Prompt]:
    """The prompts, which may come in four forms, as a list. Raises ValueError."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value:
        texts = isinstance(value[0], str)
        if all(isinstance(prompt, str) if texts else _is_ids(prompt) for prompt in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids, or a list of such lists: of one form alone"
    )


def _is_ids(value: Any) -> bool:
    # A bool is an int to Python.
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token_id) is int and 0 <= token_id < 2**32 for token_id in value)
    )


class CompletionRequest(FormFields, GenerationFields):
    """The body of a completion request."""

    prompt: Annotated[list[Prompt], SkipValidation, BeforeValidator(as_prompts)]
    logprobs: UInt32 | None = None
    """Number of alternatives per token."""
    echo: bool | None = None
    """Whether each answer's text begins with its prompt."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Answers per prompt that are generated; the `n` with the highest mean log-probability of a token are returned."""
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if self.model_fields_set & FORM_FIELDS:
            _ = self.forms  # raises for several
        if self.best_of is not None and self.best_of < self.kept_choices:
            raise InvalidArgumentError("best_of must be at least n", field="best_of")
        if self.stream and self.choices > self.kept_choices:
            raise InvalidArgumentError("best_of is not supported beyond n on a stream", field="best_of")
        if self.echo and self.truncate_prompt_tokens is not None:
            message = "truncate_prompt_tokens cannot be given together with echo"
            raise InvalidArgumentError(message, field="truncate_prompt_tokens")
        if self.echo and self.logprobs is not None and self.prompt_logprobs not in (None, self.logprobs):
            message = "prompt_logprobs: with echo and logprobs it must be the same number as logprobs"
            raise InvalidArgumentError(message, field="prompt_logprobs")
        if len(self.prompt) * self.choices > MAX_ANSWERS:
            message = f"prompt: at most {MAX_ANSWERS} answers a request, n times prompts"
            raise InvalidArgumentError(message, field="prompt")
        return self

    @property
    @override
    def choices(self) -> int:
        return self.best_of or super().choices

    @property
    @override
    def prompt_alternatives(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def names(self) -> FieldNames:
        """The HTTP names of gRPC fields."""
        names = {
            "prompt.text": "prompt",
            "prompt.token_ids": "prompt",
            "sampling.grammar": self.narrowing_field,
        }
        if self.prompt_logprobs is None:
            names["sampling.prompt_logprobs"] = "logprobs"
        return FieldNames(names | (self.form_names if self.model_fields_set & FORM_FIELDS else {}))

    def generate_requests(self) -> list[inference_pb2.GenerateRequest]:
        """One request per choice: all choices of the first prompt, then all of the next. Raises InvalidArgumentError if
        they would take too much memory."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        compared = 0 if self.choices > self.kept_choices else None
        shared = self.shared_request(limit, compared if self.logprobs is None else self.logprobs)
        shared.omit_special_tokens = self.add_special_tokens is False
        if self.form is not None:
            shared.sampling.grammar.CopyFrom(self.form)
        most = max(1, MAX_COPIED_BYTES // (shared.ByteSize() or 1))
        if len(self.prompt) * self.choices > most:
            message = f"prompt: at most {most} answers, n times prompts, with settings as long as these"
            raise InvalidArgumentError(message, field="prompt")
        requests = []
        for prompt in self.prompt:
            if isinstance(prompt, str):
                shared.text = prompt
            else:
                shared.token_ids.Clear()
                shared.token_ids.ids.extend(prompt)
            requests += self.choice_requests(shared)
        return requests


class CompletionStream(ChoiceStream):
    """One streamed choice. `echo` is sent first."""

    def __init__(self, frame: Frame, index: int, extras: Extras = NO_EXTRAS, echo: str | None = None) -> None:
        super().__init__(frame, index, extras)
        self._text_head = f'{self._head}"text":'
        self._text_tail = f',"logprobs":null,"finish_reason":null{self._tail}'
        self._echo = echo
        self._logprobs = CompletionLogprobs(extras.texts) if extras.texts is not None else None
        self._length = 0

    @override
    def _events(self, delta: TokenDelta) -> str:
        events, text, extra = "", delta.text, self._extra_fields(delta)
        if self._echo:
            events, self._echo = self._chunk(self._echo), None
        self._length += len(text)
        if self._logprobs is not None and delta.logprobs:
            length = self._length if delta.finish_reason else None
            extra["logprobs"] = self._logprobs.to_json(delta.logprobs, length)
        if extra or (text and self.extras.counts_continuously):
            events += self._chunk(text, extra)
        elif text:
            events += f"{self._text_head}{quoted(text)}{self._text_tail}"
        return events

    @override
    def _end(self, finish_reason: str) -> str:
        return self._chunk("", finish_reason=finish_reason)

    def _chunk(
        self, text: str, extra: Mapping[str, Any] | None = None, finish_reason: str | None = None
    ) -> str:
        fields = {"text": text, "logprobs": None, "finish_reason": finish_reason, **(extra or {})}
        event = self._event(fields)
        if self._prompt_json:
            end = f',"prompt_token_ids":{self._prompt_json}{self._tail}'
            event, self._prompt_json = event.removesuffix(self._tail) + end, ""
        return event


class CompletionResponse(ChoiceBuilder):
    """One choice of a completion that is sent whole. Its text begins with `echo`."""

    def __init__(self, frame: Frame, index: int, extras: Extras = NO_EXTRAS, echo: str | None = None) -> None:
        super().__init__(frame, index, extras)
        self._echo, self._pieces = echo, [echo or ""]

    @override
    def to_json(self) -> dict[str, Any]:
        text, logprobs = "".join(self._pieces), None
        if self.extras.texts is not None:
            prompt = None if self._echo is None else self._prompt
            rendered = CompletionLogprobs(self.extras.texts, self._echo or "")
            logprobs = rendered.to_json(self._logprobs, len(text), prompt)
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
            **self._prompt_fields(),
            **self._extra_fields(),
        }
