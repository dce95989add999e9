"""`/v1/chat/completions`: the request's fields, the GenerateRequests that it asks for, and its responses."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import override

from coordinator.entrypoints.http.exchange import FieldNames
from coordinator.entrypoints.openai.bodies import (
    FINISH_REASONS,
    NOT_SERVED,
    ChoiceBuilder,
    ChoiceStream,
    ChunkFrame,
    Fields,
    Frame,
    GenerationFields,
    UInt32,
    compact_json,
    quoted,
)
from coordinator.entrypoints.openai.call_grammar import AnswerTerms, answer_grammar, rule_places
from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.table import AnswerFormat
from coordinator.entrypoints.openai.formats.writer import (
    ArgumentsPart,
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
)
from coordinator.entrypoints.openai.logprobs import TokenTexts, chat_logprobs
from coordinator.entrypoints.openai.tools import Function, NamedTool, ResponseFormat, Tool, ToolChoice
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2, inference_pb2

CHAT_NOT_SERVED = NOT_SERVED | {
    "functions": (),
    "function_call": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "moderation": (),
    "reasoning_effort": ("none", "medium"),
    "verbosity": ("medium",),
}


def _joined(content: Any) -> Any:
    """A message's text; parts are joined with newlines. Raises ValueError for parts other than text."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    return "\n".join(_part_text(position, part) for position, part in enumerate(content))


