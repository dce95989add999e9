"""What responses of both endpoints have in common: the enclosing object, the choice interfaces, usage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from splitserve.v1 import generation_pb2, inference_pb2

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

    def delta(self, delta: generation_pb2.OutputDelta) -> bytes:
        """The events for this delta; may be empty."""

    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        """The remaining events; may be empty."""


class ChoiceBuilder(Protocol):
    """One choice of a response that is sent at once."""

    def delta(self, delta: generation_pb2.OutputDelta) -> None:
        """Appends a delta."""

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

    def add(self, choice: int, done: inference_pb2.GenerationDone) -> None:
        """Adds a finished answer."""
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
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }
