"""Incremental detokenization and stop strings against naive references."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.sequence import IncrementalDetokenizer, StopMatcher
from tests.support.engine.byte_tokenizer import EOS_TOKEN_ID, ByteTokenizer, FallbackTokenizer


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def as_tokens(pieces: list[bytes]) -> tuple[ByteTokenizer, list[int]]:
    return ByteTokenizer(pieces), [257 + index for index in range(len(pieces))]


@given(st.text(max_size=80), st.text(max_size=20), st.lists(st.integers(0, 500), max_size=60))
def test_deltas_join_to_the_text_and_hold_whole_characters(text: str, prompt: str, cuts: list[int]) -> None:
    tokenizer, tokens = as_tokens(cut(text.encode(), cuts))
    detokenizer = IncrementalDetokenizer(tokenizer, list(prompt.encode()))
    deltas = [detokenizer.push(token) for token in tokens]
    assert "".join(deltas) + detokenizer.finish() == text
    if "\ufffd" not in text:
        assert "".join(deltas) == text


@given(st.binary(max_size=120), st.lists(st.integers(0, 500), max_size=150))
def test_invalid_bytes_show_as_the_tokenizer_shows_them(data: bytes, cuts: list[int]) -> None:
    tokenizer, tokens = as_tokens(cut(data, cuts))
    detokenizer = IncrementalDetokenizer(tokenizer, list(b"prompt "))
    shown = "".join(detokenizer.push(token) for token in tokens) + detokenizer.finish()
    assert shown == data.decode(errors="replace")


@given(st.lists(st.sampled_from([" hello", " wor", "ld", " ", "\n", "é", "你", "😀"]), max_size=60))
def test_leading_spaces_and_byte_fallback(words: list[str]) -> None:
    tokenizer = FallbackTokenizer([" hello", " wor", "ld", " ", "\n"])
    table = {" hello": [257], " wor": [258], "ld": [259], " ": [260], "\n": [261]}
    tokens = [token for word in words for token in table.get(word, list(word.encode()))]
    prompt = [257, 258, 259]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    shown = [detokenizer.push(token) for token in tokens]
    assert "".join(shown) == "".join(words)
    assert not any("\ufffd" in delta for delta in shown)


def test_an_incomplete_character_is_flushed_at_the_end_only() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), [])
    assert [detokenizer.push(byte) for byte in "é😀".encode()[:-1]] == ["", "é", "", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("before", range(15, 40))
def test_characters_after_garbage_are_whole_and_garbage_is_not_held_for_long(before: int) -> None:
    data = b"x" * before + b"\x80" * 50 + "é😀".encode() + b"\x80" * 9 + "😀".encode()
    detokenizer, shown = IncrementalDetokenizer(ByteTokenizer(), []), ""
    for index, byte in enumerate(data):
        shown += detokenizer.push(byte)
        assert len(shown) >= len(data[: index + 1].decode(errors="replace")) - 10
    assert shown == data.decode(errors="replace")


class NamingTokenizer(ByteTokenizer):
    """Shows the end of sequence by a name where special tokens are kept."""

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        named = {EOS_TOKEN_ID: b"<eos>"} if keep_special else {}
        pieces = (named.get(token, self.token_bytes(token)) for token in token_ids)
        return b"".join(pieces).decode(errors="replace")


def test_special_tokens_have_text_where_they_are_kept() -> None:
    said = [*b"a", EOS_TOKEN_ID, *"é".encode(), EOS_TOKEN_ID, EOS_TOKEN_ID]
    for keep, expected in ((False, "a|||é||"), (True, "a|<eos>||é|<eos>|<eos>")):
        detokenizer = IncrementalDetokenizer(NamingTokenizer(), [EOS_TOKEN_ID], keep_special=keep)
        assert "|".join(map(detokenizer.push, said)) == expected


class CountingTokenizer(ByteTokenizer):
    decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize("stream", [[97], [EOS_TOKEN_ID], [0x80], list("é".encode()), [0xE2, 0x82]])
def test_a_token_costs_the_same_however_long_the_output(stream: list[int]) -> None:
    tokenizer = CountingTokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, list(b"abc"))
    count = 4000
    for token in itertools.islice(itertools.cycle(stream), count):
        detokenizer.push(token)
    assert tokenizer.decoded < 60 * count


def naive_stop(text: str, stops: list[str], keep: bool) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if keep else min(found)], True
    return text, False


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 40), max_size=30),
    st.booleans(),
)
def test_stop_strings_match_a_naive_search_for_any_split(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    matcher = StopMatcher(stops, keep=keep)
    emitted, stopped = "", False
    for piece in cut(text.encode(), cuts):
        delta, stopped = matcher.feed(piece.decode())
        emitted += delta
        if stopped:
            break
    if not stopped:
        assert not any(stop in emitted for stop in stops)
        emitted += matcher.release()
    assert (emitted, stopped) == naive_stop(text, stops, keep)


@given(
    st.text("abc", max_size=20), st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4))
)
def test_stop_strings_completed_too_early_are_text(early: str, late: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted, stopped = matcher.feed(early, may_stop=False)
    assert not stopped
    delta, stopped = matcher.feed(late)
    emitted += delta + ("" if stopped else matcher.release())
    text = early + late
    ends = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > len(early)
    ]
    assert stopped == bool(ends)
    assert emitted == (text[: min(ends)[1]] if ends else text)


def test_text_that_cannot_begin_a_stop_string_is_emitted_at_once() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.feed("a<b</") == ("a<b", False)
    assert matcher.feed("p></s>rest") == ("</p>", True)
