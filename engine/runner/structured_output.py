"""Structured output with llguidance: one compiled grammar per request, one matcher per sequence.

Grammars are compiled on the grammar thread. A matcher lives with its sequence on the engine thread. It consumes the
output tokens in order, those of earlier attempts included, and computes the mask of allowed tokens for each step.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.core.types import ModelFacts, OutputMatcher, RowsFailedError, ScheduledSequence
from splitserve.errors import InvalidArgumentError, SplitserveError
from splitserve.generation.grammar import (
    FIELD,
    GrammarThread,
    check_grammar,
    compile_limits,
    llguidance_source,
    refused,
    summarize_error,
)
from splitserve.models.hf_tokenizer import ByteTokenizer, HfTokenizer
from splitserve.models.tokenizer import Tokenizer
from splitserve.request_guard import request_error
from splitserve.rpc.status import GRAMMAR_FAILED
from splitserve.runtime.calls.shared_calls import SharedCalls
from splitserve.v1 import generation_pb2

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


Mask = NDArray[np.int32]
"""int32 `[ceil(vocabulary / 32)]`, one bit per token, set if it is allowed; the lowest bit of word 0 is token 0."""

CACHED_GRAMMARS = 64
BITS = 32
MAX_MASK_THREADS = 8


class GrammarFailedError(RowsFailedError):
    """Rows whose grammar cannot continue: a step is too costly, or no token is left that the model could choose."""

    default_reason = GRAMMAR_FAILED


class GrammarMatcher:
    """The state of one output within its grammar; an `OutputMatcher`. Used on one thread."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        """Tokens that may be sampled to end the answer where the grammar is complete."""
        self._matcher = matcher
        self._consumed = 0

    def advance(self, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """Consumes the output tokens of a sequence that are new since the last call.

        `token_ids` is the whole sequence. Raises InvalidArgumentError (GRAMMAR_FAILED) for a token that the grammar
        does not allow.
        """
        new = list(token_ids[prompt_tokens + self._consumed :])
        self._consumed += len(new)
        if new and not self._matcher.consume_tokens(new):
            raise InvalidArgumentError(self.error, reason=GRAMMAR_FAILED, field=FIELD)

    def leading(self, token_ids: Sequence[int]) -> int:
        """How many of these next tokens the grammar allows without ending with them."""
        tried = self.after(())
        for count, token in enumerate(token_ids):
            raw = tried.raw
            if token in self.eos_token_ids or not raw.try_consume_tokens([token]) or raw.is_stopped():
                return count
        return len(token_ids)

    def after(self, token_ids: Sequence[int]) -> GrammarMatcher:
        """A matcher of the output with these next tokens, all of them `leading`."""
        copied = GrammarMatcher(self._matcher.deep_copy(), self.eos_token_ids)
        copied._consumed = self._consumed
        if token_ids:
            copied._matcher.consume_tokens(list(token_ids))
            copied._consumed += len(token_ids)
        return copied

    @property
    def complete(self) -> bool:
        """Whether the output is complete and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error() and self._matcher.is_accepting()

    @property
    def error(self) -> str:
        """Why the grammar cannot continue; empty while it can."""
        if not self._matcher.is_error():
            return ""
        return f"{FIELD}: {summarize_error(self._matcher.get_error() or self._matcher.stop_reason())}"

    def fill(self, mask: Mask) -> None:
        """Writes the mask of the next token."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    @property
    def raw(self) -> LLMatcher:
        """llguidance's own object."""
        return self._matcher


class CompiledGrammar:
    """A grammar compiled for one tokenizer; creates matchers in microseconds. Thread-safe."""

    def __init__(self, prototype: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._prototype = prototype
        self._eos_token_ids = eos_token_ids

    def matcher(self) -> GrammarMatcher:
        """A matcher for a new, empty output."""
        return GrammarMatcher(self._prototype.deep_copy(), self._eos_token_ids)


class GrammarCompiler:
    """Compiles grammars for one model on a separate thread; caches the CACHED_GRAMMARS used last."""

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts) -> None:
        self._source, self._facts = tokenizer, facts
        self._tokenizer: LLTokenizer | None = None
        self._thread = GrammarThread()
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._compiling: SharedCalls[CompiledGrammar] = SharedCalls()

    def prepare(self) -> None:
        """Starts to build the vocabulary that the first grammar would wait for, half a second for 50,000 tokens."""
        if self._tokenizer is None:
            self._thread.executor().submit(self._vocabulary)

    def prepare_here(self) -> None:
        """Builds it on this thread. Raises InvalidArgumentError as `compile`."""
        self._vocabulary()

    async def compiled(self, sampling: generation_pb2.SamplingParams) -> CompiledGrammar | None:
        """The compiled grammar of sampling parameters, None without one; see `compile`. Call it on the event loop."""
        if not sampling.HasField("grammar"):
            return None
        key = sampling.grammar.SerializeToString(deterministic=True)
        compiled = self._cache.get(key)
        if compiled is None:
            work = partial(self.compile, sampling.grammar)
            compiled = await self._compiling.result(key, partial(self._thread.run, work))
        self._cache[key] = compiled
        self._cache.move_to_end(key)
        if len(self._cache) > CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return compiled

    def compile(self, grammar: generation_pb2.Grammar) -> CompiledGrammar:
        """Checks the bounds of a grammar and compiles it; needs a thread with a stack of STACK_BYTES.

        Raises InvalidArgumentError, with the field, for a grammar that is malformed, not supported, too costly, or that
        no text of this model's tokens satisfies.
        """
        from llguidance import LLMatcher

        check_grammar(grammar)
        vocabulary = self._vocabulary()
        source = llguidance_source(grammar)
        prototype = LLMatcher(vocabulary, source, log_level=0, limits=compile_limits())
        if not prototype.is_error():
            # The first mask detects grammars that no token can begin, and fills the caches that all copies share.
            prototype.compute_bitmask()
        if prototype.is_error():
            raise refused(grammar, prototype.get_error() or prototype.stop_reason())
        return CompiledGrammar(prototype, frozenset(vocabulary.eos_tokens))

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = grammar_tokenizer(self._source, self._facts)
        return self._tokenizer


