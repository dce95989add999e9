"""The grammar that holds an answer to its tools or its `response_format`, in llguidance's dialect of Lark.

Calls are spelled in the model's own format. The grammar begins after the reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.entrypoints.openai.bodies import compact_json
from coordinator.entrypoints.openai.formats.arguments import kinds_of
from coordinator.entrypoints.openai.formats.table import AnswerFormat
from coordinator.entrypoints.openai.formats.tool_format import KEY, KIND, NAME, NUMBER, CallForm, ToolFormat
from coordinator.entrypoints.openai.tools import Function, ResponseFormat
from splitserve.v1 import generation_pb2

_SHARED = ("$defs", "definitions", "x-guidance")
"""What the schema of one argument needs of that of all."""


@dataclass(frozen=True, slots=True)
class AnswerTerms:
    """What a request asks of its answer."""

    functions: Sequence[Function] = ()
    """Those that may be called; none: no calls."""
    must_call: bool = False
    """Whether the answer is calls and nothing else."""
    parallel: bool = True
    """Whether it may have several calls."""
    response_format: ResponseFormat | None = None
    """What an answer without calls is held to."""


def answer_grammar(terms: AnswerTerms, answer: AnswerFormat) -> generation_pb2.Grammar | None:
    """The grammar of an answer; None if it may be any text."""
    schema = terms.response_format.content_schema if terms.response_format is not None else None
    tools = answer.tools if terms.functions else None
    if tools is None or tools.form is None:
        if schema is None:
            return None
        if answer.reasoning is None:
            return terms.response_format.grammar if terms.response_format is not None else None
        return _lark(
            [
                *_thought_rules(answer),
                f"content[capture]: %json {compact_json(schema)}",
                "start: thinking content",
            ]
        )
    if tools.is_bare and not terms.must_call and schema is None:
        return None  # nothing tells the beginning of a call from that of a text
    rules = [*_call_rules(terms, tools, tools.form), *_thought_rules(answer)]
    if terms.must_call:
        rules.append("start: thinking calls")
    elif schema is not None:
        rules += [f"content[capture]: %json {compact_json(schema)}", "start: thinking (calls | content)"]
    else:
        rules += _free_rules(tools, tools.form, answer)
    return _lark(rules)


_RULE = re.compile(r"\barguments_(\d{1,4})(?:_\d+)?\b")


def functions_in(message: str) -> set[int]:
    """The numbers of the functions whose rules an error names."""
    return {int(found[1]) for found in _RULE.finditer(message)}


def rule_places(functions: Sequence[tuple[int, Function]]) -> dict[str, str]:
    """What the rules of these functions are in the request, by their places in its tools."""
    places = {}
    for number, (place, function) in enumerate(functions):
        path = f"tools[{place}].function.parameters"
        places[arguments_rule(number)] = path
        properties = (function.parameters or {}).get("properties")
        for argument, key in enumerate(properties if isinstance(properties, dict) else ()):
            places[arguments_rule(number, argument)] = f"{path}.properties.{key}"
    return places


def arguments_rule(number: int, argument: int | None = None) -> str:
    """The rule of a function's arguments, or of one of them, which errors name."""
    return f"arguments_{number}" if argument is None else f"arguments_{number}_{argument}"


def _lark(rules: list[str]) -> generation_pb2.Grammar:
    return generation_pb2.Grammar(lark="\n".join(["%llguidance {}", *rules, r"TEXT: /(.|\n)*/", ""]))


def _thought_rules(answer: AnswerFormat) -> list[str]:
    """The rules of what precedes the answer proper: `thinking`, which may be nothing."""
    reasoning = answer.reasoning
    if reasoning is None:
        return ['thinking: ""']
    ends = " | ".join(map(_literal, reasoning.ends))
    begun = "" if answer.is_reasoning else f"{_literal(reasoning.begin)} "
    thinking = f"{begun}thought BLANK?"
    return [
        f"thought[lazy]: TEXT ({ends})",
        r"BLANK: /[ \r\n]{1,4}/",
        f"thinking: {thinking}" if answer.is_reasoning else f"thinking: ({thinking})?",
    ]


