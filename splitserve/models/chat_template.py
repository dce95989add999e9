"""Chat templates, rendered as `transformers` does."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple, NoReturn, TypeVar

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from typing_extensions import override

from splitserve.errors import ConfigError
from splitserve.models.tokenizer import DEFAULT_ARGUMENTS, TemplateArguments, Turn

RENDER_CPU_S = 1.0
MOST_CHARACTERS = 2**25
"""Of a text that a template makes: more than a request may have."""
MOST_MADE = 2**28
"""Characters of all texts together that a template's operators, filters and methods make in one rendering."""
SMALL = 256
"""Shorter texts are not counted: to make many takes time, which has a bound."""
ITEM = 64
"""As how many characters an item of a list counts."""
MOST_LINES = 2**20
"""About the lines of the longest JSON that a request brings: `tojson` may indent each."""
_SPREADS = {
    *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust"),
    *("slice", "tojson", "translate", "wordwrap", "zfill"),
}
"""Filters and methods whose result can be much larger than value and arguments together."""
_STRUCTURAL = {
    *(
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
    ),
    *(
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
    ),
    *("sum", "unique"),
}
"""Filters that do not write lists as text."""
_WIDE = re.compile(r"[0-9]{5}|[*]|[{][^{}]*[{]")
"""In a format: a width above 9,999, or one that an argument gives."""
BIT = 2**10
"""As how many characters one bit of a whole number counts."""
_RENDERING = threading.local()
"""`until_s`: this thread's rendering ends with an error when its CPU time exceeds this, in seconds. `made`: characters
that it has made."""
T = TypeVar("T")
DEFAULT = "default"
TOOL_USE = "tool_use"
"""Name of the template for requests with tools, if a model has a separate one."""
KEPT_TEMPLATES = 32
"""Compiled templates that are kept, of all models and requests."""
FINAL_MARK = "THE-FINAL-MESSAGE-GOES-ON "
"""Stands behind the content that an answer continues while the prompt is rendered. It ends with a space, as it shows
then whether the template trims contents."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning back. Templates read the first, that of gpt-oss the second."""


class ChatTemplates:
    """The templates of one model. Thread-safe.

    `templates` maps names to Jinja sources; a single template is named `DEFAULT`. `special_tokens` are variables
    available to every template, such as "bos_token". Templates are untrusted code from a model's files: they run in
    Jinja's immutable sandbox and cannot change their arguments.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)

    def __bool__(self) -> bool:
        return any(self._templates.values())

    def text(self, arguments: TemplateArguments = DEFAULT_ARGUMENTS, *, with_tools: bool) -> str:
        """The template's source for a request with or without tools. Raises ValueError if the model has none."""
        if arguments.template:
            return arguments.template
        name = TOOL_USE if with_tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise ValueError(f"the model has several chat templates and no default one: {names}")
        return self._templates[name]

    def render(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        arguments: TemplateArguments = DEFAULT_ARGUMENTS,
    ) -> str:
        """The turns as text.

        Raises whatever the template's code raises if it refuses them, jinja2.TemplateError after RENDER_CPU_S.
        """
        if not turns:
            raise ValueError("there are no messages")
        template = compiled(self.text(arguments, with_tools=bool(tools))).template
        messages = [_message(turn) for turn in turns]
        if arguments.continue_final_message:
            messages[-1]["content"] += FINAL_MARK
        _RENDERING.until_s, _RENDERING.made = time.thread_time() + RENDER_CPU_S, 0
        text = template.render(
            {
                **self._special_tokens,
                "documents": None,
                **arguments.variables,
                "messages": messages,
                "tools": [dict(tool) for tool in tools] or None,
                "add_generation_prompt": arguments.add_generation_prompt,
            }
        )
        return _up_to_mark(text, turns[-1].content) if arguments.continue_final_message else text


class CompiledTemplate(NamedTuple):
    """A template, and what its code mentions."""

    template: Template
    names: frozenset[str]
    """All names and texts: whatever it can read of a message."""
    variables: frozenset[str]
    """The variables that it reads."""


@lru_cache(KEPT_TEMPLATES)
def compiled(text: str) -> CompiledTemplate:
    """The template of this source. Raises jinja2.TemplateError, or RecursionError for expressions that are too deep."""
    environment = _environment()
    tree = environment.parse(text)
    variables = frozenset(meta.find_undeclared_variables(tree))
    _RENDERING.made = 0  # constants are computed now
    template = environment.from_string(_bounded(tree))
    template.globals = dict(template.globals)  # a plain dict, as each rendering copies it
    code = (value for _, kind, value in environment.lex(text) if kind in ("name", "string"))
    return CompiledTemplate(template, frozenset(value.strip("'\"") for value in code), variables)


def _up_to_mark(text: str, content: str) -> str:
    """The text up to the mark behind the final content. Raises TemplateError if the template has changed that."""
    mark = FINAL_MARK.strip()
    head, found, tail = text.rpartition(mark)
    if not found or content.strip() not in text:
        raise TemplateError("it does not write the content of the final message as it is")
    return head if tail.startswith(FINAL_MARK[len(mark) :]) else head.rstrip()


def check_template(where: str, text: str) -> None:
    """Raises ConfigError naming `where` if `text` is no template."""
    try:
        _environment().parse(text)
    except (TemplateSyntaxError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"model: {where} is no chat template: {why}", field="model") from None


