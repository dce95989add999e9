"""Chat templates, rendered as `transformers` does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from splitserve.errors import ConfigError
from splitserve.models.tokenizer import Turn

RENDER_CPU_S = 1.0
MOST_CHARACTERS = 2**25
"""Of a text that a template makes: more than a request may have."""
BIT = 2**10
"""As how many characters one bit of a whole number counts."""
_RENDERING = threading.local()
"""`until_s`: this thread's rendering ends with an error when its CPU time exceeds this, in seconds."""
DEFAULT = "default"
TOOL_USE = "tool_use"
"""Name of the template for requests with tools, if a model has a separate one."""


class ChatTemplates:
    """The templates of one model. Thread-safe.

    `templates` maps names to Jinja sources; a single template is named `DEFAULT`. `special_tokens` are variables
    available to every template, such as "bos_token". Templates are untrusted code from a model's files: they run in
    Jinja's immutable sandbox and cannot change their arguments.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, Template] = {}
        self._names: dict[str, frozenset[str]] = {}

    def __bool__(self) -> bool:
        return any(self._templates.values())

    def text(self, *, with_tools: bool) -> str:
        """The template's source for a request with or without tools. Raises ValueError if the model has none."""
        name = TOOL_USE if with_tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise ValueError(f"the model has several chat templates and no default one: {names}")
        return self._templates[name]

    def render(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> str:
        """The turns as text, with the generation prompt.

        Raises whatever the template's code raises if it refuses them, jinja2.TemplateError after RENDER_CPU_S.
        """
        if not turns:
            raise ValueError("there are no messages")
        text = self.text(with_tools=bool(tools))
        if text not in self._compiled:
            template = _environment().from_string(_bounded(text))
            template.globals = dict(template.globals)  # a plain dict, as each rendering copies it
            self._compiled[text] = template
        _RENDERING.until_s = time.thread_time() + RENDER_CPU_S
        return self._compiled[text].render(
            **self._special_tokens,
            messages=[_message(turn) for turn in turns],
            tools=[dict(tool) for tool in tools] or None,
            documents=None,
            add_generation_prompt=True,
        )

    def names(self, *, with_tools: bool) -> frozenset[str]:
        """The names and texts in the code of the template: whatever it can read of a message.

        Raises ValueError or jinja2.TemplateError as `render` does.
        """
        text = self.text(with_tools=with_tools)
        if text not in self._names:
            code = (value for _, kind, value in _environment().lex(text) if kind in ("name", "string"))
            self._names[text] = frozenset(value.strip("'\"") for value in code)
        return self._names[text]


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


class _DictFactory:
    """`dict` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Environment(ImmutableSandboxedEnvironment):
    """Bounds what makes much of little: loops and macros in time, products and what is put together in size."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product or a power. Raises TemplateError for a large one."""
        for side, count in ((left, right), (right, left)):
            if isinstance(side, Sized) and isinstance(count, int):
                _check_size(len(side) * count)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _check_size(BIT * bits)
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """All output of the template, or of a macro. Raises TemplateError."""
        texts = list(parts)
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def check_time(self) -> None:
        """Raises TemplateError once this thread's rendering has used up its CPU time."""
        if time.thread_time() > _RENDERING.until_s:
            raise TemplateError(f"rendering takes more than {RENDER_CPU_S:g} s")


def _bounded(text: str) -> nodes.Template:
    """The template with a check of the time in each loop and macro, as only these can take long."""
    tree = _environment().parse(text)
    parts: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
    for part in parts:
        check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
        part.body.insert(0, nodes.ExprStmt(check, lineno=part.lineno))
    return tree


@cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
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
