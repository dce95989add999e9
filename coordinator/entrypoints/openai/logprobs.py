"""Logprobs in the two formats of OpenAI's API, and those of prompts in vLLM's."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from splitserve.models.tokenizer import Tokenizer
from splitserve.v1 import generation_pb2

LEAST = -9999.0
"""Replaces minus infinity, which JSON cannot represent; OpenAI uses this value."""


class TokenTexts:
    """Texts and bytes of single tokens, cached. `as_ids`: the text names the token's id. `keep_special`: special tokens
    are part of answers' texts."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids, self._keep_special = as_ids, keep_special
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
            if self._as_ids:
                text = f"token_id:{token_id}"
            text_and_bytes = self._known[token_id] = text, data
        return text_and_bytes

    def visible(self, token_id: int) -> bytes:
        """The bytes that a token adds to an answer's text; none if it is a special token."""
        data = self._visible.get(token_id)
        if data is None:
            # Twice: some tokenizers drop a space at the beginning, which may be the whole token.
            is_visible = self._keep_special or self._tokenizer.decode([token_id, token_id])
            data = self._visible[token_id] = self.of(token_id)[1] if is_visible else b""
        return data


def chat_logprobs(texts: TokenTexts, tokens: Iterable[generation_pb2.TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = []
    for token in tokens:
        top = [_chat_entry(texts, other.token_id, other.logprob) for other in token.top]
        content.append(_chat_entry(texts, token.token_id, token.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class _Token(NamedTuple):
    """A token, its log-probability, the likeliest tokens with theirs, and its rank among all."""

    token_id: int
    logprob: float | None
    """None for the first token of a prompt, which has no context."""
    top: list[tuple[int, float]]
    rank: int = 0


def _output_token(token: generation_pb2.TokenLogprob) -> _Token:
    return _Token(token.token_id, token.logprob, [(other.token_id, other.logprob) for other in token.top])


def _prompt_tokens(prompt: generation_pb2.PromptLogprobs) -> Iterator[_Token]:
    yield from (_Token(token_id, None, []) for token_id in prompt.token_ids[:1])
    width = len(prompt.top_token_ids) // max(1, len(prompt.logprobs))
    # A simulated engine knows the tokens only.
    for place, values in enumerate(zip(prompt.token_ids[1:], prompt.logprobs, prompt.ranks, strict=False)):
        token_id, logprob, rank = values
        part = slice(place * width, (place + 1) * width)
        top = list(zip(prompt.top_token_ids[part], prompt.top_logprobs[part], strict=True))
        yield _Token(token_id, logprob, top, rank)


def prompt_logprobs(
    texts: TokenTexts, prompt: generation_pb2.PromptLogprobs
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt itself and the likeliest ones by their ids, None for the
    first."""
    shown: list[dict[str, dict[str, Any]] | None] = []
    for token_id, own, top, own_rank in _prompt_tokens(prompt):
        entry: dict[str, dict[str, Any]] = {}
        values = [] if own is None else [(own_rank, (token_id, own)), *enumerate(top, 1)]
        for rank, (other, logprob) in values:
            text = texts.of(other)[0]
            entry[str(other)] = {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}
        shown.append(entry or None)
    return shown


class CompletionLogprobs:
    """`choices[].logprobs` of a completion. Counts each token's offset in the text, in characters."""

    def __init__(self, texts: TokenTexts, echo: str = "") -> None:
        """`echo`: the prompt with which the text begins."""
        self._texts, self._echo = texts, echo
        self._offset = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")
        """Holds the bytes of a character whose other bytes have not arrived."""

    def to_json(
        self,
        tokens: Iterable[generation_pb2.TokenLogprob],
        length: int | None = None,
        prompt: generation_pb2.PromptLogprobs | None = None,
    ) -> dict[str, list[Any]]:
        """The logprobs of the tokens after those of earlier calls, and before them of the prompt. `length`: characters
        of the whole text, if known. A stop string may have cut the text before the last tokens; their offset is then
        its length."""
        shown: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, logprob, top, _ in chain(
            _prompt_tokens(prompt) if prompt is not None else (), map(_output_token, tokens)
        ):
            text, data = self._texts.of(token_id)
            own = None if logprob is None else _finite(logprob)
            others = {self._texts.of(other)[0]: _finite(value) for other, value in top}
            shown["tokens"].append(text)
            shown["token_logprobs"].append(own)
            shown["top_logprobs"].append(None if own is None else {text: own} | others)
            shown["text_offset"].append(self._offset if length is None else min(self._offset, length))
            visible = self._texts.visible(token_id)
            if not visible and self._echo.startswith(data.decode(errors="replace"), self._offset):
                visible = data  # the prompt spells a special token
            self._offset += len(self._decoder.decode(visible))
        return shown


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = texts.of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    # Minus infinity and NaN both fail this comparison.
    return logprob if logprob > LEAST else LEAST
