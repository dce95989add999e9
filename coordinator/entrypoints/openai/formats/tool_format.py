"""What a format of reasoning, or of tool calls, is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.entrypoints.openai.formats.reader import Reader, Steps
from coordinator.entrypoints.openai.formats.writer import Writer

NAME, KEY = "\1", "\2"
"""What stands for the name of a function, or of a parameter, in a form."""
NUMBER = "\3"
"""What stands for some number in a form."""
KIND = "\4"
"""What stands for whether an argument is a string."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning between two tags, at the beginning of an answer."""

    name: str
    begin: str
    ends: tuple[str, ...]
    """Each of these ends it."""

    def is_in(self, template: str) -> bool:
        """Whether a chat template has this format's tags."""
        return self.begin.strip() in template or self.ends[0] in template


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a grammar spells calls: the texts around their parts."""

    head: str
    """Before the arguments, with NAME."""
    tail: str
    begin: str = ""
    """Before the first call. Text that goes on with this and `head` up to its NAME is a call."""
    between: str = ""
    end: str = ""
    """After the last call."""
    argument: tuple[str, str] | None = None
    """Around each argument, with KEY, where they are written one by one; otherwise they are one JSON object."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    markers: tuple[str, ...]
    """A chat template that contains all of these is the family's."""
    opens: tuple[str, ...]
    """Tags that begin calls."""
    read: Callable[[Reader, Writer], Steps[bool]]
    """Reads what follows such a tag. False, with nothing written: it is no call."""
    skips: tuple[str, ...] = ()
    """Tags around calls that mean nothing by themselves."""
    is_bare: bool = False
    """Whether a call may begin the answer without a tag."""
    form: CallForm | None = None
    """None: no grammar can spell the family's calls."""

    @property
    def tags(self) -> tuple[str, ...]:
        """All that ends a text."""
        return self.opens + self.skips
