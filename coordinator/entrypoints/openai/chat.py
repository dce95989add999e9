"""`/v1/chat/completions`: the request's fields, the GenerateRequests that it asks for, and its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from coordinator.entrypoints.http.exchange import FieldNames
from coordinator.entrypoints.openai.bodies import (
    NO_EXTRAS,
    NOT_SERVED,
    ChoiceBuilder,
    ChoiceStream,
    Extras,
    Fields,
    Frame,
    GenerationFields,
    OpenFields,
    UInt32,
    compact_json,
)
from coordinator.entrypoints.openai.call_grammar import answer_grammar, rule_places
from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.arguments import quoted
from coordinator.entrypoints.openai.formats.table import AnswerFormat
from coordinator.entrypoints.openai.formats.writer import (
    ArgumentsPart,
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
)
from coordinator.entrypoints.openai.logprobs import chat_logprobs
from coordinator.entrypoints.openai.tools import (
    FORM_FIELDS,
    FormFields,
    Function,
    NamedTool,
    Tool,
    ToolChoice,
)
from splitserve.errors import InvalidArgumentError
from splitserve.generation.output_delta import TokenDelta
from splitserve.models.tokenizer import THINKING
from splitserve.v1 import generation_pb2, inference_pb2

CHAT_NOT_SERVED = NOT_SERVED | {
    "functions": (),
    "function_call": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "moderation": (),
    "verbosity": ("medium",),
}

CHAT_NAMES = {
    "prompt.chat.messages": "messages",
    "prompt.chat.tools_json": "tools",
    "prompt.chat.template_kwargs_json": "chat_template_kwargs",
    "prompt.chat.template_kwargs_json.documents": "documents",
    "prompt.chat.template_kwargs_json.reasoning_effort": "reasoning_effort",
    "prompt.chat.": "",
    "prompt.chat": "messages",
}
"""The HTTP names of a conversation's gRPC fields."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def joined_text(content: Any, kinds: Sequence[str] = ("text", "refusal")) -> Any:
    """A message's text; parts are joined with newlines. Raises ValueError for parts of other kinds than these."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    return "\n".join(_part_text(position, part, kinds) for position, part in enumerate(content))


def _part_text(position: int, part: Any, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        shown = f'"{kind[:32]}"' if isinstance(kind, str) else "without a type"
        raise ValueError(f"part {position} is {shown}; only text parts are served")
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str):
        raise ValueError(f"part {position} must have its {key} as a string")
    return text


class CalledFunction(OpenFields):
    """The function of a call that the assistant made."""

    name: str
    arguments: str | None = None


class MadeCall(OpenFields):
    """A tool call in an earlier message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(OpenFields):
    """One message of the conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, BeforeValidator(joined_text)] = ""
    refusal: str | None = None
    """What the assistant said in place of content."""
    name: str | None = None
    tool_calls: Annotated[list[MadeCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    """Part of an earlier answer; without effect."""

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


class TemplateFields(Fields):
    """What a chat template reads beside messages and tools. Null is the same as absent."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables, such as `enable_thinking`."""
    reasoning_effort: Effort | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    """In place of the model's."""

    def template_fields(self, *, with_documents: bool = True) -> inference_pb2.ChatMessages:
        """These fields. As in vLLM, an effort also switches thinking on or off, unless the variables do."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            if variables.keys().isdisjoint(THINKING):
                variables |= dict.fromkeys(THINKING, self.reasoning_effort != "none")
            variables["reasoning_effort"] = self.reasoning_effort
        if with_documents and self.documents is not None:
            variables["documents"] = self.documents
        return inference_pb2.ChatMessages(
            template_kwargs_json=compact_json(variables) if variables else "",
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            chat_template=self.chat_template or "",
        )

    def conversation(self, messages: Sequence[Message], tools: Sequence[Tool]) -> inference_pb2.ChatMessages:
        """The conversation with these fields."""
        chat = self.template_fields()
        chat.messages.extend(message.to_proto() for message in messages)
        if tools:
            chat.tools_json = compact_json([tool.model_dump(exclude_unset=True) for tool in tools])
        return chat


class ChatRequest(FormFields, GenerationFields, TemplateFields):
    """The body of a chat request."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.model_fields_set & FORM_FIELDS:
            _ = self.forms  # raises for several
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgumentError("top_logprobs needs logprobs: true", field="top_logprobs")
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
        """The parser of an answer; None if the answer has neither reasoning nor tool calls."""
        if answer.tools is None and answer.reasoning is None:
            return None
        functions = self._callable_functions()
        schemas = {function.name: function.parameters for _, function in functions}
        return answer.parser(schemas, must_call=self.must_call)

    @property
    def names(self) -> FieldNames:
        """The HTTP names of gRPC fields."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        names = {
            "prompt.chat": "messages",
            "sampling.logprobs": "top_logprobs",
            "sampling.grammar": self.narrowing_field,
            "stop.max_tokens": limit,
        }
        if self.model_fields_set & FORM_FIELDS:
            lark = "tools" if self.uses_tools else self.form_field
            names |= self.form_names | {"sampling.grammar.lark": lark}
        return self.names_as(names, "function.parameters")

    def names_as(self, names: Mapping[str, str], schema: str) -> FieldNames:
        """The names that gRPC fields have in an API, beside those of `messages` and `tools`. `schema`: where a tool has
        its schema."""
        places = rule_places(self._callable_functions(), schema) if self.tools else {}
        return FieldNames({**CHAT_NAMES, "sampling.grammar.lark": "tools", **names}, places)

    def grammar(self, answer: AnswerFormat, loose: Set[int] = frozenset()) -> generation_pb2.Grammar | None:
        """The grammar of an answer of this format; None: any text. `loose`: numbers of functions whose arguments may be
        any object."""
        if not self.uses_tools and not self.model_fields_set & FORM_FIELDS:
            return None
        functions = [function for _, function in self._callable_functions()]
        for number in loose:
            functions[number] = functions[number].model_copy(update={"strict": False})
        parallel = self.parallel_tool_calls is not False
        return answer_grammar(answer, functions, must_call=self.must_call, parallel=parallel, form=self.form)

    @property
    def lenient_functions(self) -> set[int]:
        """The numbers of the functions whose schema may be given up: the request says nothing about strictness."""
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
        """One request per choice. `keep_special`: the answer's text includes special tokens."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        shared = self.shared_request(limit, (self.top_logprobs or 0) if self.logprobs else None)
        shared.stop.keep_special_tokens |= keep_special
        tools = (self.tools or ()) if self.uses_tools else ()
        shared.chat.CopyFrom(self.conversation(self.messages, tools))
        if grammar is not None:
            shared.sampling.grammar.CopyFrom(grammar)
        return self.choice_requests(shared)

    def _callable_functions(self) -> list[tuple[int, Function]]:
        """The functions that may be called, with their places in `tools`."""
        if not self.uses_tools:
            return []
        functions = [(place, tool.function) for place, tool in enumerate(self.tools or ())]
        if not isinstance(self.tool_choice, NamedTool):
            return functions
        name = self.tool_choice.name
        return [(place, function) for place, function in functions if function.name == name]


