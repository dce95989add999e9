"""Reads an answer that arrives in pieces, in straight functions.

The reader of a family is a generator: it asks for what should come next, and waits, by a bare `yield`, where the text
so far does not tell. So its result cannot depend on how the text was cut. Everything that is certain is taken out at
once: what is left to look at again is shorter than a tag, and an answer is read in time linear in its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""What waits for more text at each `yield`, and returns a T."""
Take = Callable[[str], None]
"""Gets pieces of text as they become certain."""

MAX_NAME = 256
"""Characters of the name of a function or a parameter; what is longer is no call."""
_BLANK = re.compile(r"\s*")
_OUTSIDE = re.compile(r"""["'{}\[\]()]|[^\s\w,:.+\-=]""")
"""What matters outside of strings: quotes and brackets, and whatever no value contains."""
_INSIDE = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ('"', "'")}
_SCALAR = re.compile(r"[^\s,\]}]*")


def drop(text: str) -> None:
    """Takes a piece that means nothing."""


class EndOfText(Exception):
    """The answer ended where more was expected."""


class Reader:
    """The text of one answer. All methods that take text wait until it is there, and raise EndOfText if it never is."""

    def __init__(self) -> None:
        self.is_cut = False
        """Whether the model would have gone on; known at the end."""
        self.lost = False
        """Whether the answer ended with the beginning of a tag, which was left out."""
        self._text, self._at = "", 0
        self._ended = False
        self._recorded: list[str] | None = None

    def add(self, text: str) -> None:
        """Appends a piece of the answer."""
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self, *, is_cut: bool) -> None:
        """Says that nothing follows."""
        self._ended, self.is_cut = True, is_cut

    def record(self, begun: str = "") -> None:
        """Keeps what is taken from here on, after `begun`."""
        self._recorded = [begun]

    def recorded(self) -> str:
        """What was taken since `record`, which is over."""
        kept, self._recorded = "".join(self._recorded or ()), None
        return kept

    def until(self, tags: tuple[str, ...], take: Take) -> Steps[str]:
        """Takes everything up to the first of these tags, and the tag; returns the tag."""
        pattern = _any_of(tags)
        while True:
            found = pattern.search(self._text, self._at)
            sure = _sure_end(self._text, self._at, tags)
            if found is not None and (found.start() < sure or self._ended):
                self._take(found.start(), take)
                return self._take(found.end())
            self._take(sure, take)
            if self._ended:
                self._end_in(take)
            yield

    def rest(self, take: Take) -> Steps[None]:
        """Takes everything that follows."""
        while True:
            self._take(len(self._text), take)
            if self._ended:
                raise EndOfText
            yield

    def collect(self, *tags: str) -> Steps[tuple[str, str]]:
        """The text up to the first of these tags, and the tag. Both are taken."""
        pieces: list[str] = []
        tag = yield from self.until(tags, pieces.append)
        return "".join(pieces), tag

    def value(self, end: str, follow: tuple[str, ...]) -> Steps[str]:
        """The text up to a closing tag that one of `follow` comes after, blanks aside: the value may contain others."""
        pieces: list[str] = []
        while True:
            yield from self.until((end,), pieces.append)
            blank = yield from self.blank()
            if (yield from self.sees(*follow)):
                return "".join(pieces)
            pieces += [end, blank]

    def blank(self) -> Steps[str]:
        """Takes white space; returns it. It may be the end of the text."""
        pieces = []
        while True:
            found = _BLANK.match(self._text, self._at)
            pieces.append(self._take(found.end() if found else self._at))
            if self._left or self._ended:
                return "".join(pieces)
            yield

    def sees(self, *texts: str) -> Steps[str]:
        """Which of these texts, of which none begins another, comes next; empty for none. Nothing is taken."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    return text
            left = self._text[self._at : self._at + max(map(len, texts))]
            if not any(text.startswith(left) for text in texts):
                return ""
            if self._ended:
                raise EndOfText
            yield

    def next_is(self, *texts: str) -> Steps[str]:
        """Takes white space; returns which of these texts comes next."""
        yield from self.blank()
        return (yield from self.sees(*texts))

    def takes(self, *texts: str) -> Steps[str]:
        """Takes white space, then one of these texts, and returns it. Empty if none comes next."""
        found = yield from self.next_is(*texts)
        self._take(self._at + len(found))
        return found

    def name(self, allowed: re.Pattern[str]) -> Steps[str]:
        """Takes the characters that match, MAX_NAME at most. Empty: there is no name."""
        name = ""
        while len(name) <= MAX_NAME:
            found = allowed.match(self._text, self._at, self._at + MAX_NAME + 1)
            name += self._take(found.end() if found else self._at)
            if self._left:
                return name if len(name) <= MAX_NAME else ""
            if self._ended:
                raise EndOfText
            yield
        return ""

    def string(self) -> Steps[str | None]:
        """Takes a JSON string; returns its value. None: there is none."""
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
        """Takes one value of JSON, or of Python, as it is written. False: something that no value contains is in it,
        and comes next."""
        yield from self.blank()
        while not self._left:
            if self._ended:
                raise EndOfText
            yield
        if self._text[self._at] not in "\"'{[(":
            while True:
                found = _SCALAR.match(self._text, self._at)
                self._take(found.end() if found else self._at, take)
                if self._left or self._ended:
                    return True
                yield
        depth, quote = 0, ""
        while True:
            position = self._at
            while found := (_INSIDE[quote] if quote else _OUTSIDE).search(self._text, position):
                sign, position = found[0], found.end()
                if quote:
                    quote = "" if sign == quote else quote
                elif sign in "\"'":
                    quote = sign
                elif sign in "{[(":
                    depth += 1
                elif sign in "}])":
                    depth -= 1
                else:
                    self._take(found.start(), take)
                    return False
                if depth <= 0 and not quote:
                    self._take(position, take)
                    return True
            # A backslash is looked at together with what follows it.
            sure = len(self._text) - (1 if quote and self._text.endswith("\\", position) else 0)
            self._take(sure, take)
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
        """Ends with what may be the beginning of a tag: it is left out. A text may well end with "<", though."""
        fragment = self._text[self._at :]
        if len(fragment) == 1 and not self.is_cut:
            self._take(len(self._text), take)
        self.lost = self._left
        raise EndOfText


@lru_cache(maxsize=256)
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))


@lru_cache(maxsize=256)
def _firsts(tags: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    return max(map(len, tags)), frozenset(tag[0] for tag in tags)


def _sure_end(text: str, at: int, tags: tuple[str, ...]) -> int:
    """Where the longest end of the text begins that may become a tag; the text's length if there is none."""
    longest, firsts = _firsts(tags)
    for start in range(max(at, len(text) - longest + 1), len(text)):
        if text[start] in firsts and any(
            len(tag) > len(text) - start and tag.startswith(text[start:]) for tag in tags
        ):
            return start
    return len(text)
