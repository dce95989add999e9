"""A worker's tokenizer and its vocabulary for grammars: loaded, or kept by the process that this one was forked from.

Half of a forked worker's own start was that, for 50,000 tokens.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engine.core.types import ModelFacts
from engine.runner.structured_output import GrammarCompiler
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import FileStamp, ModelSource, file_stamps, resolve_model
from splitserve.models.tokenizer import Tokenizer
from splitserve.models.tokenizer_files import is_plain


class _Key(NamedTuple):
    """What a vocabulary depends on."""

    source: str
    files: tuple[FileStamp, ...]
    size: int
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, source: ModelSource, facts: ModelFacts) -> _Key:
        stamps = file_stamps(source)
        return cls(source.tokenizer_source, stamps, facts.vocabulary_size, facts.eos_token_ids)


class _Kept(NamedTuple):
    key: _Key
    tokenizer: Tokenizer
    grammars: GrammarCompiler


_kept: list[_Kept] = []


def keep_vocabulary(model: str, facts: ModelFacts) -> None:
    """Loads a local model's tokenizer, and builds its vocabulary for grammars, for processes that are forked from this
    one later. Leaves no thread behind. What cannot be loaded is left to the workers, who say why; and so is what has to
    be converted first, which may take longer than anybody waits for this process."""
    try:
        source = resolve_model(model)
        if not is_plain(Path(source.path)):
            return
        key = _Key.of(source, facts)
        tokenizer = load_tokenizer(source.tokenizer_source)
        grammars = GrammarCompiler(tokenizer, facts)
        grammars.prepare_here()
    except Exception:  # of whatever kind: libraries raise many, and this process has to live
        return
    _kept[:] = [_Kept(key, tokenizer, grammars)]


def load_vocabulary(tokenizer_source: str, facts: ModelFacts) -> tuple[Tokenizer, GrammarCompiler]:
    """The tokenizer, and the grammars of its vocabulary: those that are kept, if they are these, or new ones, of which
    the vocabulary is not built yet. Kept ones are to be used once: they are of one engine then. Raises as
    `load_tokenizer`."""
    if _kept:
        with suppress(OSError):  # files that come and go: loading says which
            if _kept[0].key == _Key.of(resolve_model(tokenizer_source), facts):
                kept = _kept.pop()
                return kept.tokenizer, kept.grammars
    tokenizer = load_tokenizer(tokenizer_source)
    return tokenizer, GrammarCompiler(tokenizer, facts)
