"""What the Responses and the Messages API share: requests and answers made of items, over a chat request.

An item is a piece of reasoning, a text or a call. `Conversation` makes messages of the items of a request, `ItemAnswer`
makes items of an answer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, model_validator
from typing_extensions import override

from coordinator.entrypoints.http.exchange import ErrorResponse, HttpExchange
from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.openai.app import ChoiceRequests, run_choices
from coordinator.entrypoints.openai.bodies import Choice, Fields, validated
from coordinator.entrypoints.openai.chat import ChatRequest
from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.table import AnswerFormat
from coordinator.entrypoints.openai.formats.writer import (
    ArgumentsPart,
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
)
from splitserve.generation.output_delta import TokenDelta
from splitserve.v1 import generation_pb2, inference_pb2

SYSTEM = ("system", "developer")
MAX_METADATA = 16
"""Most entries of a request's `metadata`."""


class NestedFields(Fields):
    """Fields below those of the body. Null is the same as absent."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: inner for name, inner in value.items() if inner is not None}


class TypedPiece(NestedFields):
    """A value of one of several types. Fields beside those of its class are ignored: an item of an earlier answer comes
    back as it was."""

    model_config = ConfigDict(extra="ignore")
    needed: ClassVar[Mapping[str, Sequence[str]]]
    """By type, the fields that must be given."""
    type: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name in self.needed[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be given with type {self.type}")
        return self


def served(*kinds: str) -> BeforeValidator:
    """Refuses all types but these, by name."""

    def check(value: Any) -> Any:
        if value not in kinds:
            shown = repr(value[:64]) if isinstance(value, str) else "this"
            raise ValueError(f"{shown} is not served, only {', '.join(kinds)}")
        return value

    return BeforeValidator(check)


class Conversation:
    """Makes the messages of a chat request of items. What one role says in a row is one message: many chat templates
    want turns that alternate."""

    def __init__(self) -> None:
        self._turns: list[tuple[str, dict[str, list[Any]]]] = []
        """Role and pieces of each message."""

    def say(self, role: str, text: str) -> None:
        """Appends text."""
        self._append(role, "content", text)

    def think(self, text: str) -> None:
        """Appends reasoning of the assistant."""
        self._append("assistant", "reasoning_content", text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Appends a call of the assistant."""
        function = {"name": name, "arguments": arguments}
        self._append("assistant", "tool_calls", {"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """Appends the result of a call."""
        self._turns.append(("tool", {"content": [text], "tool_call_id": [call_id]}))

    def chat_request(self, fields: dict[str, Any]) -> ChatRequest:
        """The request with these messages and the fields that are not None. Raises InvalidArgumentError."""
        messages: list[dict[str, Any]] = []
        for role, pieces in self._turns:
            texts = {name: "\n".join(pieces[name]) for name in pieces if name != "tool_calls"}
            calls = {"tool_calls": pieces["tool_calls"]} if "tool_calls" in pieces else {}
            messages.append({"role": role, "content": "", **texts, **calls})
        given = {name: value for name, value in fields.items() if value is not None}
        return validated(ChatRequest, {"messages": messages, **given})

    @property
    def last_role(self) -> str | None:
        """The role of the last message."""
        return self._turns[-1][0] if self._turns else None

    def _append(self, role: str, name: str, piece: Any) -> None:
        last = self.last_role
        if last != role and not (last in SYSTEM and role in SYSTEM):
            self._turns.append((role, {}))
        self._turns[-1][1].setdefault(name, []).append(piece)


Kind = Literal["reasoning", "text", "call"]
KINDS: Mapping[type[Part], Kind] = {
    TextPart: "text",
    ReasoningPart: "reasoning",
    CallPart: "call",
    ArgumentsPart: "call",
}


@dataclass(slots=True)
class AnswerItem:
    """An item of an answer."""

    kind: Kind
    index: int
    call: CallPart | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments."""
        return "".join(self.pieces)


class ItemAnswer(Choice):
    """An answer as a sequence of items. Subclasses render it as server-sent events, and whole at its end."""

    streams = True
    _parser: AnswerParser

    def __init__(self, parser: AnswerParser | None, size: int = 0) -> None:
        """`parser`: as by `ChatRequest.parser`. `size`: characters that are shown beside the items."""
        super().__init__(parser or AnswerFormat().parser({}, must_call=False))
        self.items: list[AnswerItem] = []
        self.size = size
        """Characters so far."""
        self._begun = False
        self._done = inference_pb2.GenerationDone()

    @override
    def begin(self, started: inference_pb2.GenerationStart) -> bytes:
        self._begun = True
        return self._sent(self._begin(started.prompt_tokens))

    @override
    def delta(self, delta: TokenDelta) -> bytes:
        return self._sent(self._appended(self._parser.feed(delta.text, delta.token_ids)))

    @override
    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        self._done = done
        return b""

    def end(self) -> bytes:
        """The last events. Call it after `done`."""
        done, events = self._done, ""
        is_cut = done.finish_reason != generation_pb2.FINISH_REASON_STOP
        if not self._begun:
            events += self._begin(done.usage.prompt_tokens)
        events += self._appended(self._parser.close(is_cut=is_cut))
        if not self.items:
            events += self._open("text")
        return (events + self._close(self.items[-1], is_cut=is_cut) + self._end(done, is_cut=is_cut)).encode()

    @abstractmethod
    def failed(self, response: ErrorResponse) -> bytes:
        """The events of an error that ends the stream."""

    @abstractmethod
    def whole(self) -> bytes:
        """The answer as one JSON object. Call it after `end`."""

    @abstractmethod
    def _begin(self, prompt_tokens: int) -> str:
        """The events before all items."""

    @abstractmethod
    def _opened(self, item: AnswerItem) -> str:
        """The events of a new item, which is empty."""

    @abstractmethod
    def _grown(self, item: AnswerItem, piece: str) -> str:
        """The events of a piece of an item."""

    @abstractmethod
    def _close(self, item: AnswerItem, *, is_cut: bool) -> str:
        """The events at the end of an item. `is_cut`: the model would have gone on."""

    @abstractmethod
    def _end(self, done: inference_pb2.GenerationDone, *, is_cut: bool) -> str:
        """The events after all items."""

    def _sent(self, events: str) -> bytes:
        return events.encode() if self.streams else b""

    def _appended(self, parts: list[Part]) -> str:
        events = ""
        for part in parts:
            kind, last = KINDS[type(part)], self.items[-1] if self.items else None
            if isinstance(part, CallPart) or last is None or last.kind != kind:
                events += self._close(last, is_cut=False) if last is not None else ""
                events += self._open(kind, part if isinstance(part, CallPart) else None)
            if not isinstance(part, CallPart):
                self.items[-1].pieces.append(part.text)
                self.size += len(part.text)
                events += self._grown(self.items[-1], part.text)
        return events

    def _open(self, kind: Kind, call: CallPart | None = None) -> str:
        self.items.append(AnswerItem(kind, len(self.items), call))
        return self._opened(self.items[-1])


def event(name: str, fields: str) -> str:
    """A server-sent event whose data is `name` as its type, and the JSON `fields`."""
    return f'event: {name}\ndata: {{"type":"{name}"{"," if fields else ""}{fields}}}\n\n'


async def serve_items(
    exchange: HttpExchange,
    api: InferenceApi,
    choice_requests: ChoiceRequests,
    answer: ItemAnswer,
    *,
    streams: bool,
    keep: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serves a request with one choice. As with chat, nothing is sent before the first delta. `keep`: called when the
    answer is complete, before its end is sent."""
    exchange.error_event, answer.streams = answer.failed, streams
    async with exchange.while_connected():
        await run_choices(exchange, api, choice_requests, [answer])
        events = await api.parser.run(answer.size, answer.end)
        if keep is not None:
            await keep()
        if streams:
            await exchange.event(events)
            await exchange.end_events()
        else:
            await exchange.respond(200, await api.parser.run(answer.size, answer.whole))
