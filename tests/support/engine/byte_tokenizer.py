"""Tokenizers small enough to reason about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitserve.errors import InvalidArgumentError
from splitserve.models.tokenizer import PromptStyle

EOS_TOKEN_ID = 256


class ByteTokenizer:
    """One token a byte, 256 the (invisible) end of sequence, then `pieces` of several bytes each."""

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        self._table = [*(bytes([byte]) for byte in range(256)), b"", *pieces]

    @property
    def vocabulary_size(self) -> int:
        return len(self._table)

    @property
    def has_chat_template(self) -> bool:
        return False

    def encode(self, text: str, most: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def render_chat(self, *_: Any) -> list[int]:
        raise InvalidArgumentError("no chat template", field="messages")

    def entry(self, token_id: int) -> str:
        return self._table[token_id].decode("latin-1")

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]

    def prompt_style(self, **_: Any) -> PromptStyle:
        return PromptStyle()

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return b"".join(self._table[token] for token in token_ids).decode(errors="replace")


class FallbackTokenizer(ByteTokenizer):
    """Words as a SentencePiece model shows them: drops the first space, and shows a run of byte tokens

    that is not UTF-8 as one U+FFFD a byte. Tokens from 257 on are `words`.
    """

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__([word.encode() for word in words])
        self._words = list(words)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        text, run = "", b""
        for token in [*token_ids, None]:
            if token is not None and token < EOS_TOKEN_ID:
                run += bytes([token])
                continue
            if token == EOS_TOKEN_ID:
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            if token is not None:
                text += self._words[token - EOS_TOKEN_ID - 1]
        return text.removeprefix(" ")