class MaskFiller:
    """Computes the masks of a step's rows that have a grammar, in parallel if there are several cores."""

    def __init__(self, vocabulary_size: int) -> None:
        self._words = -(-vocabulary_size // BITS)
        self._threads = min(len(os.sched_getaffinity(0)), MAX_MASK_THREADS)
        self._executor: LLExecutor | None = None

    def masks(self, batch: Sequence[ScheduledSequence]) -> dict[int, Mask]:
        """The mask of each sequence that is sampled with a grammar, by its index in the batch. Rows of drafts have none
        where they cannot continue.

        Raises GrammarFailedError with the sequences that cannot continue, RowsFailedError (INTERNAL) with those whose
        grammar raised anything else.
        """
        wanted = [
            (index, sequence.matcher)
            for index, sequence in enumerate(batch)
            if sequence.sample and sequence.matcher is not None
        ]
        if not wanted:
            return {}
        errors: dict[int, SplitserveError] = {}
        for place, (index, matcher) in enumerate(wanted):
            try:
                sequence = batch[index]
                if sequence.ahead:  # behind its sequence's own row, so the matcher has consumed the output
                    end = sequence.num_computed + 1
                    wanted[place] = index, matcher.after(sequence.token_ids[end - sequence.ahead : end])
                else:
                    matcher.advance(sequence.token_ids, sequence.prompt_tokens)
            except BaseException as error:
                errors[index] = request_error(error, batch[index].request_id)
        going = [(index, matcher) for index, matcher in wanted if index not in errors]
        masks = np.empty((len(going), self._words), dtype=np.int32)
        try:
            self._compute([matcher for _, matcher in going], masks)
        except BaseException:  # one of them: found by filling each by itself
            for row, (index, matcher) in enumerate(going):
                try:
                    matcher.fill(masks[row])
                except BaseException as error:
                    errors[index] = request_error(error, batch[index].request_id)
        for index, matcher in going:
            try:
                if index not in errors and (why := matcher.error):
                    errors[index] = GrammarFailedError(why, (index,))
            except BaseException as error:
                errors[index] = request_error(error, batch[index].request_id)
        if own := {index: error for index, error in errors.items() if not batch[index].ahead}:
            raise _rows_failed(own)
        return {index: masks[row] for row, (index, _) in enumerate(going) if index not in errors}

    def _compute(self, matchers: list[OutputMatcher], masks: Mask) -> None:
        if self._threads == 1 or len(matchers) < 2:
            for row, matcher in enumerate(matchers):
                matcher.fill(masks[row])
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        pairs = [(matcher.raw, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))


def _rows_failed(errors: Mapping[int, SplitserveError]) -> RowsFailedError:
    """The error of the rows with the first one's reason; the others come up when the step is run again."""
    first = next(iter(errors.values()))
    alike = tuple(index for index, error in errors.items() if error.reason == first.reason)
    if first.reason == GRAMMAR_FAILED:
        return GrammarFailedError(first.message, alike)
    return RowsFailedError(first.message, alike, reason=first.reason)


def allowed_tokens(mask: Mask, size: int, banned: Collection[int]) -> NDArray[np.bool_]:
    """Which of `size` tokens are allowed, bool `[size]`.

    Banned tokens are removed unless nothing else would remain: where a grammar is complete, the answer ends even before
    `min_tokens`.
    """
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size].astype(np.bool_)
    if bits.size < size:  # logits padded beyond the vocabulary
        bits = np.pad(bits, (0, size - bits.size))
    if banned:
        kept = bits.copy()
        kept[list(banned)] = False
        return kept if kept.any() else bits
    return bits


class _Bytes:
    """The vocabulary of `ByteTokenizer`, in the form that llguidance's `TokenizerWrapper` takes."""

    eos_token_id = ByteTokenizer.EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(ByteTokenizer.EOS)), b"<eos>")
    special_token_ids = (ByteTokenizer.EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def grammar_tokenizer(tokenizer: Tokenizer, facts: ModelFacts) -> LLTokenizer:
    """The vocabulary for llguidance; takes about half a second of CPU time for 50,000 tokens.

    Raises InvalidArgumentError for a tokenizer that llguidance cannot read.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    if isinstance(tokenizer, ByteTokenizer):
        return LLTokenizer(TokenizerWrapper(_Bytes()))
    try:
        if not isinstance(tokenizer, HfTokenizer):
            raise ValueError("its vocabulary is not known")
        eos = sorted(facts.eos_token_ids) or None
        return LLTokenizer(tokenizer.definition(), n_vocab=facts.vocabulary_size, eos_token=eos)
    except ValueError as error:
        message = f"{FIELD} is not supported for this model's tokenizer: {error}"
        raise InvalidArgumentError(message, reason="GRAMMAR_NOT_SUPPORTED", field=FIELD) from None
