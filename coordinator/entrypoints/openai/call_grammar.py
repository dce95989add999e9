"""The grammar that holds an answer to its tools or its form, in llguidance's dialect of Lark
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).

Calls are written in the model's own format. Reasoning before the answer is any text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from coordinator.entrypoints.openai.bodies import compact_json
from coordinator.entrypoints.openai.formats.arguments import kinds_of
from coordinator.entrypoints.openai.formats.table import AnswerFormat
from coordinator.entrypoints.openai.formats.tool_format import KEY, KIND, NAME, NUMBER, CallForm, ToolFormat
from coordinator.entrypoints.openai.tools import Function
from splitserve.v1.generation_pb2 import Grammar

_SHARED = ("$defs", "definitions", "x-guidance")
"""Keys of a function's schema that the schema of a single argument needs too."""


def answer_grammar(
    answer: AnswerFormat,
    functions: Sequence[Function] = (),
    *,
    must_call: bool = False,
    parallel: bool = True,
    form: Grammar | None = None,
) -> Grammar | None:
    """The grammar of an answer; None if it may be any text. `functions` may be called, several times if `parallel`, and
    nothing but calls is said if `must_call`. `form`: of an answer without calls; None: any text."""
    tools = answer.tools if functions else None
    content = "response_format"
    if answer.reasoning is not None and answer.reasoning.content:
        content = f"{_literal(answer.reasoning.content)} {content}"
    # 1. No calls, or calls that no grammar can write: at most the form holds.
    if tools is None or tools.form is None:
        if form is None or answer.reasoning is None:
            return form
        return _lark([*_thought_rules(answer), _form_rule(form), f"start: thinking {content}"])
    # 2. Text or calls without tags: the beginning of a call cannot be told from text.
    if tools.is_bare and not must_call and form is None:
        return None
    rules = [*_call_rules(functions, tools.form, parallel=parallel), *_thought_rules(answer)]
    # 3. Calls alone.
    if must_call:
        rules.append("start: thinking calls")
    # 4. Calls, or content of the form.
    elif form is not None:
        rules += [_form_rule(form), f"start: thinking (calls | {content})"]
    # 5. Text, which may go on with calls.
    else:
        rules += _free_rules(tools, tools.form, answer)
    return _lark(rules)


_RULE = re.compile(r"\barguments_(\d{1,4})(?:_\d+)?\b")


def function_in(message: str) -> int | None:
    """The number of the function whose rule an error message names; words of the request may come after it."""
    match = _RULE.search(message)
    return int(match[1]) if match else None


def rule_places(functions: Sequence[tuple[int, Function]], schema: str) -> dict[str, str]:
    """Names of functions and paths in the request by rule. `functions`: the callable ones, with their places in the
    request's tools. `schema`: where a tool has its schema."""
    places = {}
    for number, (place, function) in enumerate(functions):
        path = f"{function.name}: tools[{place}].{schema}"
        places[arguments_rule(number)] = path
        properties = (function.parameters or {}).get("properties")
        for argument, key in enumerate(properties if isinstance(properties, dict) else ()):
            places[arguments_rule(number, argument)] = f"{path}.properties.{key}"
    return places


def arguments_rule(number: int, argument: int | None = None) -> str:
    """The name of the rule of a function's arguments, or of one of them. Errors of llguidance contain it."""
    return f"arguments_{number}" if argument is None else f"arguments_{number}_{argument}"


def _lark(rules: list[str]) -> Grammar:
    return Grammar(lark="\n".join(["%llguidance {}", *rules, r"TEXT: /(.|\n)*/", ""]))


def _form_rule(form: Grammar) -> str:
    """The form as the rule `response_format`, which errors of an answer name."""
    match form.WhichOneof("kind"):
        case "regex":
            # A slash or the end of a line would end the expression in Lark.
            return f"response_format: /{_SPECIAL.sub(lambda found: _SPELLED.get(found[0], found[0]), form.regex)}/"
        case "lark":
            return f"response_format: %lark {{\n{form.lark}\n}}"
    return f"response_format[capture]: %json {form.json_schema or _OBJECT}"


_OBJECT = '{"type":"object"}'
_SPECIAL = re.compile(r"\\.|/|\n", flags=re.DOTALL)
_SPELLED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def _thought_rules(answer: AnswerFormat) -> list[str]:
    """The rules of `thinking`, the reasoning before the answer, which may be empty."""
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


