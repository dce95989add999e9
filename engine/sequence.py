"""What the engine knows about one live request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine.detokenizer import IncrementalDetokenizer
from engine.grammar import GrammarMatcher
from engine.runner import ScheduledSequence
from engine.stop import StopMatcher
from engine.types import ChunkProgress, EngineRequest, FinishReason
from splitserve.tokenizer import Tokenizer


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"
    """Its KV is being written by a peer."""
    HELD = "held"
    """Ended, but its blocks may still be read by writes in flight."""
    ENDED = "ended"


class OutputText:
    """Text and text-bound end of one output: detokenizer and stop strings behind one another."""

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
        """Text that became certain with this token, and whether a stop string ended the answer."""
        self._count += 1
        delta = self._detokenizer.push(token_id)
        text, self._stopped = self._matcher.feed(delta, may_stop=self._count >= self._min_tokens)
        return text, self._stopped

    def flush(self) -> str:
        """What was held back until the end; nothing after a stop string."""
        if self._stopped:
            return ""
        text, _ = self._matcher.feed(self._detokenizer.finish(), may_stop=False)
        return text + self._matcher.release()


@dataclass(eq=False, slots=True)
class Sequence:
    """One request in the engine. Mutable; compared by identity; used on the engine thread only.

    `tokens` is prompt and output so far, KV exists for the first `num_computed` of them, and `block_ids`
    is the block table. Until the end `num_computed < len(tokens)` for all but reserved sequences.
    """

    request: EngineRequest
    arrival: int
    tokens: list[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    cached_tokens: int = 0
    """Leading tokens whose KV was found in the prefix cache at the latest start."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    cached_blocks: int = 0
    """Leading blocks that have been given to the prefix cache, or came from it."""
    bypasses: int = 0
    misfit: bool = False
    """Whether it did not fit the free blocks when it was last tried."""
    started: bool = False
    reported: int = 0
    """Leading tokens whose KV has been reported as final (`prefill_only`)."""
    reservation: int | None = None
    _text: OutputText | None = None
    _matcher: GrammarMatcher | None = None
    _ending: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)
        self.prompt_tokens = self.request.prompt_tokens
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
    def num_output(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def queue_key(self) -> tuple[int, int]:
        """Order of service: higher priority first, then earlier arrival."""
        return -self.request.priority, self.arrival

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that may not be sampled next: those that would end the answer before `min_tokens`.

        Under a grammar the end is one of its tokens; `ignore_eos` then holds it off as long as anything can follow.
        """
        stop, matcher = self.request.stop, self.matcher
        held_off = matcher.eos_token_ids if matcher is not None and stop.ignore_eos else frozenset()
        return self._ending | held_off if self.num_output < stop.min_tokens else held_off

    @property
    def matcher(self) -> GrammarMatcher | None:
        """Where the output stands in the request's grammar, if it has one; made when it is first needed."""
        if self._matcher is None and self.request.grammar is not None:
            self._matcher = self.request.grammar.matcher()
        return self._matcher

    def append(self, token_id: int, context_tokens: int) -> tuple[bool, FinishReason | None]:
        """Appends an output token. Returns whether it has text and why the answer ends with it, as far as tokens tell.

        A token that ends the answer has no text of its own. An answer that its grammar lets not go on ends at once.
        Raises InvalidArgumentError (GRAMMAR_FAILED) for a token that the grammar does not allow.
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
            matcher.follow(self.tokens, self.prompt_tokens)
            if matcher.complete:
                return True, FinishReason.STOP
        if self.num_output >= stop.max_tokens or len(self.tokens) >= context_tokens:
            return True, FinishReason.LENGTH
        return True, None

    def text(self, tokenizer: Tokenizer) -> OutputText:
        """The text side of the output, made when it is first needed; may lag behind `tokens`."""
        if self._text is None:
            self._text = OutputText(tokenizer, self.request)
        return self._text

    def scheduled(self, num_new: int) -> ScheduledSequence:
        """This sequence's share of a step that computes `num_new` tokens of it."""
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
        )

    def take_progress(self, block_size: int) -> ChunkProgress:
        """The KV that became final since the last call."""
        start, self.reported = self.reported, self.num_computed
        blocks = self.block_ids[: -(-self.num_computed // block_size)]
        return ChunkProgress(self.request_id, start, self.num_computed, blocks, self.cached_tokens)
