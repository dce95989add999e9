"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, and the chat request that they mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from coordinator.entrypoints.openai.bodies import Fields, Unsupported, compact_json
from coordinator.entrypoints.openai.chat import ChatRequest, joined_text
from coordinator.entrypoints.openai.items import MAX_METADATA, Conversation, NestedFields, TypedPiece, served
from coordinator.entrypoints.openai.tools import FunctionName
from splitserve.errors import InvalidArgumentError
from splitserve.models.tokenizer import THINKING

NOT_SERVED: Unsupported = {"container": (), "mcp_servers": ([],)}
SAME_AS_IN_CHAT = {"model", "max_tokens", "temperature", "top_p", "top_k"}
BLOCKS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""The types of blocks, each with the fields that it must have."""
CHOICES: Mapping[str, Sequence[str]] = {"auto": (), "any": (), "tool": ("name",), "none": ()}
"""The types of `tool_choice`, each with the fields that it must have."""
NAMES = {
    "prompt.chat": "messages",
    "sampling.grammar": "output_config.format",
    "sampling.grammar.json_schema": "output_config.format.schema",
    "stop.stop_strings": "stop_sequences",
    "stop.max_tokens": "max_tokens",
}
"""Names of gRPC fields in this API."""

Text = Annotated[str, BeforeValidator(lambda content: joined_text(content, ("text",)))]


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    json.dumps(value, allow_nan=False)  # raises ValueError for what a number of many digits became
    return value


class Block(TypedPiece):
    """A block of a message's content. `is_error` of a tool's result is without effect: the content says it."""

    needed = BLOCKS
    type: Annotated[str, served(*BLOCKS)]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Annotated[dict[str, Any], AfterValidator(_finite)] | None = None
    tool_use_id: str | None = None
    content: Text | None = None
    """Of a tool's result."""

    def add_to(self, conversation: Conversation, role: str) -> None:
        """Appends the block to a conversation. What was redacted is left out."""
        match self.type:
            case "text":
                conversation.say(role, self.text or "")
            case "thinking":
                conversation.think(self.thinking or "")
            case "tool_use":
                conversation.call(self.id or "", self.name or "", compact_json(self.input))
            case "tool_result":
                conversation.result(self.tool_use_id or "", self.content or "")


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class InputMessage(NestedFields):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(min_length=1, fail_fast=True), BeforeValidator(_blocks)]

    @model_validator(mode="after")
    def _may_say_it(self) -> InputMessage:
        for place, block in enumerate(self.content):
            if block.type != "text" and self.role != ("user" if block.type == "tool_result" else "assistant"):
                raise ValueError(f"content[{place}]: a {self.role} message has no {block.type}")
        return self


class InputTool(NestedFields):
    """A tool that the client runs."""

    type: Annotated[str, served("custom")] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None

    def nested(self) -> dict[str, Any]:
        """The tool as in chat."""
        function = self.model_dump(include={"name", "description", "strict"}, exclude_unset=True)
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class ToolUse(TypedPiece):
    """`tool_choice`."""

    needed = CHOICES
    type: Annotated[str, served(*CHOICES)]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def nested(self) -> Any:
        """Chat's `tool_choice`."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(NestedFields):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Without effect: `max_tokens` bounds thinking and answer together."""
    display: Any = None


class OutputFormat(NestedFields):
    """`output_config.format`."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(NestedFields):
    """`output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None


class PromptFields(Fields):
    """The fields of which a prompt is made. Those of the answer may be left out."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Text | None = None
    tools: Annotated[list[InputTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolUse = ToolUse(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    metadata: Annotated[dict[str, str | None], Field(max_length=MAX_METADATA)] = Field(default_factory=dict)
    max_tokens: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    # Without effect on the answer:
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def chat_request(self) -> ChatRequest:
        """The request as one of chat. Raises InvalidArgumentError."""
        conversation = Conversation()
        if self.system:
            conversation.say("system", self.system)
        for turn in self.messages:
            for block in turn.content:
                block.add_to(conversation, turn.role)
        last = self.messages[-1]
        continues = last.role == "assistant"
        if conversation.last_role is None or (continues and last.content[-1].type != "text"):
            message = "messages must end with the user's, or with the text that the answer continues"
            raise InvalidArgumentError(message, field="messages")
        fields = self.model_dump(include=SAME_AS_IN_CHAT) | {
            "tools": [tool.nested() for tool in self.tools],
            "tool_choice": self.tool_choice.nested(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "stop": self.stop_sequences,
            "user": self.metadata.get("user_id"),
            "continue_final_message": continues or None,
        }
        if self.thinking is not None and self.thinking.type != "adaptive":
            fields["chat_template_kwargs"] = dict.fromkeys(THINKING, self.thinking.type == "enabled")
        if (wanted := self.output_config.format) is not None:
            schema = {"schema": wanted.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return conversation.chat_request(fields)


class MessagesRequest(PromptFields):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=2**32 - 1)]
