"""`tools` and `tool_choice` of a chat request; `response_format` and the other fields that give an answer its form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from coordinator.entrypoints.openai.bodies import Fields, OpenFields, compact_json
from coordinator.request.json_bounds import parsed_json
from splitserve.errors import InvalidArgumentError
from splitserve.grammars.forms import MAX_GRAMMAR_BYTES, field_of
from splitserve.grammars.schemas import STRICT
from splitserve.v1.generation_pb2 import Grammar

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


MAX_FORM_CHOICES = 1024


def json_grammar(schema: dict[str, Any] | None) -> Grammar:
    """JSON that satisfies the schema; None: any object."""
    return Grammar(json_object=True) if schema is None else Grammar(json_schema=compact_json(schema))


def choice_grammar(choices: Iterable[str]) -> Grammar:
    """One of these texts."""
    return Grammar(lark=f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}")


def _schema(value: Any) -> Any:
    """A JSON Schema, which may come as text. Raises ValueError for text that is not JSON, is too long or has too many
    values."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"must have at most {MAX_GRAMMAR_BYTES} bytes")
    try:
        return parsed_json(value)
    except InvalidArgumentError as error:
        raise ValueError(error.message) from None


def _not_long(choices: list[str]) -> list[str]:
    """These choices. Raises ValueError if they are too long together."""
    if sum(map(len, choices)) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"must have at most {MAX_GRAMMAR_BYTES} characters together")
    return choices


SchemaField = Annotated[dict[str, Any], BeforeValidator(_schema)]
ChoicesField = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_FORM_CHOICES, fail_fast=True),
    AfterValidator(_not_long),
]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
MAX_STRUCTURES, MAX_TAG = 64, 256
Tag = Annotated[str, Field(min_length=1, max_length=MAX_TAG)]


class TagStructure(Fields):
    """A part of an answer: JSON of a schema between two texts."""

    begin: Tag
    json_schema: dict[str, Any] = Field(alias="schema")
    end: Annotated[str, Field(max_length=MAX_TAG)]


Structures = Annotated[list[TagStructure], Field(min_length=1, max_length=MAX_STRUCTURES)]
Triggers = Annotated[list[Tag], Field(min_length=1, max_length=MAX_STRUCTURES)]


class StructuralTag(Fields):
    """`structured_outputs.structural_tag`."""

    type: Literal["structural_tag"] | None = None
    structures: Structures
    triggers: Triggers


def tagged_grammar(structures: list[TagStructure], triggers: list[str], field: str) -> Grammar:
    """Text with structures in it, as in vLLM: where a trigger comes, a structure must follow that begins with it.

    Raises InvalidArgumentError, which names `field`, for a structure without trigger, or the reverse.
    """
    rules, tagged = [], []
    for number, one in enumerate(structures):
        if not one.begin.startswith(tuple(triggers)):
            message = f"{field}: no trigger begins structures[{number}].begin"
            raise InvalidArgumentError(message, field=field)
        rules.append(f"value_{number}[capture]: %json {compact_json(one.json_schema)}")
    for number, trigger in enumerate(triggers):
        choices = [
            f"{json.dumps(one.begin.removeprefix(trigger))} value_{place} {json.dumps(one.end)}"
            for place, one in enumerate(structures)
            if one.begin.startswith(trigger)
        ]
        if not choices:
            raise InvalidArgumentError(f"{field}: no structure begins with triggers[{number}]", field=field)
        # A lazy lexeme ends at its first match, so a trigger always starts a structure.
        rules.append(f"trigger_{number}[lazy]: TEXT {json.dumps(trigger)}")
        tagged.append(f"trigger_{number} ({' | '.join(choices)})")
    start = f"start: ({' | '.join(tagged)})* TEXT"
    return Grammar(lark="\n".join(["%llguidance {}", start, *rules, r"TEXT: /(.|\n)*/", ""]))