def _part_text(position: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        shown = f'"{kind[:32]}"' if isinstance(kind, str) else "without a type"
        raise ValueError(f"part {position} is {shown}; only text parts are served")
    text = part.get(kind)
    if not isinstance(text, str):
        raise ValueError(f"part {position} must have its {kind} as a string")
    return text


class CalledFunction(Fields):
    """The function of a call made by the assistant. Whether the template reads further fields is known later."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | None = None


class MadeCall(Fields):
    """A tool call in an earlier message of the assistant. Whether the template reads further fields is known later."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Fields):
    """One message of the conversation. Whether the template reads further fields is known later."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    refusal: str | None = None
    """What the assistant has said in place of a content."""
    name: str | None = None
    tool_calls: Annotated[list[MadeCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    """Of an earlier answer; without effect."""

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        says = {"content", "refusal", "tool_calls"} & self.model_fields_set
        if not says and not self.model_extra:
            raise ValueError("content must be given")
        return self

    def to_proto(self) -> inference_pb2.ChatMessage:
        """The message as a proto."""
        calls = [call.model_dump(exclude_unset=True, exclude_none=True) for call in self.tool_calls or ()]
        further = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if self.content and self.refusal:
            further["refusal"] = self.refusal
        return inference_pb2.ChatMessage(
            role=self.role,
            content=self.content or self.refusal or "",
            tool_calls_json=compact_json(calls) if calls else "",
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
            further_json=compact_json(further) if further else "",
        )


class ChatRequest(GenerationFields):
    """The body of a chat request."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options needs stream: true", field="stream_options")
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgumentError("top_logprobs needs logprobs: true", field="top_logprobs")
        response_format = self.response_format
        if response_format is not None and (response_format.type == "json_schema") != (
            response_format.json_schema is not None
        ):
            message = 'response_format.json_schema goes with type "json_schema", and with that alone'
            raise InvalidArgumentError(message, field="response_format.json_schema")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidArgumentError("tool_choice needs tools", field="tool_choice")
        if isinstance(self.tool_choice, NamedTool) and not self._callable_functions():
            message = f"tool_choice: there is no tool {self.tool_choice.name!r}"
            raise InvalidArgumentError(message, field="tool_choice")
        return self

    @property
    def uses_tools(self) -> bool:
        """Whether the answer may contain tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer is tool calls and nothing else."""
        return self.tool_choice not in (None, "auto", "none")

    def parser(self, answer: AnswerFormat) -> AnswerParser | None:
        """What finds the reasoning and the tool calls in an answer; None if there can be nothing to find."""
        if answer.tools is None and answer.reasoning is None:
            return None
        functions = self._callable_functions()
        schemas = {function.name: function.parameters for _, function in functions}
        return answer.parser(schemas, must_call=self.must_call)

    @property
    def names(self) -> FieldNames:
        """The HTTP names of gRPC fields."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return FieldNames(
            {
                "prompt.chat.messages": "messages",
                "prompt.chat.tools_json": "tools",
                "prompt.chat": "messages",
                "sampling.logprobs": "top_logprobs",
                "sampling.grammar.lark": "tools",
                "sampling.grammar": "response_format",
                "stop.max_tokens": limit,
            },
            rule_places(self._callable_functions()) if self.tools else {},
        )

    def grammar(self, answer: AnswerFormat, loose: Set[int] = frozenset()) -> generation_pb2.Grammar | None:
        """What an answer of this format is held to; None: it may be any text. The arguments of the functions of these
        numbers are any object."""
        if not self.uses_tools and self.response_format is None:
            return None
        functions = [function for _, function in self._callable_functions()]
        for number in loose:
            functions[number] = functions[number].model_copy(update={"strict": False})
        terms = AnswerTerms(
            functions, self.must_call, self.parallel_tool_calls is not False, self.response_format
        )
        return answer_grammar(terms, answer)

    @property
    def lenient_functions(self) -> set[int]:
        """The numbers of the functions with a schema that nobody asks to be strict about."""
        functions = enumerate(self._callable_functions())
        return {
            number for number, (_, function) in functions if function.strict is None and function.parameters
        }

    def function_names(self, numbers: Set[int]) -> list[str]:
        """The names of these functions."""
        functions = self._callable_functions()
        return [functions[number][1].name for number in sorted(numbers)]

    def generate_requests(
        self, grammar: generation_pb2.Grammar | None = None, *, keep_special: bool = False
    ) -> list[inference_pb2.GenerateRequest]:
        """One request per choice. `keep_special`: the text has the names of special tokens."""
        chat = inference_pb2.ChatMessages(messages=[message.to_proto() for message in self.messages])
        if self.tools and self.tool_choice != "none":
            chat.tools_json = compact_json([tool.model_dump(exclude_unset=True) for tool in self.tools])
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        stop = self.stop_params(limit)
        stop.keep_special_tokens = keep_special
        requests = []
        for choice in range(self.choices):
            sampling = self.sampling(choice, logprobs)
            if grammar is not None:
                sampling.grammar.CopyFrom(grammar)
            requests.append(
                inference_pb2.GenerateRequest(
                    model=self.model or "",
                    chat=chat,
                    sampling=sampling,
                    stop=stop,
                    priority=self.priority or 0,
                    ttft_ms=self.ttft_ms,
                    tpot_ms=self.tpot_ms,
                    session_id=self.session_id,
                )
            )
        return requests

    def _callable_functions(self) -> list[tuple[int, Function]]:
        """The functions that may be called, with their places in `tools`."""
        if not self.uses_tools:
            return []
        functions = [(place, tool.function) for place, tool in enumerate(self.tools or ())]
        if not isinstance(self.tool_choice, NamedTool):
            return functions
        name = self.tool_choice.name
        return [(place, function) for place, function in functions if function.name == name]


_BEGIN = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
"""The choice of a stream's first chunk."""


_CONTENT = '"content":'


