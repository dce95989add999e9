"""Turns output tokens into text one by one, emitting whole characters only; finds stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.models.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 16
# A window of whole characters is cut beyond this length. Each token of it is decoded again with every new one, from
# tables that the model has evicted from the caches; a cut costs one more decode.
_CUT_AT_TOKENS = 4
# A UTF-8 character has at most 4 bytes, so at most 4 byte tokens. Twice that without a whole character means that the
# bytes are not UTF-8, or that the model really writes U+FFFD.
_MAX_PENDING_TOKENS = 8
_MAX_PARTIAL_CHARS = 3


class IncrementalDetokenizer:
    """The text of an output, token by token.

    Decodes a short window of tokens that begins with some whose text was emitted already, because a tokenizer may drop
    a leading space or join bytes across tokens; text beyond the emitted part is new. The window is cut at character
    boundaries, so a token costs amortized O(1). The pieces of text depend on the tokens only: another process that
    gets the same tokens returns the same pieces.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = self._visible_tail(prompt)
        self._text = tokenizer.decode(self._window)
        self._emitted = len(self._text)
        self._boundary = len(self._window)

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that it completes, which may be empty."""
        self._window.append(token_id)
        before, self._text = self._text, self._tokenizer.decode(self._window)
        if self._text.endswith(REPLACEMENT):
            return self._push_partial()
        delta = self._text[self._emitted :]
        self._emitted = len(self._text)
        if self._text == before and (self._text or len(self._window) > _MAX_WINDOW_TOKENS):
            self._window.pop()  # a special token has no text; many of them must not fill the window
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
        # Not an incomplete character: everything but the last few bytes is final.
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
        """Drops the window's first tokens if the rest still decodes to the text that is not emitted yet.

        UTF-8 is self-synchronizing: even a cut inside a character changes only the text near the cut.
        """
        window = self._window[start:]
        text = self._tokenizer.decode(window)
        pending = self._text[self._emitted :]
        if not text or not text.endswith(pending):
            return
        self._window, self._text = window, text
        self._emitted = len(text) - len(pending)
        self._boundary = max(self._boundary - start, 0)


class StopMatcher:
    """Finds stop strings in text that comes in pieces; holds back text that may be the beginning of one.

    The result does not depend on how the text is split into pieces: the match that ends first wins, and of several
    that end at the same character the longest.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stop_strings if stop)
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Takes new text; returns what may be emitted and whether a stop string ended the answer.

        Without `may_stop`, stop strings that are completed by this piece are ordinary text.
        """
        if not self._stops:
            return text, False
        seen, buffer = len(self._held), self._held + text
        if may_stop:
            match = self._first_match(buffer, seen)
            if match is not None:
                self._held = ""
                return buffer[:match], True
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def release(self) -> str:
        """The text held back, when the answer ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, seen: int) -> int | None:
        # A match that ends within the first `seen` characters was skipped on purpose (`may_stop`).
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _possible_start(self, buffer: str) -> int:
        """The start of the longest suffix of `buffer` that is a prefix of a stop string; its end if there is none."""
        best = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), best)
            while start != -1:
                if stop.startswith(buffer[start:]):
                    best = start
                    break
                start = buffer.find(stop[0], start + 1, best)
        return best
