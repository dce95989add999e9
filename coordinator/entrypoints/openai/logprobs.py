"""Logprobs in the two formats of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from splitserve.models.tokenizer import Tokenizer
from splitserve.v1 import generation_pb2

LEAST = -9999.0
"""Replaces minus infinity, which JSON cannot represent; the value that OpenAI uses."""


class TokenTexts:
    """Text and bytes of single tokens, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """A token's text, with U+FFFD for incomplete characters, and its bytes."""
        found = self._known.get(token_id)
        if found is None:
            data = self._tokenizer.token_bytes(token_id)
            found = self._known[token_id] = data.decode("utf-8", "replace"), list(data)
        return found


def chat_logprobs(texts: TokenTexts, tokens: Iterable[generation_pb2.TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = []
    for token in tokens:
        top = [_chat_entry(texts, other.token_id, other.logprob) for other in token.top]
        content.append(_chat_entry(texts, token.token_id, token.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion; tracks each token's offset in the text."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def to_json(self, tokens: Iterable[generation_pb2.TokenLogprob]) -> dict[str, list[Any]]:
        """The logprobs of the next tokens, following those of earlier calls."""
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
            shown["text_offset"].append(self._offset)
            self._offset += len(text)
        return shown


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = texts.of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    # Minus infinity and NaN both fail this comparison.
    return logprob if logprob > LEAST else LEAST
