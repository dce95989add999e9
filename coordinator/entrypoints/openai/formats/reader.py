"""Reads an answer that arrives in pieces, with functions written as if the whole text were there.

The functions are generators. Each waits for more text, by a bare `yield`, if the text so far does not decide what comes
next; so the result does not depend on where the pieces begin. Text is taken as soon as it is decided. The text that is
looked at again is shorter than a tag, so the time to read an answer is linear in its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that waits for more text at each `yield`, and returns a T."""
Take = Callable[[str], None]
"""Receives pieces of text that no later text can change."""

MAX_NAME = 256
"""Most characters of the name of a function or a parameter. With a longer one, the text is no call."""
PLAIN_NAME, ATTRIBUTE = re.compile(r"[\w.:/-]*"), re.compile(r'[^"<>]*')
"""The characters of a name on its own, and between quotes."""
_BLANK = re.compile(r"\s*")
_OUTSIDE = re.compile(r"""["'{}\[\]()]|[^\s\w,:.+\-=]""")
"""Outside of strings: quotes, brackets, and characters that no value contains."""
_INSIDE = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ('"', "'")}
_SCALAR = re.compile(r"[^\s,\]}]*")


def drop(text: str) -> None:
    """Ignores a piece without meaning."""


class EndOfText(Exception):
    """The answer has ended where a reader expects more."""


