"""`/v1/completions`: the request's fields and the generations that it asks for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from coordinator.openai.errors import FieldNames
from coordinator.openai.fields import NOT_SERVED, GenerationFields, UInt32
from coordinator.openai.tool_fields import ResponseFormat, format_grammar
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import inference_pb2

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of this endpoint."""
MAX_ANSWERS = 1024
"""Over all prompts of a request."""
COMPLETION_NOT_SERVED = NOT_SERVED | {
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """The four forms of a prompt as a list. Raises ValueError."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) or _is_ids(one) for one in value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _is_ids(value: Any) -> bool:
    # A bool is an int to Python.
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(one) is int and 0 <= one < 2**32 for one in value)
    )


class CompletionRequest(GenerationFields):
    """The body of a completion request."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    logprobs: UInt32 | None = None
    """How many alternatives a token."""
    echo: bool | None = None
    """Begin each answer's text with its prompt."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options needs stream: true", field="stream_options")
        if self.best_of is not None and self.best_of != self.choices:
            raise InvalidArgumentError("best_of is not supported beyond n", field="best_of")
        if self.echo and self.logprobs is not None:
            message = "echo: log-probabilities of the prompt are not served; leave out echo or logprobs"
            raise InvalidArgumentError(message, field="echo")
        if len(self.prompt) * self.choices > MAX_ANSWERS:
            message = f"prompt: at most {MAX_ANSWERS} answers a request, n times prompts"
            raise InvalidArgumentError(message, field="prompt")
        wanted = self.response_format
        if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
            message = 'response_format.json_schema goes with type "json_schema", and with that alone'
            raise InvalidArgumentError(message, field="response_format.json_schema")
        return self

    @property
    def names(self) -> FieldNames:
        """What gRPC's fields are called here."""
        prompts = {"prompt.text": "prompt", "prompt.token_ids": "prompt"}
        return FieldNames(prompts | {"sampling.grammar": "response_format"})

    def generations(self) -> list[inference_pb2.GenerateRequest]:
        """One for each answer wanted: all of the first prompt, then all of the next."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        stop, grammar = self.stop_params(limit), format_grammar(self.response_format)
        made = []
        for prompt in self.prompt:
            for choice in range(self.choices):
                sampling = self.sampling(choice, self.logprobs)
                if grammar is not None:
                    sampling.grammar.CopyFrom(grammar)
                request = inference_pb2.GenerateRequest(
                    model=self.model or "",
                    sampling=sampling,
                    stop=stop,
                    priority=self.priority or 0,
                    session_id=self.session_id,
                )
                if isinstance(prompt, str):
                    request.text = prompt
                else:
                    request.token_ids.ids.extend(prompt)
                made.append(request)
        return made
