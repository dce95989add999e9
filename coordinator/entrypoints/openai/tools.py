"""`tools`, `tool_choice` and `response_format` of a chat request, and the grammar that they imply.

Tool calls have the format of Hermes and Qwen models: `{"name": …, "arguments": …}` between `<tool_call>` and
`</tool_call>`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from coordinator.entrypoints.openai.bodies import Fields, compact_json
from splitserve.grammars.schemas import STRICT
from splitserve.v1 import generation_pb2

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(Fields):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, an object. None: any object."""
    strict: bool | None = None
    """False: the arguments may be any object, regardless of the schema."""

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The JSON Schema that the arguments must match."""
        given = {} if self.strict is False or self.parameters is None else self.parameters
        return _marked({"type": "object"} | given, self.strict)


class Tool(Fields):
    """An entry of `tools`. The chat template gets all of its fields, unknown ones included."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class NamedTool(Fields):
    """The one function that must be called."""

    name: str


ToolMode = Literal["none", "auto", "required"]


def _named(value: Any) -> Any:
    """A mode, or a NamedTool. Raises ValueError for anything else."""
    if value in ("none", "auto", "required"):
        return value
    name = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not (isinstance(name, dict) and isinstance(name.get("name"), str)):
        modes = '"none", "auto", "required"'
        raise ValueError(f'must be {modes} or {{"type": "function", "function": {{"name": …}}}}')
    return NamedTool(name=name["name"])


ToolChoice = Annotated[ToolMode | NamedTool, BeforeValidator(_named)]


class JsonSchema(Fields):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Whether to refuse a schema that the grammar does not hold exactly."""

    @property
    def marked(self) -> dict[str, Any]:
        """The schema, which says whether it is strict."""
        return _marked(self.json_schema, self.strict)


class ResponseFormat(Fields):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def format_grammar(response_format: ResponseFormat) -> generation_pb2.Grammar | None:
    """The grammar for a `response_format`; None for plain text."""
    if response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return generation_pb2.Grammar(json_object=True)
    return generation_pb2.Grammar(json_schema=compact_json(response_format.json_schema.marked))


def tools_grammar(
    functions: list[Function], *, must_call: bool, parallel: bool, content_schema: dict[str, Any] | None
) -> generation_pb2.Grammar:
    """The grammar of calls of these functions, in llguidance's dialect of Lark.

    Unless the model `must_call`, it may write text before or instead of calls; `content_schema` is a JSON Schema that
    an answer without calls must match. `parallel` allows several calls.
    """
    # Each schema is a rule of its own, so that references in it resolve from its own root, and that what it captures
    # is checked by a validator.
    rules = []
    for number, fn in enumerate(functions):
        arguments = arguments_rule(number)
        rules += [
            f"fn_{number}: {_literal(_call_head(fn.name))} {arguments}",
            f"{arguments}[capture]: %json {compact_json(fn.arguments_schema)}",
        ]
    names = " | ".join(f"fn_{number}" for number in range(len(functions)))
    rules += [f"fn: {names}", f"body: fn {_literal(_CALL_TAIL)}", f"call: {_literal(CALL_BEGIN)} body"]
    more = f"({_literal(_BETWEEN)} call)*" if parallel else ""
    if must_call:
        rules.append(f"start: call {more}")
    elif content_schema is not None:
        rules += [f"start: call {more} | content", f"content[capture]: %json {compact_json(content_schema)}"]
    else:
        # A lazy lexeme ends at its first match, so an opening tag always starts a call.
        rules += [
            f"opening[lazy]: TEXT {_literal(CALL_BEGIN)}",
            f"start: TEXT | opening body {more}",
            r"TEXT: /(.|\n)*/",
        ]
    return generation_pb2.Grammar(lark="\n".join(["%llguidance {}", *rules, ""]))


def arguments_rule(number: int) -> str:
    """The rule of a function's arguments, which errors name."""
    return f"arguments_{number}"


_CALL_TAIL = "}\n" + CALL_END
_BETWEEN = "\n"


def _call_head(name: str) -> str:
    """The text between the opening tag and the arguments."""
    return f'\n{{"name": "{name}", "arguments": '


def _literal(text: str) -> str:
    return json.dumps(text)


def _marked(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    return {**schema, "x-guidance": STRICT} if strict else schema
