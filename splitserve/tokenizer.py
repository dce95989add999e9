"""Text to token ids and back: a protocol, a Hugging Face implementation and a byte-level one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


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

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of (role, content) turns through the chat template, generation prompt appended.

        Raises InvalidArgumentError when there is no template or it refuses the roles.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out. Incomplete UTF-8 shows as U+FFFD."""