def _message(turn: Turn) -> dict[str, Any]:
    """The dict that templates read. Empty fields are left out, as many templates test for presence."""
    message: dict[str, Any] = {**turn.further, "role": turn.role, "content": turn.content}
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if turn.tool_calls:
        message["tool_calls"] = [dict(call) for call in turn.tool_calls]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.name:
        message["name"] = turn.name
    return message


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant output for training; it is rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block instead of the body itself: it keeps variables that are set inside local.
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return str(caller())


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which reach Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameter: a template may call a variable `self`.
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        _check_size(len(value) if isinstance(value, str) else 0)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise TemplateError(f"it makes more than {MOST_CHARACTERS} characters")


def _made(value: T) -> T:
    """The value. Raises TemplateError if it, or all that was made together, is too large."""
    if isinstance(value, str | list):
        size = len(value) if isinstance(value, str) else ITEM * len(value)
        if size < SMALL:
            return value
        _check_size(size)
        _RENDERING.made += size
        if _RENDERING.made > MOST_MADE:
            raise TemplateError(f"it makes texts of more than {MOST_MADE} characters together")
    return value


def _writable(value: T) -> T:
    """The value. Raises TemplateError if it would be too large as a text, as lists that hold one another often are."""
    if isinstance(value, list | tuple | dict):
        _check_size(_written(value, {}))
    return value


def _written(value: Any, known: dict[int, int]) -> int:
    """At least so many characters has the value as a text. `known`: of the lists so far, by identity."""
    if not isinstance(value, list | tuple | dict):
        return len(value) if isinstance(value, str) else 1
    if id(value) not in known:
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_written(item, known) for item in items)
    return known[id(value)]


def _check_spread(name: str, value: Any, args: Iterable[Any]) -> None:
    """Raises TemplateError for a call of a filter or a method that may make a large text of small ones.

    A text among the arguments counts at each place of the value where it may be put, a number as a width.
    """
    if name not in _SPREADS:
        return
    leaves = list(_leaves(args))
    places, size = (len(value) if isinstance(value, Sized) else 0), 0
    if name == "replace":
        places = value.count(str(leaves[0])) if leaves else 0
    elif name == "indent":
        places = value.count("\n")
    elif name == "tojson":
        places = MOST_LINES
    elif name == "join":
        size = sum(len(item) for item in value if isinstance(item, str))
    elif name.startswith("format"):
        places = value.count("%") + value.count("{")
        leaves = [leaf for leaf in leaves if isinstance(leaf, str)]
        if _WIDE.search(value):
            raise TemplateError("it formats with a large width")
    widths = sum(len(leaf) if isinstance(leaf, str) else abs(leaf) for leaf in leaves)
    _check_size(size + (places + 1) * widths)


def _leaves(values: Iterable[Any]) -> Iterator[str | int]:
    """The texts and numbers in arguments."""
    for value in values:
        if isinstance(value, str | int):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _leaves(value.values() if isinstance(value, dict) else value)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    place = int(getattr(function, "jinja_pass_arg", None) is not None)  # some filters get a context first

    @wraps(function)
    def bounded(*args: Any, **further: Any) -> Any:
        head, value, rest = args[:place], args[place], args[place + 1 :]
        if name in ("replace", "indent", "format"):
            value = str(value)
        elif name == "join":
            value = list(value)
        _check_spread(name, value, (*rest, *further.values()))
        if name not in _STRUCTURAL:
            for text in (value, *rest):
                _writable(text)
        return _made(function(*head, value, *rest, **further))

    return bounded


class _DictFactory:
    """`dict` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Code(CodeGenerator):
    """Joins texts by `_Environment.joined`."""

    @override
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Bounds what makes much of little: loops and macros in time, what operators, filters and methods make in size."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _Code

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":  # the most frequent by far
            return _made(left + right)
        for side, count in ((left, right), (right, left)):
            if operator == "*" and isinstance(side, Sized) and isinstance(count, int):
                _check_size(len(side) * count)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _check_size(BIT * bits)
        if operator == "%" and isinstance(left, str):
            _check_spread("format", left, [_writable(right)])
        return _made(super().call_binop(context, operator, left, right))

    @override
    def call(self, context: Context, function: Any, /, *args: Any, **further: Any) -> Any:
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and method.__name__ == "join" and args:
            args = (list(args[0]),)
            _check_spread("join", args[0], [owner])
        elif isinstance(owner, str):
            _check_spread(method.__name__, owner, (*map(_writable, args), *further.values()))
        return _made(super().call(context, function, *args, **further))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """All output of the template, or of a macro. Raises TemplateError."""
        texts = list(parts)
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def joined(self, parts: Iterable[Any]) -> str:
        """The parts of `~` as one text. Raises TemplateError."""
        return _made(self.concat(str(_writable(part)) for part in parts))

    def check_time(self) -> None:
        """Raises TemplateError once this thread's rendering has used up its CPU time."""
        if time.thread_time() > _RENDERING.until_s:
            raise TemplateError(f"rendering takes more than {RENDER_CPU_S:g} s")


def _bounded(tree: nodes.Template) -> nodes.Template:
    """The template with a check of the time in each loop and macro, as only these can take long."""
    parts: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
    for part in parts:
        check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
        part.body.insert(0, nodes.ExprStmt(check, lineno=part.lineno))
    return tree


@cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, loopcontrols],
        finalize=_writable,
    )
    del environment.globals["lipsum"]  # makes text without bound
    filters = environment.filters | {"tojson": _to_json}
    environment.filters = {name: _bounded_filter(name, function) for name, function in filters.items()}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _DictFactory(),
        "namespace": _PlainNamespace,
    }
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without the HTML escaping of Jinja's own."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
