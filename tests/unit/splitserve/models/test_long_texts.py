"""A long text is tokenized, and tokens are decoded, while other threads run; the number of tokens is bounded first."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from splitserve.models.hf_tokenizer import PIECE_CHARACTERS, SHORT_CHARACTERS, HfTokenizer
from splitserve.models.tokenizer import TooManyTokensError, Turn
from splitserve.models.tokenizer_files import DEFAULT, TokenizerDefinition

SHARE = 0.5
"""Of the time that a call takes, the most that another thread may wait at once. It was all of it."""
TRIES = 5


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    """Bytes, and a few pairs of letters that are merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "etaoin" for b in "etaoin"]
    entries = [*alphabet, *(a + b for a, b in pairs)]
    rust = Tokenizer(models.BPE(vocab={entry: number for number, entry in enumerate(entries)}, merges=pairs))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return HfTokenizer(TokenizerDefinition(rust, {}, {DEFAULT: template}))


def text_of(words: int) -> str:
    pick = random.Random(1)
    return " ".join("".join(pick.choices("etaoinshrd", k=pick.randint(2, 9))) for _ in range(words))


def test_long_texts_have_the_same_tokens(tokenizer: HfTokenizer) -> None:
    text = text_of(SHORT_CHARACTERS)
    words = [
        tokenizer.encode(word if not place else f" {word}") for place, word in enumerate(text.split(" "))
    ]
    assert tokenizer.encode(text) == [token for word in words for token in word]
    assert tokenizer.render_chat([Turn("user", text)]) == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("words", [20, 2000])
def test_too_many_tokens_are_counted_and_not_returned(tokenizer: HfTokenizer, words: int) -> None:
    count = len(tokenizer.encode(text_of(words)))
    assert len(tokenizer.encode(text_of(words), count)) == count
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.render_chat([Turn("user", text_of(words))], (), count - 1)
    assert caught.value.count == count


class Counted:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, rust: Tokenizer) -> None:
        self._rust, self.characters = rust, 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._rust.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("begins", ["", "<sep> " * 20_000])
@pytest.mark.parametrize(
    "text", ["0123456789" * 50_000, "et" * 250_000, "\u00e9" * 500_000, "nothing new " * 50_000]
)
@pytest.mark.parametrize("kind", ["bytes", "words", "pieces"])
def test_of_a_text_that_is_too_long_only_the_beginning_is_encoded(
    tokenizer: HfTokenizer, kind: str, text: str, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rust = Tokenizer.from_str(tokenizer.definition())
    if kind == "words":
        rust = Tokenizer(models.WordPiece({"[UNK]": 0, "nothing": 1}, max_input_chars_per_word=10**6))
        rust.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    elif kind == "pieces":
        rust = Tokenizer(
            models.Unigram([("?", -9.0), *((letter, -2.0) for letter in "etnohigw 0123456789é")], 0, True)
        )
    rust.add_tokens([AddedToken("<sep>", rstrip=True)])
    made = HfTokenizer(TokenizerDefinition(rust, {}, {}))
    counted = Counted(rust)
    monkeypatch.setattr(made, "_rust", counted)
    with pytest.raises(TooManyTokensError) as caught:
        made.encode(begins + text, 50_000)
    assert caught.value.count == 50_001
    assert counted.characters < len(begins) + 2 * 2 * 50_000 + PIECE_CHARACTERS


def longest_wait(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that the work takes on another thread, and the longest of them that this thread did not run."""
    thread = threading.Thread(target=work)
    began_s = then_s = time.perf_counter()
    thread.start()
    longest_s = 0.0
    while thread.is_alive():
        time.sleep(0.001)
        now_s = time.perf_counter()
        longest_s, then_s = max(longest_s, now_s - then_s), now_s
    thread.join()
    return time.perf_counter() - began_s, longest_s


def test_other_threads_run_meanwhile(tokenizer: HfTokenizer) -> None:
    text = text_of(100_000)
    tokens = tokenizer.encode(text)
    for work in (lambda: tokenizer.encode(text, len(tokens) - 1), lambda: tokenizer.decode(tokens)):
        shares = []
        # What the work does it does again; what the machine did beside it, it does not.
        for _ in range(TRIES):
            took_s, waited_s = longest_wait(lambda work=work: _refused(work))  # type: ignore[misc]
            shares.append(waited_s / took_s)
            if shares[-1] < SHARE:
                break
        assert min(shares) < SHARE, shares


def _refused(work: Callable[[], object]) -> None:
    try:
        work()
    except TooManyTokensError:
        return
