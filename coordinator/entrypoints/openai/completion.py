"""`/v1/completions`: the request's fields, the GenerateRequests that it asks for, and its responses."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SkipValidation, model_validator
from typing_extensions import override

from coordinator.entrypoints.http.exchange import FieldNames
from coordinator.entrypoints.openai.bodies import (
    FINISH_REASONS,
    NOT_SERVED,
    ChoiceBuilder,
    ChoiceStream,
    ChunkFrame,
    Frame,
    GenerationFields,
    UInt32,
    check_answers,
    quoted,
)
from coordinator.entrypoints.openai.logprobs import CompletionLogprobs, TokenTexts
from coordinator.entrypoints.openai.tools import ResponseFormat
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2, inference_pb2

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of this endpoint."""
MAX_ANSWERS = 1024
"""Answers per request, over all of its prompts."""
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


class CompletionRequest(GenerationFields):
    """The body of a completion request."""

    prompt: Annotated[list[Prompt], SkipValidation, BeforeValidator(_prompts)]
    logprobs: UInt32 | None = None
    """Number of alternatives per token."""
    echo: bool | None = None
    """Whether each answer's text begins with its prompt."""
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
        response_format = self.response_format
        if response_format is not None and (response_format.type == "json_schema") != (
            response_format.json_schema is not None
        ):
            message = 'response_format.json_schema goes with type "json_schema", and with that alone'
            raise InvalidArgumentError(message, field="response_format.json_schema")
        return self

    @property
    def names(self) -> FieldNames:
        """The HTTP names of gRPC fields."""
        prompts = {"prompt.text": "prompt", "prompt.token_ids": "prompt"}
        return FieldNames(prompts | {"sampling.grammar": "response_format"})

    def _shared(self) -> inference_pb2.GenerateRequest:
        """What all choices have in common: all but the prompt and the seed."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        shared = inference_pb2.GenerateRequest(
            model=self.model or "",
            sampling=self.sampling(0, self.logprobs),
            stop=self.stop_params(limit),
            priority=self.priority or 0,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            session_id=self.session_id,
        )
        if self.response_format is not None and (grammar := self.response_format.grammar) is not None:
            shared.sampling.grammar.CopyFrom(grammar)
        return shared

    def generate_requests(self) -> list[inference_pb2.GenerateRequest]:
        """One request per choice: all choices of the first prompt, then all of the next. Raises InvalidArgumentError if
        they would take too much memory."""
        shared = self._shared()
        check_answers(len(self.prompt) * self.choices, shared.ByteSize())
        requests = []
        for prompt in self.prompt:
            for choice in range(self.choices):
                request = inference_pb2.GenerateRequest()
                request.CopyFrom(shared)
                if self.seed is not None:
                    request.sampling.seed = self.seed_of(choice)
                if isinstance(prompt, str):
                    request.text = prompt
                else:
                    request.token_ids.ids.extend(prompt)
                requests.append(request)
        return requests


class CompletionStream(ChoiceStream):
    """One streamed choice. `echo` is sent first; `texts` is given if logprobs were requested."""

    def __init__(
        self, frame: Frame, index: int, *, has_usage: bool, echo: str = "", texts: TokenTexts | None = None
    ) -> None:
        self._frame = ChunkFrame(frame, index, has_usage)
        self._before = f'{self._frame.before}"text":'
        self._after = f',"logprobs":null,"finish_reason":null{self._frame.after}'
        self._echo = echo
        self._logprobs = CompletionLogprobs(texts) if texts else None
        self._length = 0
        self._ended = False

    @override
    def delta(self, delta: generation_pb2.OutputDelta) -> bytes:
        events, text = "", delta.text
        if self._echo:
            events, self._echo = self._chunk(self._echo), ""
        self._length += len(text)
        if self._logprobs is not None and delta.logprobs:
            length = self._length if delta.finish_reason else None
            events += self._chunk(text, self._logprobs.to_json(delta.logprobs, length))
        elif text:
            events += f"{self._before}{quoted(text)}{self._after}"
        if delta.finish_reason:
            events += self._end(delta.finish_reason)
        return events.encode()

    @override
    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        return b"" if self._ended else self._end(done.finish_reason).encode()

    def _end(self, reason: int) -> str:
        self._ended = True
        return self._chunk("", finish_reason=FINISH_REASONS[reason])

    def _chunk(
        self, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> str:
        return self._frame.chunk({"text": text, "logprobs": logprobs, "finish_reason": finish_reason})


class CompletionResponse(ChoiceBuilder):
    """One choice of a whole completion."""

    @override
    def to_json(self, done: inference_pb2.GenerationDone) -> dict[str, Any]:
        text, logprobs = "".join(self._pieces), None
        if self._texts is not None:
            logprobs = CompletionLogprobs(self._texts).to_json(self._logprobs, len(text))
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": FINISH_REASONS[done.finish_reason],
        }
