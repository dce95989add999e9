"""`tools`, `tool_choice` and `response_format` of a chat request."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from coordinator.entrypoints.openai.bodies import Fields, OpenFields, compact_json
from splitserve.errors import InvalidArgumentError
from splitserve.grammars.schemas import STRICT
from splitserve.v1 import generation_pb2

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(OpenFields):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, an object. None: any object."""
    strict: bool | None = None
    """False: the arguments may be any object, regardless of the schema."""

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The JSON Schema that the arguments must match."""
        schema = {} if self.strict is False or self.parameters is None else self.parameters
        return _marked({"type": "object"} | schema, self.strict)


class Tool(OpenFields):
    """An entry of `tools`. The chat template gets all of its fields, unknown ones included."""

    type: Literal["function"]
    function: Function


class NamedTool(Fields):
    """A `tool_choice` that names the one function to call."""

    name: str


ToolMode = Literal["none", "auto", "required"]


def _named(value: Any) -> Any:
    """A mode, or a NamedTool. Raises ValueError for anything else."""
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        modes = '"none", "auto", "required"'
        raise ValueError(f'must be {modes} or {{"type": "function", "function": {{"name": …}}}}')
    return NamedTool(name=function["name"])


ToolChoice = Annotated[ToolMode | NamedTool, BeforeValidator(_named)]


class JsonSchema(Fields):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Whether a schema that a grammar cannot enforce exactly is refused."""


class ResponseFormat(Fields):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_the_schema_of_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = 'response_format.json_schema goes with type "json_schema", and with that alone'
            raise InvalidArgumentError(message, field="response_format.json_schema")
        return self

    @property
    def content_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the answer; None for plain text."""
        if self.type == "text":
            return None
        wanted = self.json_schema
        return {"type": "object"} if wanted is None else _marked(wanted.json_schema, wanted.strict)

    @property
    def grammar(self) -> generation_pb2.Grammar | None:
        """The grammar of the answer; None for plain text."""
        if self.type == "json_object":
            return generation_pb2.Grammar(json_object=True)
        schema = self.content_schema
        return None if schema is None else generation_pb2.Grammar(json_schema=compact_json(schema))


def _marked(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    """The schema, with a mark if it is strict: a schema that a grammar cannot enforce exactly is then refused."""
    return {**schema, "x-guidance": STRICT} if strict else schema
