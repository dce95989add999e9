"""Structured output: which tokens may come next in a request's output, as answered by its grammar's process.

The grammar library runs in other processes; see `splitserve.grammars.processes`. On the engine thread a matcher hands
over tokens and takes the masks that have arrived. It waits only in `wait` with a timeout.
"""

from __future__ import annotations

import select
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import count
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from engine.core.model_runner import ModelFacts, OutputMatcher, RowsFailedError, ScheduledSequence
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError, SplitserveError
from splitserve.grammars import child
from splitserve.grammars.forms import FIELD, summarize_error
from splitserve.grammars.processes import SLOW_CPU_S, Connection, GrammarProcesses, Vocabulary
from splitserve.models.hf_tokenizer import ByteTokenizer, HfTokenizer
from splitserve.models.tokenizer import Tokenizer
from splitserve.rpc.status import GRAMMAR_FAILED, request_error
from splitserve.runtime.call_thread import SharedCalls
from splitserve.v1 import generation_pb2

Mask = NDArray[np.int32]
"""int32 `[ceil(vocabulary / 32)]`, one bit per token, set if it is allowed; the lowest bit of word 0 is token 0."""

KEPT_MASKS = 64
"""Number of masks of `allowed_token_ids`, the last used ones, that are kept for later steps."""
KEPT_GRAMMARS = 16
"""Number of grammars, the last used ones, that stay compiled for later requests."""
MAX_GRAMMARS = 128
"""Maximum number of different grammars in use at a time; each has a process."""
PREAMBLE = 2
"""Number of frames that a new process sends before its answers: HELLO and COMPILED."""
NOTHING_LEFT = "grammar, allowed_token_ids and bad_words leave no token that the model can choose"
TOO_COSTLY = "its next token takes too much time or memory to find"


class GrammarFailedError(RowsFailedError):
    """Rows that cannot continue: a step of the grammar is too costly, or no token is left that the model could
    choose."""

    default_reason = GRAMMAR_FAILED