class ResponseFormat(Fields):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    structures: Structures | None = None
    triggers: Triggers | None = None
    json_schema: JsonSchema | None = None
    object_schema: dict[str, Any] | None = Field(alias="schema", default=None)
    """The JSON Schema of the object, as in llama.cpp."""

    @model_validator(mode="after")
    def _has_the_schema_of_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = 'response_format.json_schema goes with type "json_schema", and with that alone'
            raise InvalidArgumentError(message, field="response_format.json_schema")
        if self.object_schema is not None and self.type != "json_object":
            message = 'response_format.schema goes with type "json_object"'
            raise InvalidArgumentError(message, field="response_format.schema")
        for name, value in (("structures", self.structures), ("triggers", self.triggers)):
            if (value is not None) != (self.type == "structural_tag"):
                message = f'response_format.{name} goes with type "structural_tag", and with that alone'
                raise InvalidArgumentError(message, field=f"response_format.{name}")
        return self

    @property
    def form(self) -> Grammar | None:
        """The form of the answer; None for plain text."""
        if self.type == "text":
            return None
        if self.structures is not None and self.triggers is not None:
            return tagged_grammar(self.structures, self.triggers, "response_format")
        wanted, schema = self.json_schema, self.object_schema
        if wanted is not None:
            return json_grammar(_marked(wanted.json_schema, wanted.strict))
        return json_grammar(None if schema is None else {"type": "object"} | schema)


class StructuredOutputs(Fields):
    """`structured_outputs`, as in vLLM."""

    json_schema: SchemaField | None = Field(alias="json", default=None)
    regex: Pattern | None = None
    choice: ChoicesField | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    structural_tag: Annotated[StructuralTag, BeforeValidator(_schema)] | None = None
    disable_fallback: bool | None = None
    """Without effect: one library does the work."""
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


class FormFields(Fields):
    """Fields that give an answer its form, of which a request may have one."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaField | None = None
    guided_regex: Pattern | None = None
    guided_choice: ChoicesField | None = None
    guided_grammar: Pattern | None = None

    @cached_property
    def forms(self) -> dict[str, Grammar]:
        """The form that the answer must have, by the field that asks for it; empty if it may be any text. Validation
        computes it.

        Raises InvalidArgumentError for several.
        """
        forms: dict[str, Grammar] = {}
        if self.response_format is not None and (form := self.response_format.form) is not None:
            forms["response_format"] = form
        new = self.structured_outputs or StructuredOutputs()
        if new.json_object:
            forms["structured_outputs.json_object"] = json_grammar(None)
        if (tag := new.structural_tag) is not None:
            field = "structured_outputs.structural_tag"
            forms[field] = tagged_grammar(tag.structures, tag.triggers, field)
        kinds: list[tuple[str, Callable[[Any], Grammar], Any, Any]] = [
            ("json", json_grammar, new.json_schema, self.guided_json),
            ("regex", lambda regex: Grammar(regex=regex), new.regex, self.guided_regex),
            ("choice", choice_grammar, new.choice, self.guided_choice),
            ("grammar", lambda lark: Grammar(lark=lark), new.grammar, self.guided_grammar),
        ]
        for kind, make, value, older in kinds:
            given = {f"structured_outputs.{kind}": value, f"guided_{kind}": older}
            forms |= {name: make(asked) for name, asked in given.items() if asked is not None}
        if self.structured_outputs is not None and not any(name.startswith("structured_") for name in forms):
            raise InvalidArgumentError("structured_outputs must name a form", field="structured_outputs")
        if len(forms) > 1:
            first, second, *_ = forms
            raise InvalidArgumentError(f"{second} cannot be given together with {first}", field=second)
        return forms

    @property
    def form(self) -> Grammar | None:
        """The form that the answer must have; None: any text."""
        return next(iter(self.forms.values()), None)

    @property
    def form_field(self) -> str:
        """The field that asks for the form."""
        return next(iter(self.forms), "response_format")

    @property
    def form_names(self) -> dict[str, str]:
        """The HTTP names of a grammar's gRPC fields."""
        names = {"sampling.grammar": self.form_field}
        if self.form is not None and self.form_field != "response_format":
            names[field_of(self.form)] = self.form_field
        return names


FORM_FIELDS = frozenset(FormFields.model_fields)


def _marked(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    """The schema, with a mark if it is strict: a schema that a grammar cannot enforce exactly is then refused."""
    return {**schema, "x-guidance": STRICT} if strict else schema
