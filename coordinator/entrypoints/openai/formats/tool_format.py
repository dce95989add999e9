"""The description of a format of reasoning, or of tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.entrypoints.openai.formats.reader import Reader, Steps
from coordinator.entrypoints.openai.formats.writer import Writer

NAME, KEY, NUMBER, KIND = "\1", "\2", "\3", "\4"
"""Placeholders in a `CallForm`: the name of the function, the name of a parameter, any number, and whether an argument
is a string, as "true" or "false"."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning between two tags, at the beginning of an answer."""

    name: str
    begin: str
    ends: tuple[str, ...]
    """Tags, each of which ends the reasoning."""
    content: str = ""
    """What stands between reasoning and content."""

    def is_in(self, template: str) -> bool:
        """Whether a chat template has this format's tags."""
        return self.begin.strip() in template or self.ends[0] in template


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a grammar writes calls: the texts around their parts."""

    head: str
    """Before the arguments of a call. Contains NAME."""
    tail: str
    """After the arguments of a call."""
    begin: str = ""
    """Before the first call."""
    between: str | None = ""
    """Between calls. None: an answer has one call."""
    end: str = ""
    """After the last call."""
    argument: tuple[str, str] | None = None
    """Before and after each argument, with KEY in the first text. None: the arguments are one JSON object."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    markers: tuple[str, ...]
    """A chat template that contains all of these belongs to the family."""
    opens: tuple[str, ...]
    """Tags that begin calls."""
    read: Callable[[Reader, Writer], Steps[bool]]
    """Reads the text after an opening tag. False, with nothing written: the text is no call."""
    skips: tuple[str, ...] = ()
    """Tags around calls. They are dropped."""
    is_bare: bool = False
    """Whether a call may begin the answer without a tag."""
    form: CallForm | None = None
    """None: no grammar can write the family's calls."""

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags, each of which ends ordinary text."""
        return self.opens + self.skips
