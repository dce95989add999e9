"""`/v1/chat/completions`: the request's fields and the GenerateRequests that it asks for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from coordinator.entrypoints.http.errors import FieldNames
from coordinator.entrypoints.openai.fields import NOT_SERVED, Fields, GenerationFields, UInt32, compact_json
from coordinator.entrypoints.openai.tools import (
    Function,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolChoice,
    format_grammar,
    tools_grammar,
)
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
    """The function of a call made by the assistant."""

    name: str
    arguments: str = "{}"


class MadeCall(Fields):
    """A tool call in an earlier message of the assistant."""

    id: str = ""
    type: str = "function"
    function: CalledFunction


class Message(Fields):
    """One message of the conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    name: str | None = None
    tool_calls: Annotated[list[MadeCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def to_proto(self) -> inference_pb2.ChatMessage:
        """The message as a proto. "developer" is OpenAI's newer name for "system", which chat templates do not know."""
        calls = [call.model_dump() for call in self.tool_calls or ()]
        return inference_pb2.ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=self.content,
            tool_calls_json=compact_json(calls) if calls else "",
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
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
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgumentError("top_logprobs needs logprobs: true", field="top_logprobs")
        response_format = self.response_format
        if response_format is not None and (response_format.type == "json_schema") != (
            response_format.json_schema is not None
        ):
            message = 'response_format.json_schema goes with type "json_schema", and with that alone'
            raise InvalidArgumentError(message, field="response_format.json_schema")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidArgumentError("tool_choice needs tools", field="tool_choice")
        return self

    @property
    def uses_tools(self) -> bool:
        """Whether the answer may contain tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

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
            }
        )

    def generate_requests(self) -> list[inference_pb2.GenerateRequest]:
        """One request per choice."""
        chat = inference_pb2.ChatMessages(messages=[message.to_proto() for message in self.messages])
        if self.tools and self.tool_choice != "none":
            chat.tools_json = compact_json([tool.model_dump(exclude_unset=True) for tool in self.tools])
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        grammar, stop = self._grammar(), self.stop_params(limit)
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

    def _grammar(self) -> generation_pb2.Grammar | None:
        if not self.uses_tools:
            return format_grammar(self.response_format) if self.response_format is not None else None
        response_format = self.response_format
        schema = {"type": "object"} if response_format and response_format.type == "json_object" else None
        if response_format and response_format.json_schema:
            schema = response_format.json_schema.json_schema
        return tools_grammar(
            self._callable_functions(),
            must_call=self.tool_choice not in (None, "auto"),
            parallel=self.parallel_tool_calls is not False,
            content_schema=schema,
        )

    def _callable_functions(self) -> list[Function]:
        functions = [tool.function for tool in self.tools or ()]
        if not isinstance(self.tool_choice, NamedTool):
            return functions
        name = self.tool_choice.name
        chosen = [function for function in functions if function.name == name]
        if not chosen:
            raise InvalidArgumentError(f"tool_choice: there is no tool {name!r}", field="tool_choice")
        return chosen
