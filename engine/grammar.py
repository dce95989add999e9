"""Holds answers to a grammar with llguidance: one compiled grammar a request, one matcher a sequence.

A compiled grammar is made on the grammar thread. A matcher lives with its sequence on the engine thread, follows the
output tokens in order, those of earlier attempts included, and says for each step which tokens may come next.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.grammar_tokenizer import grammar_tokenizer
from engine.runner import ModelFacts, RowsFailedError, ScheduledSequence
from splitserve.errors import InvalidArgumentError
from splitserve.grammar_thread import GrammarThread
from splitserve.grammars import (
    FIELD,
    check_grammar,
    compile_limits,
    library_words,
    llguidance_source,
    refused,
)
from splitserve.rpc_errors import GRAMMAR_FAILED
from splitserve.tokenizer import Tokenizer
from splitserve.v1 import generation_pb2

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

Mask = NDArray[np.int32]
"""One bit a token of the vocabulary, set where it may be chosen; the lowest bit of word 0 is token 0."""

CACHED_GRAMMARS = 64
BITS = 32
MAX_MASK_THREADS = 8


class GrammarFailedError(RowsFailedError):
    """Rows whose grammar cannot go on: too costly a step, or no token left that the model could choose."""

    default_reason = GRAMMAR_FAILED


class GrammarMatcher:
    """Where one output stands in its grammar. Used on one thread."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        """Tokens that may be chosen where the grammar is complete, to end the answer."""
        self._matcher = matcher
        self._followed = 0

    def follow(self, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """Takes the output tokens of a sequence that are new since the last call.

        Raises InvalidArgumentError (GRAMMAR_FAILED) for one that the grammar does not allow there.
        """
        new = list(token_ids[prompt_tokens + self._followed :])
        self._followed += len(new)
        if new and not self._matcher.consume_tokens(new):
            raise InvalidArgumentError(self.trouble, reason=GRAMMAR_FAILED, field=FIELD)

    @property
    def complete(self) -> bool:
        """Whether the output is whole and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error() and self._matcher.is_accepting()

    @property
    def trouble(self) -> str:
        """Why the grammar cannot go on; empty while it can."""
        if not self._matcher.is_error():
            return ""
        return f"{FIELD}: {library_words(self._matcher.get_error() or self._matcher.stop_reason())}"

    def fill(self, mask: Mask) -> None:
        """Writes the mask of the next token."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    @property
    def raw(self) -> LLMatcher:
        """The library's own object."""
        return self._matcher


class CompiledGrammar:
    """A grammar for one tokenizer; makes matchers in microseconds. Thread-safe."""

    def __init__(self, prototype: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._prototype = prototype
        self._eos_token_ids = eos_token_ids

    def matcher(self) -> GrammarMatcher:
        """A matcher for an output that is still empty."""
        return GrammarMatcher(self._prototype.deep_copy(), self._eos_token_ids)


class GrammarCompiler:
    """Compiles grammars for one model, on a thread of its own; keeps the latest CACHED_GRAMMARS."""

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts) -> None:
        self._source, self._facts = tokenizer, facts
        self._tokenizer: LLTokenizer | None = None
        self._thread = GrammarThread()
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()

    def prepare(self) -> None:
        """Begins what the first grammar would have to wait for, about half a second for 50,000 tokens."""
        self._thread.started().submit(self._vocabulary)

    async def compiled(self, sampling: generation_pb2.SamplingParams) -> CompiledGrammar | None:
        """The grammar of sampling parameters, None without one; see `compile`. Call it on the event loop."""
        if not sampling.HasField("grammar"):
            return None
        key = sampling.grammar.SerializeToString(deterministic=True)
        found = self._cache.get(key)
        if found is None:
            found = await self._thread.run(lambda: self.compile(sampling.grammar))
        self._cache[key] = found
        self._cache.move_to_end(key)
        if len(self._cache) > CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return found

    def compile(self, grammar: generation_pb2.Grammar) -> CompiledGrammar:
        """Checks bounds and compiles; needs a thread with a stack of STACK_BYTES.

        Raises InvalidArgumentError naming the field for one that is malformed, not supported, too costly, or
        that no text of this model's tokens satisfies.
        """
        from llguidance import LLMatcher

        check_grammar(grammar)
        vocabulary = self._vocabulary()
        source = llguidance_source(grammar)
        prototype = LLMatcher(vocabulary, source, log_level=0, limits=compile_limits())
        if not prototype.is_error():
            # The first mask finds what no token can begin, and fills the caches that all copies share.
            prototype.compute_bitmask()
        if prototype.is_error():
            raise refused(grammar, prototype.get_error() or prototype.stop_reason())
        return CompiledGrammar(prototype, frozenset(vocabulary.eos_tokens))

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = grammar_tokenizer(self._source, self._facts)
        return self._tokenizer


class MaskFiller:
    """Computes the masks of a step's constrained rows, several at a time where there are cores for it."""

    def __init__(self, vocabulary_size: int) -> None:
        self._words = -(-vocabulary_size // BITS)
        self._threads = min(len(os.sched_getaffinity(0)), MAX_MASK_THREADS)
        self._executor: LLExecutor | None = None

    def masks(self, batch: Sequence[ScheduledSequence]) -> dict[int, Mask]:
        """The mask of each sequence that is sampled under a grammar, by its index in the batch.

        Raises GrammarFailedError naming the sequences that cannot go on.
        """
        wanted = [
            (index, sequence.matcher)
            for index, sequence in enumerate(batch)
            if sequence.sample and sequence.matcher is not None
        ]
        if not wanted:
            return {}
        troubles: dict[int, str] = {}
        for index, matcher in wanted:
            try:
                matcher.follow(batch[index].token_ids, batch[index].prompt_tokens)
            except InvalidArgumentError as error:
                troubles[index] = error.message
        masks = np.empty((len(wanted), self._words), dtype=np.int32)
        self._compute([matcher for _, matcher in wanted], masks)
        troubles |= {index: matcher.trouble for index, matcher in wanted if matcher.trouble}
        if troubles:
            raise GrammarFailedError(next(iter(troubles.values())), tuple(troubles))
        return {index: masks[row] for row, (index, _) in enumerate(wanted)}

    def _compute(self, matchers: list[GrammarMatcher], masks: Mask) -> None:
        if self._threads == 1 or len(matchers) == 1:
            for row, matcher in enumerate(matchers):
                matcher.fill(masks[row])
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        pairs = [(matcher.raw, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))


def allowed_tokens(mask: Mask, size: int, banned: Collection[int]) -> NDArray[np.bool_]:
    """Which of `size` tokens may be chosen, bool `[size]`.

    Banned tokens are left out unless nothing else would remain: where a grammar is complete, its end comes even
    before `min_tokens`.
    """
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size].astype(np.bool_)
    if bits.size < size:  # logits padded beyond the vocabulary
        bits = np.pad(bits, (0, size - bits.size))
    if banned:
        kept = bits.copy()
        kept[list(banned)] = False
        return kept if kept.any() else bits
    return bits
