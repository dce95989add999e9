"""The engine's state of one live request."""

from __future__ import annotations

import enum
import math
from collections import abc
from dataclasses import dataclass, field

from engine.core.detokenizer import IncrementalDetokenizer, StopMatcher
from engine.core.precedence import Precedence
from engine.core.types import ChunkProgress, EngineRequest, FinishReason, OutputMatcher, ScheduledSequence
from engine.pacing.token_clock import StreamPace
from splitserve.errors import ResourceExhaustedError
from splitserve.generation.kv_blocks import blocks_for
from splitserve.models.tokenizer import Tokenizer

READS_A_PREEMPTION = 2
"""The second is for one that did not fit after the first, and has lost what was read."""


class SequenceStatus(enum.Enum):
    """The states of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"
    """Its blocks are allocated, and a peer writes its KV."""
    HELD = "held"
    """Ended, but writes in flight may still read its blocks."""
    ENDED = "ended"


class OutputText:
    """The text of one output: detokenizes its tokens and looks for stop strings."""

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest) -> None:
        prompt_tokens = request.prompt_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.token_ids[:prompt_tokens])
        self._matcher = StopMatcher(request.stop.stop_strings)
        self._min_tokens = request.stop.min_tokens
        self._count = 0
        self._stopped = False
        for token_id in request.token_ids[prompt_tokens:]:
            self.push(token_id)

    def push(self, token_id: int) -> tuple[str, bool]:
        """Takes the next token; returns the text that it completed, and whether a stop string ended the answer."""
        self._count += 1
        delta = self._detokenizer.push(token_id)
        text, self._stopped = self._matcher.feed(delta, may_stop=self._count >= self._min_tokens)
        return text, self._stopped

    def flush(self) -> str:
        """The text that was held back, at the end of the output; empty after a stop string."""
        if self._stopped:
            return ""
        text, _ = self._matcher.feed(self._detokenizer.finish(), may_stop=False)
        return text + self._matcher.release()


@dataclass(eq=False, slots=True)
class Sequence:
    """One request in the engine. Mutable; compared by identity; used on the engine thread only.

    `tokens` is prompt and output so far. KV exists for the first `num_computed` of them, and `block_ids` is the block
    table. While it lives `num_computed < len(tokens)`, unless it is reserved.
    """

    request: EngineRequest
    arrival: int
    place: int = field(init=False)
    """Its place in the order of arrival; see `engine.core.precedence`."""
    tokens: list[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    cached_tokens: int = 0
    """Leading tokens whose KV was found in the prefix cache when it last started."""
    first_due_s: float = field(init=False)
    """When its prompt is due, on the engine's clock: that of its targets, or of whom it traded places with."""
    expected_cached: int = 0
    """Leading tokens whose KV was in the prefix cache when it was last looked for while it waited."""
    block_ids: list[int] = field(default_factory=list)
    table_id: int = 0
    """Names its block table; see `ScheduledSequence`. 0 while it has none."""
    block_hashes: list[bytes] = field(default_factory=list)
    cached_blocks: int = 0
    """Leading blocks that are in the prefix cache, put there or found there."""
    bypassed: int = 0
    """How often a later request was served first because this one did not fit."""
    misfit: bool = False
    """Whether it did not fit into the free blocks when it was last tried."""
    reads_left: int = 0
    """How often what lower tiers have of its KV may still be read since it was preempted."""
    refusal: ResourceExhaustedError | None = None
    """Why lower tiers do not read what a peer wants of it."""
    started: bool = False
    """Whether it has been in a step."""
    reported: int = 0
    """Leading tokens whose KV has been reported as final (`prefill_only`)."""
    reservation: int | None = None
    pace: StreamPace | None = None
    """The times of its tokens, if it has a target for them."""
    _text: OutputText | None = None
    _matcher: OutputMatcher | None = None
    _ending: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.arrival
        self.tokens = list(self.request.token_ids)
        self.prompt_tokens = self.request.prompt_tokens
        targets = self.request.targets
        self.first_due_s = math.inf if targets is None else targets.first_due_s
        stop = self.request.stop
        self._ending = stop.stop_token_ids if stop.ignore_eos else stop.stop_token_ids | stop.eos_token_ids

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def prefix_tokens(self) -> int:
        """Leading tokens that its prompt no longer takes: computed ones, or before it starts those that are expected to
        be cached."""
        return self.expected_cached if self.status is SequenceStatus.WAITING else self.num_computed

    @property
    def uncached_tokens(self) -> int:
        """Tokens that its prompt still takes, without the cached prefix that it has or is expected to have."""
        return len(self.tokens) - self.prefix_tokens

    @property
    def num_output(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def due_after_s(self) -> float:
        """The target for its first token, in seconds; infinity without one."""
        targets = self.request.targets
        return math.inf if targets is None or targets.ttft_s is None else targets.ttft_s

    @property
    def has_own_output(self) -> bool:
        """Whether it has output of this attempt, which its client has or gets."""
        return len(self.tokens) > len(self.request.token_ids)

    @property
    def precedence(self) -> Precedence:
        """Where it stands among other requests."""
        return self.request.precedence

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that must not be sampled next: those that would end the answer before `min_tokens`.

        With a grammar, end-of-sequence tokens are part of it; `ignore_eos` bans them as long as anything else is
        allowed.
        """
        stop, matcher = self.request.stop, self.matcher
        ignored = matcher.eos_token_ids if matcher is not None and stop.ignore_eos else frozenset()
        return self._ending | ignored if self.num_output < stop.min_tokens else ignored

    @property
    def matcher(self) -> OutputMatcher | None:
        """The output's state within the request's grammar, if it has one; created when first needed."""
        if self._matcher is None and self.request.grammar is not None:
            self._matcher = self.request.grammar.matcher()
        return self._matcher

    def append(self, token_id: int, context_tokens: int) -> tuple[bool, FinishReason | None]:
        """Appends an output token. Returns whether its text is part of the answer, and the finish reason, if any.

        An end-of-sequence or stop token adds no text. An answer ends at once when its grammar is complete. Stop strings
        are not considered here; see `OutputText`. Raises InvalidArgumentError (GRAMMAR_FAILED) for a token that the
        grammar does not allow.
        """
        stop = self.request.stop
        may_stop = self.num_output >= stop.min_tokens
        self.tokens.append(token_id)
        if may_stop and token_id in self._ending:
            return False, FinishReason.STOP
        matcher = self.matcher
        if matcher is not None:
            if token_id in matcher.eos_token_ids:
                return False, FinishReason.STOP
            matcher.advance(self.tokens, self.prompt_tokens)
            if matcher.complete:
                return True, FinishReason.STOP
        if self.num_output >= stop.max_tokens or len(self.tokens) >= context_tokens:
            return True, FinishReason.LENGTH
        return True, None

    def further_tokens(self, sequence_tokens: int) -> int:
        """Most tokens that may be appended, to at most `sequence_tokens`, while `banned_token_ids` stays what it is; 0
        where the answer goes on elsewhere."""
        stop = self.request.stop
        if self.request.prefill_only:
            return 0
        most = min(stop.max_tokens - self.num_output, sequence_tokens - len(self.tokens))
        return min(most, stop.min_tokens - self.num_output) if self.num_output < stop.min_tokens else most

    def leading(self, token_ids: abc.Sequence[int]) -> int:
        """How many of these guessed tokens may follow the present ones without ending the answer."""
        count = next(
            (place for place, token in enumerate(token_ids) if token in self._ending), len(token_ids)
        )
        matcher = self.matcher
        if matcher is None or not count:
            return count
        matcher.advance(self.tokens, self.prompt_tokens)
        return matcher.leading(token_ids[:count])

    def text(self, tokenizer: Tokenizer) -> OutputText:
        """The output's text, created when first needed; it may lag behind `tokens`."""
        if self._text is None:
            self._text = OutputText(tokenizer, self.request)
        return self._text

    def scheduled(self, num_new: int, draft: tuple[int, ...] = ()) -> ScheduledSequence:
        """This sequence's part of a step that computes its next `num_new` tokens, and checks a `draft` after them."""
        return ScheduledSequence(
            request_id=self.request_id,
            token_ids=self.tokens,
            prompt_tokens=self.prompt_tokens,
            num_computed=self.num_computed,
            num_new=num_new,
            block_ids=self.block_ids,
            sample=self.remaining == num_new,
            sampling=self.request.sampling,
            banned_token_ids=self.banned_token_ids,
            matcher=self.matcher,
            table_id=self.table_id,
            draft=draft,
        )

    def take_progress(self, block_size: int) -> ChunkProgress:
        """The KV that became final since the last call."""
        start, self.reported = self.reported, self.num_computed
        blocks = self.block_ids[: blocks_for(self.num_computed, block_size)]
        return ChunkProgress(self.request_id, start, self.num_computed, blocks, self.cached_tokens)