class Reader:
    """The text of one answer. A method that needs more text waits for it, and raises EndOfText if the answer ends."""

    def __init__(self) -> None:
        self.is_cut = False
        """Whether the model would have gone on. Set at the end of the answer."""
        self.lost = False
        """Whether the answer ended with the beginning of a tag, which was dropped."""
        self._text, self._at = "", 0
        self._ended = False
        self._recorded: list[str] | None = None

    def add(self, text: str) -> None:
        """Appends a piece of the answer."""
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self, *, is_cut: bool) -> None:
        """Ends the answer."""
        self._ended, self.is_cut = True, is_cut

    def record(self, begun: str = "") -> None:
        """Begins to record: `begun`, and all text that is taken from now on."""
        self._recorded = [begun]

    def recorded(self) -> str:
        """The text recorded since `record`. Ends the record."""
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    def until(self, tags: tuple[str, ...], take: Take) -> Steps[str]:
        """Takes everything up to the first of these tags, and the tag; returns the tag."""
        pattern = _any_of(tags)
        while True:
            match = pattern.search(self._text, self._at)
            decided_end = _decided_end(self._text, self._at, tags)
            if match is not None and (match.start() < decided_end or self._ended):
                self._take(match.start(), take)
                return self._take(match.end())
            self._take(decided_end, take)
            if self._ended:
                self._end_in(take)
            yield

    def to_the_end(self, take: Take) -> Steps[None]:
        """Takes everything up to the end of the answer."""
        while True:
            self._take(len(self._text), take)
            if self._ended:
                raise EndOfText
            yield

    def collect(self, *tags: str) -> Steps[tuple[str, str]]:
        """Takes everything up to the first of these tags, and the tag; returns both."""
        pieces: list[str] = []
        tag = yield from self.until(tags, pieces.append)
        return "".join(pieces), tag

    def value(self, end: str, follow: tuple[str, ...]) -> Steps[str]:
        """Takes a value and the tag `end` that closes it; returns the value. The value may contain `end` itself: the
        closing one has one of `follow` after it, white space aside."""
        pieces: list[str] = []
        while True:
            yield from self.until((end,), pieces.append)
            blank = yield from self.blank()
            if (yield from self.sees(*follow)):
                return "".join(pieces)
            pieces += [end, blank]

    def blank(self) -> Steps[str]:
        """Takes white space, and returns it; also at the end of the answer."""
        pieces = []
        while True:
            match = _BLANK.match(self._text, self._at)
            pieces.append(self._take(match.end() if match else self._at))
            if self._left or self._ended:
                return "".join(pieces)
            yield

    def sees(self, *texts: str) -> Steps[str]:
        """The one of these texts that comes next; empty for none. None of them may begin another. Takes nothing."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    return text
            ahead = self._text[self._at : self._at + max(map(len, texts))]
            if not any(text.startswith(ahead) for text in texts):
                return ""
            if self._ended:
                raise EndOfText
            yield

    def next_is(self, *texts: str) -> Steps[str]:
        """Takes white space; returns the one of these texts that comes next."""
        yield from self.blank()
        return (yield from self.sees(*texts))

    def takes(self, *texts: str) -> Steps[str]:
        """Takes white space, then one of these texts, and returns it. Empty if none comes next."""
        text = yield from self.next_is(*texts)
        self._take(self._at + len(text))
        return text

    def name(self, allowed: re.Pattern[str] = PLAIN_NAME) -> Steps[str]:
        """Takes and returns the characters that match; empty if there is none, or more than MAX_NAME."""
        name = ""
        while len(name) <= MAX_NAME:
            match = allowed.match(self._text, self._at, self._at + MAX_NAME + 1)
            name += self._take(match.end() if match else self._at)
            if self._left:
                return name if len(name) <= MAX_NAME else ""
            if self._ended:
                raise EndOfText
            yield
        return ""

    def string(self) -> Steps[str | None]:
        """Takes a JSON string; returns its value. None: no string comes next."""
        if not (yield from self.next_is('"')):
            return None
        pieces: list[str] = []
        yield from self.json_value(pieces.append)
        try:
            value: str = json.loads("".join(pieces), strict=False)
        except ValueError:
            return None
        return value

    def json_value(self, take: Take) -> Steps[bool]:
        """Takes one value of JSON, or of Python, as it is written. False: the value is incomplete, and a character that
        no value contains comes next."""
        yield from self.blank()
        while not self._left:
            if self._ended:
                raise EndOfText
            yield
        # 1. A number or a word ends before a comma, a bracket or white space.
        if self._text[self._at] not in "\"'{[(":
            while True:
                match = _SCALAR.match(self._text, self._at)
                self._take(match.end() if match else self._at, take)
                if self._left or self._ended:
                    return True
                yield
        # 2. A string, or brackets, end with the sign that closes the first one.
        depth, quote = 0, ""
        while True:
            position = self._at
            while match := (_INSIDE[quote] if quote else _OUTSIDE).search(self._text, position):
                sign, position = match[0], match.end()
                if quote:
                    quote = "" if sign == quote else quote
                elif sign in "\"'":
                    quote = sign
                elif sign in "{[(":
                    depth += 1
                elif sign in "}])":
                    depth -= 1
                else:
                    self._take(match.start(), take)
                    return False
                if depth <= 0 and not quote:
                    self._take(position, take)
                    return True
            # A backslash at the end waits for the character that it escapes.
            escape = quote and self._text.endswith("\\", position)
            self._take(len(self._text) - (1 if escape else 0), take)
            if self._ended:
                raise EndOfText
            yield

    @property
    def _left(self) -> bool:
        return self._at < len(self._text)

    def _take(self, end: int, take: Take | None = None) -> str:
        piece, self._at = self._text[self._at : end], end
        if piece and self._recorded is not None:
            self._recorded.append(piece)
        if piece and take is not None:
            take(piece)
        return piece

    def _end_in(self, take: Take) -> None:
        """Drops the beginning of a tag at the end. A single character stays: an ordinary text may end with "<"."""
        if len(self._text) - self._at == 1 and not self.is_cut:
            self._take(len(self._text), take)
        self.lost = self._left
        raise EndOfText


@lru_cache(maxsize=256)
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))


@lru_cache(maxsize=256)
def _longest_and_firsts(tags: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """The length of the longest tag, and the first characters of all."""
    return max(map(len, tags)), frozenset(tag[0] for tag in tags)


def _decided_end(text: str, at: int, tags: tuple[str, ...]) -> int:
    """The start of the longest suffix of `text[at:]` that may grow into a tag; the text's length without one."""
    longest, firsts = _longest_and_firsts(tags)
    for start in range(max(at, len(text) - longest + 1), len(text)):
        if text[start] in firsts and any(
            len(tag) > len(text) - start and tag.startswith(text[start:]) for tag in tags
        ):
            return start
    return len(text)
