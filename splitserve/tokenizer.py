"""Text to token ids and back: a protocol, a Hugging Face implementation and a byte-level one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Turn(NamedTuple):
    """One message of a conversation, as a chat template sees it."""

    role: str
    content: str
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Calls that the assistant made, as in OpenAI's `tool_calls`; arguments are objects, not strings of JSON."""
    tool_call_id: str = ""
    """Which call a turn of role "tool" answers."""
    name: str = ""
    """Of the speaker or the tool."""


class Tokenizer(Protocol):
    """What coordinator and engine need. Thread-safe for concurrent calls."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids are in 0..vocabulary_size-1."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw text, with the model's special tokens (as `transformers` adds them)."""

    def render_chat(self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of turns through the chat template, generation prompt appended; `tools` as in OpenAI's `tools`.

        Raises InvalidArgumentError when there is no template, it refuses the turns, or it knows no tools.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; of a special token its name. Empty for an id without a token."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out. Incomplete UTF-8 shows as U+FFFD."""
