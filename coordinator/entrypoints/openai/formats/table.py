"""All formats, and the choice among them by a model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.arguments import Schema
from coordinator.entrypoints.openai.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from coordinator.entrypoints.openai.formats.gemma import GEMMA
from coordinator.entrypoints.openai.formats.harmony import (
    HARMONY,
    HARMONY_REASONING,
    HarmonyParser,
    encoding_of,
)
from coordinator.entrypoints.openai.formats.invoke import DEEPSEEK_V4, DEEPSEEK_V32, DEEPSEEK_V41, MINIMAX
from coordinator.entrypoints.openai.formats.json_calls import GRANITE, HERMES, MINIMAX_M1, PHI4
from coordinator.entrypoints.openai.formats.kimi import KIMI_K2, KIMI_K3
from coordinator.entrypoints.openai.formats.llama import LLAMA, LLAMA_PYTHONIC
from coordinator.entrypoints.openai.formats.mistral import MISTRAL, MISTRAL_V3
from coordinator.entrypoints.openai.formats.tagged import GLM, QWEN_XML
from coordinator.entrypoints.openai.formats.tool_format import ReasoningFormat, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Writer
from splitserve.errors import InvalidArgumentError
from splitserve.models.tokenizer import DEFAULT_ARGUMENTS, TemplateArguments, Tokenizer

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (
        # A template with the markers of several families belongs to the first of them.
        HARMONY,
        KIMI_K2,
        KIMI_K3,
        DEEPSEEK_V32,
        DEEPSEEK_V41,
        DEEPSEEK_V4,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        MINIMAX,
        MINIMAX_M1,
        GLM,
        QWEN_XML,
        GEMMA,
        MISTRAL,
        MISTRAL_V3,
        LLAMA_PYTHONIC,
        LLAMA,
        PHI4,
        GRANITE,
        HERMES,
    )
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    reasoning_format.name: reasoning_format
    for reasoning_format in (
        HARMONY_REASONING,
        ReasoningFormat(
            "kimi_k3", "<|open|>think<|sep|>", ("<|close|>think<|sep|>", "<|open|>response<|sep|>")
        ),
        ReasoningFormat("gemma", "<|channel>thought\n", ("<channel|>",)),
        ReasoningFormat("mistral", "[THINK]", ("[/THINK]",)),
        ReasoningFormat("granite", "Here is my thought process:", ("Here is my response:",)),
        ReasoningFormat("think", "<think>", ("</think>",)),
    )
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of one model are read."""

    tools: ToolFormat | None = None
    """None: answers have no calls."""
    reasoning: ReasoningFormat | None = None
    """None: answers have no reasoning."""
    is_reasoning: bool = False
    """Whether the prompt has begun the reasoning."""
    end_ids: tuple[int, ...] = ()
    """The tokens of the tag that ends the reasoning."""
    keep_special: bool = False
    """Whether a tag is a special token, so that the text must include special tokens."""
    harmony: HarmonyEncoding | None = None
    """The vocabulary of gpt-oss, whose answers are read by tokens."""
    continues: bool = False
    """Whether the prompt ends within the text of an answer."""

    def forced(self) -> AnswerFormat:
        """The format of answers that must be calls: one that a grammar can write. Raises InvalidArgumentError."""
        if self.tools is None:
            message = "tool_choice: tool_format none finds no calls"
            raise InvalidArgumentError(message, reason="TOOLS_UNSUPPORTED", field="tool_choice")
        return self if self.tools.form is not None else replace(self, tools=HERMES)

    def continuing(self, text: str) -> AnswerFormat:
        """The format of an answer that continues this text."""
        if self.harmony is not None:
            return replace(self, continues=True)
        if self.reasoning is None:
            return self
        begun, ended = text.rfind(self.reasoning.begin.rstrip()), max(map(text.rfind, self.reasoning.ends))
        return replace(self, is_reasoning=begun > ended)

    def parser(self, tools: Mapping[str, Schema | None], *, must_call: bool) -> AnswerParser:
        """The parser of one answer. `tools`: the schema of each function's parameters. `must_call`: text is dropped."""
        writer = Writer(tools, must_call=must_call)
        if self.harmony is not None:
            has = self.tools is not None, self.reasoning is not None
            return HarmonyParser(writer, self.harmony, has, continues=self.continues)
        return AnswerParser(
            writer, self.tools, self.reasoning, is_reasoning=self.is_reasoning, end_ids=self.end_ids
        )


def format_named(
    tool_format: str, reasoning_format: str, *, with_tools: bool, template: str = ""
) -> AnswerFormat:
    """The formats of these names. "auto": the first format whose markers are in the template; without any, Hermes for
    calls and none for reasoning."""
    tools = reasoning = None
    if with_tools and tool_format != "none":
        fitting = (
            tools for tools in TOOL_FORMATS.values() if all(mark in template for mark in tools.markers)
        )
        tools = next(fitting, HERMES) if tool_format == "auto" else TOOL_FORMATS[tool_format]
    if reasoning_format != "none":
        present = (reasoning for reasoning in REASONING_FORMATS.values() if reasoning.is_in(template))
        reasoning = next(present, None) if reasoning_format == "auto" else REASONING_FORMATS[reasoning_format]
    return AnswerFormat(tools, reasoning)


def choose_format(
    tokenizer: Tokenizer,
    tool_format: str,
    reasoning_format: str,
    *,
    with_tools: bool,
    arguments: TemplateArguments = DEFAULT_ARGUMENTS,
) -> AnswerFormat:
    """The format of a model's answers to requests with or without tools, and with these arguments of the template.
    Takes as long as rendering a prompt."""
    style = tokenizer.prompt_style(with_tools=with_tools, arguments=arguments)
    # The end of a rendered prompt shows tags that the template composes from parts.
    template = style.template + style.end
    named = format_named(tool_format, reasoning_format, with_tools=with_tools, template=template)
    tools, reasoning = named.tools, named.reasoning
    tags = [*(tools.tags if tools else ()), *((reasoning.begin, *reasoning.ends) if reasoning else ())]
    return replace(
        named,
        is_reasoning=reasoning is not None and style.end.rstrip().endswith(reasoning.begin.rstrip()),
        end_ids=_ids(tokenizer, reasoning.ends[0]) if reasoning is not None else (),
        harmony=encoding_of(tokenizer) if HARMONY is tools or HARMONY_REASONING is reasoning else None,
        keep_special=any(tag not in tokenizer.decode(tokenizer.encode(tag)) for tag in tags),
    )


def _ids(tokenizer: Tokenizer, tag: str) -> tuple[int, ...]:
    """The tokens of a tag, without those that every text begins with."""
    return tuple(tokenizer.encode(tag)[len(tokenizer.encode("")) :])
