"""Random requests as OpenAI's own package defines them, from the type hints of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from types import NoneType
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as Chat
from openai.types.completion_create_params import CompletionCreateParamsStreaming as Completion
from typing_extensions import is_typeddict

KINDS = {"chat": Chat, "completion": Completion}
WORDS = ["w1", "w2 w3", "w4", "w5 w6 w7"]
NAMES = ["f", "get_weather", "A-b_9"]
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}}},
    {"type": "object", "properties": {"b": {"enum": ["x", "y"]}}, "required": ["b"]},
    {"type": "object", "properties": {}, "additionalProperties": False},
]
DOCS = Path(__file__).parents[3] / "docs/guides/openai-api.md"
OFTEN = 0.12
"""Probability of an optional field: most requests have a few."""


class Made:
    """One request. All with one seed have the same form; `twist` is the number of the one leaf that differs."""

    def __init__(self, seed: int, kind: type[Any] = Chat, twist: int | None = None) -> None:
        self._seed, self._twist = seed, twist
        self._shape = Random(seed)
        self.leaves = 0
        """So many values could be twisted."""
        self.twisted = ""
        """Where the leaf is that differs: `messages[].content`."""
        fields = get_type_hints(kind, include_extras=True)
        names = ["messages" if kind is Chat else "prompt"]
        names += [name for name in fields if name not in names and self._shape.random() < OFTEN]
        self.body = _coherent({name: self._value(fields[name], name) for name in names})

    def _value(self, hint: Any, path: str) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Required:
            return self._value(arguments[0], path)
        if path != "prompt" and origin is Union and NoneType in arguments and self._shape.random() < OFTEN:
            return None
        if (values := _scalars(hint, path)) is not None:
            return self._leaf(values, path)
        if origin is Union:
            return self._value(self._shape.choice([each for each in arguments if each is not NoneType]), path)
        if origin is not None and issubclass(origin, Iterable):
            return [self._value(arguments[0], f"{path}[]") for _ in range(self._shape.randint(1, 2))]
        assert is_typeddict(hint), (hint, path)
        fields = get_type_hints(hint, include_extras=True)
        given = [
            name
            for name, inner in fields.items()
            if get_origin(inner) is Required or self._shape.random() < 3 * OFTEN
        ]
        made = {name: self._value(fields[name], f"{path}.{name}") for name in given}
        if made.get("role") == "assistant" and not {"content", "tool_calls", "function_call"} & made.keys():
            made["content"] = "w1"
        return made

    def _leaf(self, values: Sequence[Any], path: str) -> Any:
        number = self.leaves
        self.leaves += 1
        value = Random(f"{self._seed}.{number}").choice(values)
        others = [other for other in values if other != value]
        if number != self._twist or not others:
            return value
        self.twisted = path
        return Random(f"{self._seed}.{number}.twisted").choice(others)


def _scalars(hint: Any, path: str) -> Sequence[Any] | None:
    """Values of a field that has no parts; the ranges are those of OpenAI's reference. None: it has parts."""
    field = path.rpartition(".")[2]
    known: dict[str, Sequence[Any]] = {
        "model": ["words"],
        "prompt": ["w1", ["w1", "w2"], [1, 2], [[1, 2], [3]]],
        "best_of": [1, 2, 3],
        "logprobs": [True, False] if hint == bool | None else [0, 1, 5],
        "temperature": [0, 0.5, 1, 1.7, 2],
        "top_p": [0, 0.1, 0.9, 1],
        "presence_penalty": [-2, -0.5, 0, 2.0],
        "frequency_penalty": [-2, -0.5, 0, 2.0],
        "n": [1, 2, 3],
        "max_tokens": [1, 3, 5],
        "max_completion_tokens": [1, 3, 5],
        "top_logprobs": [0, 1, 20],
        "seed": [0, 7, -1, 2**63 - 1, -(2**63)],
        "logit_bias": [{}, {"5": -100}, {"6": 100, "7": 1}],
        "metadata": [{}, {"a": "b"}],
        "stop": ["w9", ["w8"], ["w9", "w8 w7", "x", "y"]],
        "modalities": [["text"], ["audio"], ["text", "audio"]],
        "parameters": SCHEMAS,
        "schema": SCHEMAS,
        "arguments": ["{}", '{"a": 1}'],
        "name": NAMES,
        "tool_choice.allowed_tools.tools[]": [{"type": "function", "function": {"name": "f"}}],
    }
    if path in known or field in known:
        return known.get(path) or known[field]
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) is Union and all(
        get_origin(each) is Literal for each in get_args(hint) if each is not NoneType
    ):
        return [value for each in get_args(hint) for value in get_args(each)]
    return {str: WORDS, bool: [True, False], int: [1, 2, 3], float: [0.5, 1.0]}.get(hint)


def _coherent(body: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's reference says of fields that go together."""
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if body.get("best_of") is not None:
        body["n"] = body["best_of"]
        body.pop("stream", None)
    if body.get("max_completion_tokens") is not None:
        body.pop("max_tokens", None)
    if body.get("stream_options") is not None:
        body["stream"] = True
    if not body.get("tools"):
        body.pop("tool_choice", None)
        body.pop("parallel_tool_calls", None)
    for number, each in enumerate(body.get("tools") or ()):
        kind = each[each["type"]]
        kind["name"] = f"{kind['name']}{number}"
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice["type"] in ("function", "custom"):
        choice[choice["type"]]["name"] = body["tools"][0][body["tools"][0]["type"]]["name"]
    if body.get("response_format", {}).get("type") == "json_object":
        body["messages"].append({"role": "user", "content": "JSON"})
    return body


def normalized(path: str | None) -> str:
    """A path without numbers: `messages[].content`."""
    return re.sub(r"\[\d+\]", "[]", path or "")


def documented(beginning: str) -> set[str]:
    """The fields that a paragraph of the documentation of the API names."""
    text = DOCS.read_text()
    paragraph = text[text.index(f"\n{beginning}") :].partition("\n\n")[0]
    return {name.partition(":")[0] for name in re.findall(r"`([^`]+)`", paragraph)}
