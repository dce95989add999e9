"""Turns output tokens into text one by one, never emitting half a character."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 16
# A window of whole characters is cut beyond so many tokens. Each of them is decoded again with every new one, out of
# tables that the model has driven out of the caches; a cut costs one more decode.
_CUT_AT_TOKENS = 4
# A UTF-8 character has at most 4 bytes, so at most 4 byte tokens; twice that without a whole character
# means that the bytes are no UTF-8 at all, or that the model really writes U+FFFD.
_MAX_PENDING_TOKENS = 8
_MAX_PARTIAL_CHARS = 3


class IncrementalDetokenizer:
    """Text of an output, token by token.

    Decodes a short window of tokens that begins with some already emitted ones, because a tokenizer may
    drop a leading space or join bytes across tokens; what lies beyond the part already emitted is new. The
    window is cut at character boundaries, so a token costs amortised O(1). The text depends on the tokens
    alone: another process that is given the same ones returns the same pieces.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = self._visible_tail(prompt)
        self._text = tokenizer.decode(self._window)
        self._emitted = len(self._text)
        self._boundary = len(self._window)

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that became certain with it, perhaps none."""
        self._window.append(token_id)
        before, self._text = self._text, self._tokenizer.decode(self._window)
        if self._text.endswith(REPLACEMENT):
            return self._push_partial()
        delta = self._text[self._emitted :]
        self._emitted = len(self._text)
        if self._text == before and (self._text or len(self._window) > _MAX_WINDOW_TOKENS):
            self._window.pop()  # A special token shows nothing; many of them must not fill the window.
        self._advance()
        return delta

    def finish(self) -> str:
        """The rest of the text; an incomplete character shows as U+FFFD."""
        rest = self._text[self._emitted :]
        self._emitted = len(self._text)
        return rest

    def _visible_tail(self, prompt: Sequence[int]) -> list[int]:
        count = _CONTEXT_TOKENS
        while True:
            tail = list(prompt[-count:])
            if count >= len(prompt) or self._tokenizer.decode(tail):
                return tail
            count *= 4

    def _push_partial(self) -> str:
        if len(self._window) - self._boundary < _MAX_PENDING_TOKENS:
            return ""
        # Not a character in the making: everything but the last few bytes is certain by now.
        run = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        end = len(self._text) - min(run, _MAX_PARTIAL_CHARS)
        delta = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if len(self._window) > 2 * _MAX_WINDOW_TOKENS:
            self._cut(len(self._window) - _MAX_WINDOW_TOKENS)
        return delta

    def _advance(self) -> None:
        previous, self._boundary = self._boundary, len(self._window)
        if len(self._window) > _CUT_AT_TOKENS:
            self._cut(previous)

    def _cut(self, start: int) -> None:
        """Drops the window's first tokens if the rest still shows the text that is not emitted yet.

        UTF-8 is self-synchronising: even a cut inside a character changes the text near the cut only.
        """
        window = self._window[start:]
        text = self._tokenizer.decode(window)
        pending = self._text[self._emitted :]
        if not text or not text.endswith(pending):
            return
        self._window, self._text = window, text
        self._emitted = len(text) - len(pending)
        self._boundary = max(self._boundary - start, 0)
