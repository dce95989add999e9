"""Logprobs in the two formats of OpenAI's API."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable
from typing import Any

from splitserve.models.tokenizer import Tokenizer
from splitserve.v1 import generation_pb2

LEAST = -9999.0
"""Replaces minus infinity, which JSON cannot represent; OpenAI uses this value."""


class TokenTexts:
    """Texts and bytes of single tokens, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self._visible: dict[int, bytes] = {}

    def of(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and bytes. The text of a part of a character is written as by OpenAI, `bytes:\\xf0\\x9f`."""
        text_and_bytes = self._known.get(token_id)
        if text_and_bytes is None:
            data = self._tokenizer.token_bytes(token_id)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            text_and_bytes = self._known[token_id] = text, data
        return text_and_bytes

    def visible(self, token_id: int) -> bytes:
        """The bytes that a token adds to an answer's text; none if it is a special token."""
        data = self._visible.get(token_id)
        if data is None:
            # Twice: some tokenizers drop a space at the beginning, which may be the whole token.
            is_visible = self._tokenizer.decode([token_id, token_id])
            data = self._visible[token_id] = self.of(token_id)[1] if is_visible else b""
        return data


def chat_logprobs(texts: TokenTexts, tokens: Iterable[generation_pb2.TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = []
    for token in tokens:
        top = [_chat_entry(texts, other.token_id, other.logprob) for other in token.top]
        content.append(_chat_entry(texts, token.token_id, token.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion. Counts each token's offset in the text, in characters."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")
        """Holds the bytes of a character whose other bytes have not arrived."""

    def to_json(
        self, tokens: Iterable[generation_pb2.TokenLogprob], length: int | None = None
    ) -> dict[str, list[Any]]:
        """The logprobs of the tokens after those of earlier calls. `length`: characters of the whole text, if known. A
        stop string may have cut the text before the last tokens; their offset is then its length."""
        shown: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            text = self._texts.of(token.token_id)[0]
            shown["tokens"].append(text)
            shown["token_logprobs"].append(_finite(token.logprob))
            top = {self._texts.of(other.token_id)[0]: _finite(other.logprob) for other in token.top}
            shown["top_logprobs"].append({text: _finite(token.logprob)} | top)
            shown["text_offset"].append(self._offset if length is None else min(self._offset, length))
            self._offset += len(self._decoder.decode(self._texts.visible(token.token_id)))
        return shown


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = texts.of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    # Minus infinity and NaN both fail this comparison.
    return logprob if logprob > LEAST else LEAST