def _call_rules(terms: AnswerTerms, tools: ToolFormat, form: CallForm) -> list[str]:
    """The rules of `calls`, and of `call`, which is one without the text before its name."""
    rules = []
    for number, function in enumerate(terms.functions):
        arguments = arguments_rule(number)
        after = form.head.partition(NAME)[2]
        head = _spelled(function.name + after)
        rules.append(f"fn_{number}: {head} {arguments} {_spelled(form.tail)}")
        rules += _argument_rules(number, function, form)
    before = _spelled(form.head.partition(NAME)[0])
    more = f"({_spelled(form.between)} {before} call)*" if terms.parallel else ""
    return [
        *rules,
        f"call: {' | '.join(f'fn_{number}' for number in range(len(terms.functions)))}",
        f"more: {more} {_spelled(form.end)}" if more or form.end else 'more: ""',
        f"calls: {_spelled(form.begin)} {before} call more",
    ]


def _free_rules(tools: ToolFormat, form: CallForm, answer: AnswerFormat) -> list[str]:
    """The rules of text that may go on with calls: what opens one must be one."""
    lead = form.begin + form.head.partition(NAME)[0]
    opening = max((tag for tag in tools.tags if lead.startswith(tag)), key=len)
    rest = _spelled(lead.removeprefix(opening))
    reasoning, before = answer.reasoning, "TEXT"
    if reasoning is not None:
        thought = f"TEXT ({' | '.join(map(_literal, reasoning.ends))}) TEXT"
        if not answer.is_reasoning:
            # Neither does a call in the reasoning count if the model begins that itself.
            first, second = (f"\\x{ord(sign):02x}" for sign in reasoning.begin[:2])
            thought = f'{_literal(reasoning.begin)} {thought} | /[^{first}]|{first}[^{second}]/ TEXT | ""'
        before = f"({thought})"
    # A lazy lexeme ends at its first match, so an opening tag always starts a call.
    return [
        f"opening[lazy]: {before} {_literal(opening)}",
        f"start: TEXT | opening {rest} call more",
    ]


def _argument_rules(number: int, function: Function, form: CallForm) -> Iterator[str]:
    """The rules of one function's arguments: an object, or one argument after the other."""
    schema, name = function.arguments_schema, arguments_rule(number)
    if form.argument is None:
        yield f"{name}[capture]: %json {compact_json(schema)}"
        return
    begin, end = form.argument
    yield f"text_{number}[lazy]: TEXT {_literal(end)}"
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        before, _, after = begin.partition(KEY)
        key = rf"{_literal(before)} /[\w.-]{{1,64}}/ {_spelled(after.replace(KIND, 'true'))}"
        yield f"{name}: ({key} text_{number})*"
        return
    required = schema.get("required")
    items = []
    for place, (key, held) in enumerate(properties.items()):
        rule = arguments_rule(number, place)
        kinds = kinds_of(held, schema)
        is_text = not kinds or "string" in kinds
        value = f"{rule} {_spelled(end)}"
        choices = held.get("enum") if isinstance(held, Mapping) else None
        if is_text and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            yield f"{rule}: {' | '.join(map(_literal, choices))}"
        elif is_text:
            value = f"text_{number}"
        else:
            shared = {name: schema[name] for name in _SHARED if name in schema}
            yield f"{rule}[capture]: %json {compact_json({**shared, **held})}"
        written = begin.replace(KIND, "true" if is_text else "false").replace(KEY, key)
        is_required = isinstance(required, list) and key in required
        items.append(f"{_literal(written)} {value}" if is_required else f"({_literal(written)} {value})?")
    yield f"{name}: {' '.join(items)}"


def _spelled(text: str) -> str:
    """The text as Lark, with any number in place of NUMBER."""
    parts = re.split(f"({NUMBER})", text)
    return " ".join("/[0-9]{1,3}/" if part == NUMBER else _literal(part) for part in parts if part) or '""'


def _literal(text: str) -> str:
    return json.dumps(text)
