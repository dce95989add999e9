"""The body of `POST /v1/responses`, and the chat request that it means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from coordinator.entrypoints.openai.bodies import Fields, OpenFields, StreamOptions, UInt32, Unsupported
from coordinator.entrypoints.openai.chat import ChatRequest, Effort, joined_text
from coordinator.entrypoints.openai.items import MAX_METADATA, Conversation, NestedFields, TypedPiece, served
from coordinator.entrypoints.openai.tools import FunctionName
from splitserve.errors import InvalidArgumentError

NOT_SERVED: Unsupported = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""The types of items, each with the fields that it must have."""
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
"""Most entries of `metadata`, and most characters of a key and of a value, as with OpenAI."""
SAME_AS_IN_CHAT = {"model", "temperature", "top_p", "parallel_tool_calls", "user", "safety_identifier"}
HIDDEN = {"model", "input", "stream", "stream_options", "include", "client_metadata", "text", "tools"}
"""Fields that the response does not repeat, or not as they are."""
NAMES = {
    "prompt.chat": "input",
    "prompt.chat.messages": "input",
    "prompt.chat.template_kwargs_json.reasoning_effort": "reasoning.effort",
    "sampling.grammar": "text.format",
    "sampling.grammar.json_schema": "text.format.schema",
    "stop.max_tokens": "max_output_tokens",
}
"""Names of gRPC fields in this API."""

Label = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]
Included = Annotated[str, served("reasoning.encrypted_content")]
Text = Annotated[str, BeforeValidator(lambda content: joined_text(content, TEXT_PARTS))]


class InputItem(TypedPiece):
    """An item of the conversation."""

    needed = ITEMS
    type: Annotated[str, served(*ITEMS)] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | None = None
    """Of a message, or of reasoning."""
    summary: Text | None = None
    """Of reasoning. It stands for a content that is missing."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Text | None = None

    def add_to(self, conversation: Conversation) -> None:
        """Appends the item to a conversation."""
        match self.type:
            case "message":
                conversation.say(self.role or "", self.content or "")
            case "function_call":
                conversation.call(self.call_id or "", self.name or "", self.arguments or "")
            case "function_call_output":
                conversation.result(self.call_id or "", self.output or "")
            case _:
                if thought := self.content or self.summary:
                    conversation.think(thought)


def _listed(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FlatTool(OpenFields):
    """A function that the model may call. The chat template gets all of its fields."""

    type: Annotated[str, served("function")]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def nested(self) -> dict[str, Any]:
        """The tool as in chat."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_unset=True)}


class TextFormat(NestedFields):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = 'text.format.schema goes with type "json_schema", and with that alone'
            raise InvalidArgumentError(message, field="text.format.schema")
        return self

    def nested(self) -> dict[str, Any]:
        """Chat's `response_format`."""
        if self.json_schema is None:
            return {"type": self.type}
        schema = self.model_dump(exclude={"type"}, exclude_unset=True, by_alias=True)
        return {"type": self.type, "json_schema": schema}


class TextConfig(NestedFields):
    """`text`."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["medium"] = "medium"


class ReasoningConfig(NestedFields):
    """`reasoning`."""

    effort: Effort | None = None
    summary: str | None = None


def _short(metadata: dict[str, str]) -> dict[str, str]:
    if any(len(key) > MAX_METADATA_KEY or len(metadata[key]) > MAX_METADATA_VALUE for key in metadata):
        raise ValueError(f"a key has at most {MAX_METADATA_KEY} characters, a value {MAX_METADATA_VALUE}")
    return metadata


Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA), AfterValidator(_short)]


def _known_choice(value: Any) -> Any:
    names_one = (
        isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str)
    )
    if not names_one and value not in ("none", "auto", "required"):
        raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": …}')
    return value


class ResponsesRequest(Fields):
    """The body of a request."""

    model: str | None = None
    input: Annotated[list[InputItem], Field(fail_fast=True), BeforeValidator(_listed)] = Field(
        default_factory=list
    )
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    """Whether GET and later requests find the response."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    include: Annotated[list[Included], Field(max_length=MAX_METADATA)] = Field(default_factory=list)
    max_output_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: Annotated[str | dict[str, Any], BeforeValidator(_known_choice)] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: UInt32 | None = None
    """Bounds the calls of hosted tools, of which there are none."""
    text: TextConfig = TextConfig(format=TextFormat(type="text"))
    reasoning: ReasoningConfig = ReasoningConfig()
    metadata: Metadata = Field(default_factory=dict)
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    client_metadata: Any = None
    """Of Codex; without effect."""

    def chat_request(self, earlier: Sequence[InputItem]) -> ChatRequest:
        """The request as one of chat, after the items of `earlier` turns. Raises InvalidArgumentError."""
        conversation = Conversation()
        if self.instructions:
            conversation.say("system", self.instructions)
        for item in (*earlier, *self.input):
            item.add_to(conversation)
        if conversation.last_role is None:
            raise InvalidArgumentError("input must say something", field="input")
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        fields = {
            "tools": [tool.nested() for tool in self.tools],
            "tool_choice": choice,
            "response_format": self.text.format.nested(),
            "max_completion_tokens": self.max_output_tokens,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning_effort": self.reasoning.effort,
        }
        return conversation.chat_request(fields | self.model_dump(include=SAME_AS_IN_CHAT))

    def shown(self) -> dict[str, Any]:
        """The fields that the response repeats."""
        shown = self.model_dump(exclude=HIDDEN)
        shown["text"] = self.text.model_dump(exclude_unset=True, by_alias=True)
        shown["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.tools]
        return {**shown, "background": False, "truncation": "disabled"}
