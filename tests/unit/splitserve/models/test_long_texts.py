"""A long text is tokenized, and tokens are decoded, while other threads run; the number of tokens is bounded first."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from splitserve.models.hf_tokenizer import SHORT_CHARACTERS, HfTokenizer
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


@pytest.mark.parametrize(
    "text", ["0123456789" * 300, "et" * 3000, "\u00e9" * 3000, "<sep>" * 700, "<sep>  " * 700]
)
@pytest.mark.parametrize("strips", [False, True])
def test_texts_that_are_surely_too_long_are_not_encoded(
    tokenizer: HfTokenizer, text: str, strips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused exactly where the number of tokens is above the bound, whatever the text is made of."""
    rust = Tokenizer.from_str(tokenizer.definition())
    rust.add_tokens([AddedToken("<sep>", rstrip=strips)])
    made = HfTokenizer(TokenizerDefinition(rust, {}, {}))
    count = len(made.encode(text))
    assert len(made.encode(text, count)) == count
    with pytest.raises(TooManyTokensError) as caught:
        made.encode(text, count - 1)
    assert caught.value.count <= count
    if not strips:
        monkeypatch.setattr(made, "_rust", None)
        with pytest.raises(TooManyTokensError):
            made.encode(text, len(text) // 6 - 1)


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