class ChatStream(ChoiceStream):
    """One streamed choice. `parser`: as by `ChatRequest.parser`."""

    def __init__(
        self, frame: Frame, index: int, extras: Extras = NO_EXTRAS, parser: AnswerParser | None = None
    ) -> None:
        super().__init__(frame, index, extras, parser)
        self._text_head = f'{self._head}"delta":{{"content":'
        self._text_tail = f'}},"logprobs":null,"finish_reason":null{self._tail}'
        is_constant = not extras.counts_continuously and not extras.token_ids
        self._is_plain = extras.texts is None and parser is None and is_constant
        self._begun = False

    @override
    def _events(self, delta: TokenDelta) -> str:
        text = delta.text
        if self._is_plain:
            events = f"{self._text_head}{quoted(text)}{self._text_tail}" if text else ""
        else:
            events = self._special(delta)
        if not self._begun:
            self._begun = True
            first = self._chunk({"role": "assistant", "content": ""})
            if self._prompt_json:
                tail = f'}}],"prompt_token_ids":{self._prompt_json}{self._tail.removeprefix("}]")}'
                first, self._prompt_json = first.removesuffix(self._tail) + tail, ""
            events = first + events
        return events

    def _special(self, delta: TokenDelta) -> str:
        """The events of a delta with logprobs or token ids, which its first event carries, or with parts that the
        parser finds."""
        extra = self._extra_fields(delta)
        if self.extras.texts is not None and delta.logprobs:
            extra["logprobs"] = chat_logprobs(self.extras.texts, delta.logprobs)
        if self._parser is not None:
            parts = [_shown(part) for part in self._parser.feed(delta.text, delta.token_ids)]
        else:
            parts = [{"content": delta.text}] if delta.text or extra else []
        if extra and not parts:
            parts = [{}]
        return "".join(self._chunk(part, None if place else extra) for place, part in enumerate(parts))

    @override
    def _end(self, finish_reason: str) -> str:
        events = ""
        if self._parser is not None:
            parts = self._parser.close(is_cut=finish_reason != "stop")
            events = "".join(self._chunk(_shown(part)) for part in parts)
            if self._parser.calls and finish_reason == "stop":
                finish_reason = "tool_calls"
        return events + self._chunk({}, finish_reason=finish_reason)

    def _chunk(
        self,
        delta: dict[str, Any],
        extra: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> str:
        fields = {"delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._event({**fields, **extra} if extra else fields)


def _shown(part: Part) -> dict[str, Any]:
    """The part as the `delta` of a chunk."""
    match part:
        case TextPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallPart(index):
            return {"tool_calls": [{"index": index} | _call(part, "")]}
        case ArgumentsPart(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ChatResponse(ChoiceBuilder):
    """One choice of a chat response that is sent whole. `parser`: as by `ChatRequest.parser`."""

    def __init__(
        self, frame: Frame, index: int, extras: Extras = NO_EXTRAS, parser: AnswerParser | None = None
    ) -> None:
        super().__init__(frame, index, extras, parser)
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallPart, list[str]]] = []

    @override
    def _read(self, delta: TokenDelta) -> None:
        if self._parser is None:
            super()._read(delta)
        else:
            self._append(self._parser.feed(delta.text, delta.token_ids))

    @override
    def to_json(self) -> dict[str, Any]:
        finish_reason, texts = self._finish_reason, self.extras.texts
        if self._parser is not None:
            self._append(self._parser.close(is_cut=finish_reason != "stop"))
        content = "".join(self._pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning_tokens is not None:
            reasoning = "".join(self._reasoning) or None
            message |= {"content": content or None, "reasoning_content": reasoning, "reasoning": reasoning}
        if self._calls:
            calls = [_call(part, "".join(pieces)) for part, pieces in self._calls]
            message |= {"content": content or None, "tool_calls": calls}
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        return {
            "index": self._index,
            "message": message,
            "logprobs": chat_logprobs(texts, self._logprobs) if texts is not None else None,
            "finish_reason": finish_reason,
            **self._extra_fields(),
        }

    @override
    def beside_choices(self) -> dict[str, Any]:
        return self._prompt_fields()

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


def _call(part: CallPart, arguments: str) -> dict[str, Any]:
    function = {"name": part.name, "arguments": arguments}
    return {"id": part.call_id, "type": "function", "function": function}