class ChatStream(ChoiceStream):
    """One streamed choice. `texts` is given if logprobs were requested, `parser` if there may be reasoning or
    tool calls."""

    def __init__(
        self,
        frame: Frame,
        index: int,
        *,
        has_usage: bool,
        texts: TokenTexts | None = None,
        parser: AnswerParser | None = None,
    ) -> None:
        self._frame = ChunkFrame(frame, index, has_usage)
        self._before = f'{self._frame.before}"delta":{{{_CONTENT}'
        self._after = f'}},"logprobs":null,"finish_reason":null{self._frame.after}'
        self._texts, self._parser = texts, parser
        self._is_plain = texts is None and parser is None
        self._begun = self._ended = False

    @property
    @override
    def reasoning_tokens(self) -> int | None:
        return _reasoning_tokens(self._parser)

    @override
    def delta(self, delta: generation_pb2.OutputDelta) -> bytes:
        text = delta.text
        if self._is_plain:
            events = f"{self._before}{quoted(text)}{self._after}" if text else ""
        else:
            events = self._special(delta)
        if not self._begun:
            self._begun = True
            events = f"{self._frame.before}{_BEGIN}{self._frame.after}{events}"
        if delta.finish_reason:
            events += self._end(delta.finish_reason)
        return events.encode()

    @override
    def done(self, done: inference_pb2.GenerationDone) -> bytes:
        return b"" if self._ended else self._end(done.finish_reason).encode()

    def _special(self, delta: generation_pb2.OutputDelta) -> str:
        logprobs = None
        if self._texts is not None and delta.logprobs:
            logprobs = chat_logprobs(self._texts, delta.logprobs)
        if self._parser is None:
            shown = [{"content": delta.text}] if delta.text or logprobs else []
        else:
            parts = self._parser.feed(delta.text, delta.token_ids)
            if not logprobs:
                return "".join(map(self._event, parts))
            shown = [_shown(part) for part in parts] or [{}]
        events = ""
        for fields in shown:
            events += self._chunk(fields, logprobs)
            logprobs = None  # only in the first chunk of these tokens
        return events

    def _end(self, reason: int) -> str:
        self._ended = True
        events, name = "", FINISH_REASONS[reason]
        if self._parser is not None:
            left = self._parser.close(is_cut=name != "stop")
            events = "".join(map(self._event, left))
            if self._parser.calls and name == "stop":
                name = "tool_calls"
        end = f'"delta":{{}},"logprobs":null,"finish_reason":"{name}"'
        return f"{events}{self._frame.before}{end}{self._frame.after}"

    def _event(self, part: Part) -> str:
        """The part as an event. Text and reasoning, of which there is much, are put together without a dictionary."""
        match part:
            case TextPart(text):
                return f"{self._before}{quoted(text)}{self._after}"
            case ReasoningPart(text):
                shown = quoted(text)
                return f'{self._before[: -len(_CONTENT)]}"reasoning_content":{shown},"reasoning":{shown}{self._after}'
        return self._chunk(_shown(part))

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> str:
        return self._frame.chunk({"delta": delta, "logprobs": logprobs, "finish_reason": None})


def _shown(part: Part) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallPart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call: dict[str, Any] = {
                "index": index,
                "id": call_id,
                "type": "function",
                "function": function,
            }
        case ArgumentsPart(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}


class ChatResponse(ChoiceBuilder):
    """One choice of a whole chat response. `parser` is given if there may be reasoning or tool calls."""

    def __init__(
        self, index: int, *, texts: TokenTexts | None = None, parser: AnswerParser | None = None
    ) -> None:
        super().__init__(index, texts=texts)
        self._parser = parser
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallPart, list[str]]] = []

    @property
    @override
    def reasoning_tokens(self) -> int | None:
        return _reasoning_tokens(self._parser)

    @override
    def delta(self, delta: generation_pb2.OutputDelta) -> None:
        if self._parser is None:
            super().delta(delta)
            return
        self._append(self._parser.feed(delta.text, delta.token_ids))
        if self._texts is not None:
            self._logprobs.extend(delta.logprobs)

    @override
    def to_json(self, done: inference_pb2.GenerationDone) -> dict[str, Any]:
        finish_reason = FINISH_REASONS[done.finish_reason]
        if self._parser is not None:
            self._append(self._parser.close(is_cut=finish_reason != "stop"))
        content = "".join(self._pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._parser is not None and self._parser.has_reasoning:
            reasoning = "".join(self._reasoning) or None
            message |= {"content": content or None, "reasoning_content": reasoning, "reasoning": reasoning}
        if self._calls:
            message |= {"content": content or None, "tool_calls": [_call(*call) for call in self._calls]}
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        return {
            "index": self._index,
            "message": message,
            "logprobs": chat_logprobs(self._texts, self._logprobs) if self._texts else None,
            "finish_reason": finish_reason,
        }

    def _append(self, parts: list[Part]) -> None:
        for part in parts:
            match part:
                case TextPart(piece):
                    self._pieces.append(piece)
                case ReasoningPart(piece):
                    self._reasoning.append(piece)
                case CallPart():
                    self._calls.append((part, []))
                case ArgumentsPart(index, piece):
                    self._calls[index][1].append(piece)


def _call(part: CallPart, arguments: list[str]) -> dict[str, Any]:
    function = {"name": part.name, "arguments": "".join(arguments)}
    return {"id": part.call_id, "type": "function", "function": function}


def _reasoning_tokens(parser: AnswerParser | None) -> int | None:
    return parser.reasoning_tokens if parser is not None and parser.has_reasoning else None
