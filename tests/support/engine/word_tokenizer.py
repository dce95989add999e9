"""A tokenizer for tests: one token a word, `w<number>` for known ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitserve.errors import InvalidArgumentError
from splitserve.models.hf_tokenizer import fitted
from splitserve.models.tokenizer import (
    DEFAULT_ARGUMENTS,
    PromptStyle,
    TemplateArguments,
    TooManyTokensError,
    Turn,
)

VOCABULARY_SIZE = 1000


class WordTokenizer:
    """Words "w0".."w999" are their own ids; any other word is token 1. There is a template unless told otherwise."""

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.vocabulary_size = VOCABULARY_SIZE

    def encode(self, text: str, most: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        ids = [_id(word) for word in text.split()]
        if most is not None and len(ids) > most:
            raise TooManyTokensError(len(ids))
        return ids

    def render_chat(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        most: int | None = None,
        arguments: TemplateArguments = DEFAULT_ARGUMENTS,
    ) -> list[int]:
        if not self.has_chat_template:
            raise InvalidArgumentError("prompt.chat: this model has no chat template", field="prompt.chat")
        head = [4] * len(tools)
        turns = fitted(messages, ())
        return head + [token for turn in turns for token in (2, *self.encode(turn.content))] + [3]

    def token_bytes(self, token_id: int) -> bytes:
        return f" w{token_id}".encode()

    def entry(self, token_id: int) -> str:
        return f"w{token_id}"

    def prompt_style(
        self, *, with_tools: bool, arguments: TemplateArguments = DEFAULT_ARGUMENTS
    ) -> PromptStyle:
        return PromptStyle()

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return " ".join(f"w{token}" for token in token_ids)


def _id(word: str) -> int:
    number = word.removeprefix("w")
    return int(number) if word.startswith("w") and number.isdigit() and int(number) < VOCABULARY_SIZE else 1


def load_word_tokenizer(source: str) -> WordTokenizer:
    """Loads by source: "words" or "words-without-template"."""
    return WordTokenizer(has_chat_template=source == "words")