class GrammarMatcher(OutputMatcher):
    """The state of one output within its grammar. Used on the engine thread."""

    def __init__(self, grammar: CompiledGrammar, number: int) -> None:
        self.eos_token_ids = grammar.eos_token_ids
        self.complete = False
        self.error = ""
        self.mask: Mask = np.zeros(0, dtype=np.int32)
        self.number = number
        self.tokens: list[int] = []
        self.connection: Connection | None = None
        """The connection to the process that knows the output so far."""
        self._grammar = grammar

    @override
    def advance(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids
        self._grammar.ask(self, token_ids)

    @override
    def wait(self, timeout_s: float = 0.0) -> bool:
        return self._grammar.wait(self, timeout_s)

    @override
    def close(self) -> None:
        self._grammar.forget(self)

    def answer(self, status: int, answer: bytes) -> None:
        """Takes an answer of the grammar's process."""
        self.complete = status == child.COMPLETE
        if status == child.FAILED:
            self.error = f"{FIELD}: {summarize_error(answer.decode(errors='replace'))}"
        else:
            self.mask = np.frombuffer(answer, dtype=np.int32)


class CompiledGrammar:
    """A grammar and its process; made on the event loop, used on the engine thread.

    A process that ends fails only the output that it was computing: the others go on in a new process.
    """

    def __init__(
        self, processes: GrammarProcesses, grammar: generation_pb2.Grammar, connection: Connection
    ) -> None:
        """`connection`: to a process that has compiled the grammar."""
        self.eos_token_ids = connection.eos_token_ids
        self._processes, self._grammar = processes, grammar
        self._connection = connection
        self._preamble = 0
        """Number of the next frames that belong to the preamble, see PREAMBLE."""
        self._numbers = count()
        self._asked: OrderedDict[int, GrammarMatcher] = OrderedDict()
        """Matchers whose answers have not arrived, by number."""
        self._order: deque[int] = deque()
        """Numbers of outputs in the order of the outstanding answers, those of forgotten outputs included."""

    def __del__(self) -> None:
        self._connection.close()

    def matcher(self) -> GrammarMatcher:
        """A matcher for a new, empty output."""
        return GrammarMatcher(self, next(self._numbers))

    def ask(self, matcher: GrammarMatcher, token_ids: Sequence[int]) -> None:
        """Hands over tokens of an output."""
        self._asked[matcher.number] = matcher
        self._order.append(matcher.number)
        if matcher.connection is not self._connection:  # a new process, which knows nothing of this output
            matcher.connection, token_ids = self._connection, matcher.tokens
        tokens = np.fromiter(token_ids, dtype=np.uint32).tobytes()
        self._connection.send(child.ROW.pack(matcher.number, child.ASK) + tokens)

    def wait(self, matcher: GrammarMatcher, timeout_s: float) -> bool:
        """Takes the answers that arrive within `timeout_s` seconds; returns whether the matcher has its answer."""
        deadline_s = time.monotonic() + timeout_s
        while matcher.number in self._asked:
            for frame in self._connection.receive():
                self._take(frame)
            if self._connection.ended:
                self._renew()
            left_s = deadline_s - time.monotonic()
            if matcher.number not in self._asked or left_s <= 0:
                break
            poll = select.poll()
            poll.register(self._connection.channel, select.POLLIN)
            poll.poll(left_s * 1e3)
        return matcher.number not in self._asked

    def forget(self, matcher: GrammarMatcher) -> None:
        """The output has ended."""
        self._asked.pop(matcher.number, None)
        self._connection.send(child.ROW.pack(matcher.number, child.CLOSE))

    def _take(self, frame: bytes) -> None:
        if self._preamble:
            self._preamble -= 1
            return
        number, status = child.ROW.unpack_from(frame)
        self._order.popleft()
        if number in self._order:
            return  # the output was asked about again before this answer came
        if (matcher := self._asked.pop(number, None)) is not None:
            matcher.answer(status, frame[child.ROW.size :])

    def _renew(self) -> None:
        """Begins a new process for all outputs but the one that the ended process was computing: that output fails."""
        culprit = self._order[0] if self._order and not self._preamble else None
        waiting = list(self._asked.values())
        failed = waiting if self._preamble else [matcher for matcher in waiting if matcher.number == culprit]
        self._connection.close()
        self._asked.clear()
        self._order.clear()
        try:
            self._connection = self._processes.begin(self._grammar, SLOW_CPU_S)
            self._preamble = PREAMBLE
        except SplitserveError:
            failed = waiting
        for matcher in waiting:
            if matcher in failed:
                matcher.error = f"{FIELD}: {TOO_COSTLY}"
            else:
                self.ask(matcher, ())


class GrammarCompiler:
    """Compiles the grammars of requests for one model; keeps the KEPT_GRAMMARS used last. Used on the event loop."""

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts) -> None:
        self._tokenizer, self._facts = tokenizer, facts
        self._processes = GrammarProcesses(self._vocabulary)
        self._grammars: WeakValueDictionary[bytes, CompiledGrammar] = WeakValueDictionary()
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._compiling: SharedCalls[CompiledGrammar] = SharedCalls()

    def prepare(self) -> None:
        """Starts to load the vocabulary, so that the first grammar need not wait for it: 0.5 s for 50,000 tokens."""
        self._processes.start()

    async def compiled(
        self, sampling: generation_pb2.SamplingParams, tenant: object = None
    ) -> CompiledGrammar | None:
        """The compiled grammar of sampling parameters, None without one.

        Raises as `GrammarProcesses.compiled`, and ResourceExhaustedError (GRAMMARS_BUSY) beyond MAX_GRAMMARS in use.
        """
        if not sampling.HasField("grammar"):
            return None
        key = sampling.grammar.SerializeToString(deterministic=True)
        compiled = self._grammars.get(key)
        if compiled is None:
            compiled = await self._compiling.result(key, lambda: self._compile(sampling.grammar, tenant))
            self._grammars[key] = compiled
        self._kept[key] = compiled
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT_GRAMMARS:
            self._kept.popitem(last=False)
        return compiled

    def close(self) -> None:
        """Ends the processes."""
        self._kept.clear()
        self._processes.close()

    async def _compile(self, grammar: generation_pb2.Grammar, tenant: object) -> CompiledGrammar:
        if len(self._grammars) >= MAX_GRAMMARS:
            message = f"{MAX_GRAMMARS} different grammars are in use"
            raise ResourceExhaustedError(message, reason="GRAMMARS_BUSY", retry_after_s=1.0)
        return CompiledGrammar(self._processes, grammar, await self._processes.compiled(grammar, tenant))

    def _vocabulary(self) -> Vocabulary:
        """Raises InvalidArgumentError (GRAMMAR_NOT_SUPPORTED) for a tokenizer that the library cannot read."""
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, ByteTokenizer | HfTokenizer):
            message = f"{FIELD} is not supported for this model's tokenizer: its vocabulary is not known"
            raise InvalidArgumentError(message, reason="GRAMMAR_NOT_SUPPORTED", field=FIELD)
        definition = tokenizer.definition() if isinstance(tokenizer, HfTokenizer) else None
        ids = range(self._facts.vocabulary_size)
        tokens = [tokenizer.token_bytes(token_id).decode("latin-1") for token_id in ids]
        return Vocabulary(definition, tokens, sorted(self._facts.eos_token_ids))


