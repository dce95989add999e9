"""The tokenizer protocol; `hf_tokenizer.py` implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol


class Turn(NamedTuple):
    """One message of a conversation, as chat templates read it."""

    role: str
    content: str
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Calls made by the assistant, as in OpenAI's `tool_calls`, but with arguments as objects, not JSON strings."""
    tool_call_id: str = ""
    """The call that a turn of role "tool" answers."""
    name: str = ""
    """Name of the speaker or the tool."""
    further: Mapping[str, Any] = MappingProxyType({})
    """Further fields for the template, by name."""


class PromptStyle(NamedTuple):
    """How a model's prompts are made."""

    template: str = ""
    """The chat template's source; empty if there is none."""
    end: str = ""
    """How a prompt ends, where the answer begins. Empty if the template has not told."""


class TooManyTokensError(Exception):
    """A text has more tokens than the caller of the tokenizer can use: `count` of them, or more."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens or more")
        self.count = count


class Tokenizer(Protocol):
    """Tokenizer of the coordinator and the engine. Thread-safe."""

    vocabulary_size: int
    """Number of token ids; they are 0..vocabulary_size-1."""
    has_chat_template: bool
    """Whether `render_chat` works."""

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a text without a template, with the special tokens that `transformers` adds.

        Raises TooManyTokensError for more than `most`. Long texts leave the interpreter to other threads.
        """

    def render_chat(
        self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = (), most: int | None = None
    ) -> list[int]:
        """Token ids of turns rendered by the chat template, generation prompt appended; `tools` as in OpenAI's API.

        Raises InvalidArgumentError if there is no template, it refuses the turns, or it does not support `tools`;
        TooManyTokensError for more than `most`.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; for a special token its name. Empty for an unused id."""

    def prompt_style(self, *, with_tools: bool) -> PromptStyle:
        """How prompts of conversations are made. The first call takes as long as rendering a prompt."""

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of token ids, without special tokens unless they are kept. Incomplete UTF-8 becomes U+FFFD."""