def _call_rules(functions: Sequence[Function], form: CallForm, *, parallel: bool) -> list[str]:
    """The rules of `calls`, of `call`, which is one call from its name on, and of `more`, the calls after it."""
    rules = []
    for number, function in enumerate(functions):
        arguments = arguments_rule(number)
        after = form.head.partition(NAME)[2]
        head = _spelled(function.name + after)
        rules.append(f"fn_{number}: {head} {arguments} {_spelled(form.tail)}")
        rules += _argument_rules(number, function, form)
    before = _spelled(form.head.partition(NAME)[0])
    more = ""
    if parallel and form.between is not None:
        more = f"({_spelled(form.between)} {before} call)*"
    return [
        *rules,
        f"call: {' | '.join(f'fn_{number}' for number in range(len(functions)))}",
        f"more: {more} {_spelled(form.end)}" if more or form.end else 'more: ""',
        f"calls: {_spelled(form.begin)} {before} call more",
    ]


def _free_rules(tools: ToolFormat, form: CallForm, answer: AnswerFormat) -> list[str]:
    """The rules of text that may go on with calls. A call must follow an opening tag."""
    lead = form.begin + form.head.partition(NAME)[0]
    opening = max((tag for tag in tools.tags if lead.startswith(tag)), key=len)
    after_opening = _spelled(lead.removeprefix(opening))
    reasoning, before = answer.reasoning, "TEXT"
    if reasoning is not None:
        thought = f"TEXT ({' | '.join(map(_literal, reasoning.ends))}) TEXT"
        if not answer.is_reasoning:
            # The model may begin its reasoning itself. An opening tag in it begins no call.
            first, second = (f"\\x{ord(sign):02x}" for sign in reasoning.begin[:2])
            thought = f'{_literal(reasoning.begin)} {thought} | /[^{first}]|{first}[^{second}]/ TEXT | ""'
        before = f"({thought})"
    # A lazy lexeme ends at its first match, so an opening tag always starts a call.
    return [
        f"opening[lazy]: {before} {_literal(opening)}",
        f"start: TEXT | opening {after_opening} call more",
    ]


def _argument_rules(number: int, function: Function, form: CallForm) -> Iterator[str]:
    """The rules of one function's arguments."""
    schema, name = function.arguments_schema, arguments_rule(number)
    # 1. The arguments are one JSON object.
    if form.argument is None:
        yield f"{name}[capture]: %json {compact_json(schema)}"
        return
    begin, end = form.argument
    yield f"text_{number}[lazy]: TEXT {_literal(end)}"
    properties = schema.get("properties")
    # 2. Without known properties: any arguments, each any text.
    if not isinstance(properties, Mapping) or not properties:
        before, _, after = begin.partition(KEY)
        key = rf"{_literal(before)} /[\w.-]{{1,64}}/ {_spelled(after.replace(KIND, 'true'))}"
        yield f"{name}: ({key} text_{number})*"
        return
    # 3. One argument after the other, in the order of the properties.
    required = schema.get("required")
    items = []
    for place, (key, argument) in enumerate(properties.items()):
        rule = arguments_rule(number, place)
        kinds = kinds_of(argument, schema)
        is_text = not kinds or "string" in kinds
        value = f"{rule} {_spelled(end)}"
        choices = argument.get("enum") if isinstance(argument, Mapping) else None
        if is_text and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            yield f"{rule}: {' | '.join(map(_literal, choices))}"
        elif is_text:
            value = f"text_{number}"
        else:
            shared = {name: schema[name] for name in _SHARED if name in schema}
            yield f"{rule}[capture]: %json {compact_json({**shared, **argument})}"
        written = begin.replace(KIND, "true" if is_text else "false").replace(KEY, key)
        is_required = isinstance(required, list) and key in required
        items.append(f"{_literal(written)} {value}" if is_required else f"({_literal(written)} {value})?")
    yield f"{name}: {' '.join(items)}"


def _spelled(text: str) -> str:
    """The text as Lark, with the pattern of a number in place of NUMBER."""
    parts = re.split(f"({NUMBER})", text)
    return " ".join("/[0-9]{1,3}/" if part == NUMBER else _literal(part) for part in parts if part) or '""'


def _literal(text: str) -> str:
    return json.dumps(text)