@lru_cache(maxsize=KEPT_MASKS)
def mask_of(token_ids: tuple[int, ...]) -> Mask:
    """The mask that allows these tokens alone, without the words behind the last of them."""
    bits = np.zeros((max(token_ids) // 32 + 1) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _narrowed(mask: Mask | None, sequence: ScheduledSequence) -> Mask:
    """The mask of a sequence with a grammar, whose mask is given, or with `allowed_token_ids`. Bad sequences are ruled
    out even if nothing else is left."""
    sampling = sequence.sampling
    if sampling.allowed_token_ids:
        own = mask_of(sampling.allowed_token_ids)
        mask = own if mask is None else mask[: own.size] & own[: mask.size]
    assert mask is not None, "it has neither"
    if not sampling.bad_sequences:
        return mask
    end = sequence.num_computed + sequence.num_new
    words = mask.view(np.uint32).copy()
    for token in sampling.bad_tokens(sequence.token_ids, sequence.prompt_tokens, end):
        if token < 32 * words.size:
            words[token // 32] &= ~np.uint32(1 << token % 32)
    return words.view(np.int32)


def masks_of(batch: Sequence[ScheduledSequence], wait_s: float = 0.0) -> dict[int, Mask]:
    """The mask of each sequence that is sampled with a grammar or `allowed_token_ids`, by its index in the batch.

    Waits at most `wait_s` seconds for all of them together. Raises GrammarFailedError with the sequences that cannot
    continue, RowsFailedError (INTERNAL) with those whose grammar raised anything else.
    """
    masks: dict[int, Mask] = {}
    errors: dict[int, SplitserveError] = {}
    deadline_s = time.monotonic() + wait_s
    for index, sequence in enumerate(batch):
        matcher = sequence.matcher
        if not sequence.sample or (matcher is None and not sequence.sampling.allowed_token_ids):
            continue
        try:
            if matcher is not None:
                ready = matcher.wait(max(0.0, deadline_s - time.monotonic()))
                if why := matcher.error if ready else f"{FIELD}: {TOO_COSTLY}":
                    errors[index] = GrammarFailedError(why, (index,))
                    continue
            masks[index] = _narrowed(None if matcher is None else matcher.mask, sequence)
        except BaseException as error:
            errors[index] = request_error(error, sequence.request_id)
    if errors:
        # One error for all rows with the first reason. Rows with other reasons fail when the step is run again.
        first = next(iter(errors.values()))
        rows = tuple(index for index, error in errors.items() if error.reason == first.reason)
        kind = GrammarFailedError if first.reason == GRAMMAR_FAILED else RowsFailedError
        raise kind(first.message, rows, reason=first.reason)
    return masks


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
