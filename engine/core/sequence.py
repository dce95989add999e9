"""The engine's state of one live request: its tokens and their text, its blocks, its place."""

from __future__ import annotations

import enum
from collections import abc
from dataclasses import dataclass, field
from functools import partial

from engine.core.engine import ChunkProgress, EngineRequest, FinishReason
from engine.core.model_runner import OutputMatcher, PromptLogprobs, ScheduledSequence
from engine.scheduling.waiting_queue import Precedence
from splitserve.errors import InvalidArgumentError
from splitserve.generation.kv_blocks import blocks_for
from splitserve.models.tokenizer import Tokenizer
from splitserve.rpc.status import GRAMMAR_FAILED

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 16
# A window of whole characters is cut beyond this length. With every new token all tokens of the window are decoded
# again, from tables that the model has evicted from the processor's caches; a cut costs one more decode.
_CUT_AT_TOKENS = 4
# A UTF-8 character has at most 4 bytes, so at most 4 byte tokens. After twice as many without a whole character the
# bytes are not UTF-8, or the model really writes U+FFFD.
_MAX_PENDING_TOKENS = 8
_MAX_PARTIAL_CHARS = 3


class IncrementalDetokenizer:
    """The text of an output, token by token.

    Decodes a short window of tokens. It begins with tokens whose text was emitted already, because a tokenizer may drop
    a leading space or join bytes across tokens; text beyond the emitted part is new. The window is cut at character
    boundaries, so a token costs amortized O(1). The pieces of text depend on the tokens only: another process that
    gets the same tokens returns the same pieces.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: abc.Sequence[int], *, keep_special: bool = False
    ) -> None:
        """`keep_special`: special tokens have their names as text, and not none."""
        self._decode = partial(tokenizer.decode, keep_special=True) if keep_special else tokenizer.decode
        self._window = self._visible_tail(prompt)
        self._text = self._decode(self._window)
        self._emitted = len(self._text)
        self._boundary = len(self._window)

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that it completes, which may be empty."""
        self._window.append(token_id)
        before, self._text = self._text, self._decode(self._window)
        if self._text.endswith(REPLACEMENT):
            return self._push_partial()
        delta = self._text[self._emitted :]
        self._emitted = len(self._text)
        if self._text == before and (self._text or len(self._window) > _MAX_WINDOW_TOKENS):
            self._window.pop()  # a special token has no text; many of them must not fill the window
        previous, self._boundary = self._boundary, len(self._window)
        if len(self._window) > _CUT_AT_TOKENS:
            self._cut(previous)
        return delta

    def finish(self) -> str:
        """The rest of the text; an incomplete character shows as U+FFFD."""
        rest = self._text[self._emitted :]
        self._emitted = len(self._text)
        return rest

    def _visible_tail(self, prompt: abc.Sequence[int]) -> list[int]:
        count = _CONTEXT_TOKENS
        while True:
            tail = list(prompt[-count:])
            if count >= len(prompt) or self._decode(tail):
                return tail
            count *= 4

    def _push_partial(self) -> str:
        if len(self._window) - self._boundary < _MAX_PENDING_TOKENS:
            return ""
        # Not an incomplete character: everything but the last few bytes is final.
        run = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        end = len(self._text) - min(run, _MAX_PARTIAL_CHARS)
        delta = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if len(self._window) > 2 * _MAX_WINDOW_TOKENS:
            self._cut(len(self._window) - _MAX_WINDOW_TOKENS)
        return delta

    def _cut(self, start: int) -> None:
        """Drops the window's first tokens if the rest still decodes to the text that is not emitted yet.

        UTF-8 is self-synchronizing: even a cut inside a character changes only the text near the cut.
        """
        window = self._window[start:]
        text = self._decode(window)
        pending = self._text[self._emitted :]
        if not text or not text.endswith(pending):
            return
        self._window, self._text = window, text
        self._emitted = len(text) - len(pending)
        self._boundary = max(self._boundary - start, 0)


class StopMatcher:
    """Finds stop strings in text that arrives in pieces; holds back text that may be the beginning of a stop string.

    The result does not depend on how the text is split into pieces: the match that ends first wins, and of several
    that end at the same character the longest. With `keep` the text ends behind the match, not before it.
    """

    def __init__(self, stop_strings: abc.Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stop for stop in stop_strings if stop)
        self._keep = keep
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Takes new text; returns what may be emitted and whether a stop string ended the answer.

        Without `may_stop`, stop strings that are completed by this piece are ordinary text.
        """
        if not self._stops:
            return text, False
        seen, buffer = len(self._held), self._held + text
        if may_stop:
            match = self._first_match(buffer, seen)
            if match is not None:
                self._held = ""
                return buffer[:match], True
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def release(self) -> str:
        """The text held back, for an answer that ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, seen: int) -> int | None:
        # A match that ends within the first `seen` characters was skipped on purpose (`may_stop`).
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[0 if self._keep else 1]

    def _possible_start(self, buffer: str) -> int:
        """The start of the longest suffix of `buffer` that is a prefix of a stop string; its end if there is none."""
        best = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), best)
            while start != -1:
                if stop.startswith(buffer[start:]):
                    best = start
                    break
                start = buffer.find(stop[0], start + 1, best)
        return best


class SequenceStatus(enum.Enum):
    """The states of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"
    """Its blocks are allocated, and a peer writes its KV."""
    HELD = "held"
    """It has ended, but writes in flight may still read its blocks."""
    ENDED = "ended"


class OutputText:
    """The text of one output: detokenizes its tokens and looks for stop strings."""

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest) -> None:
        prompt_tokens = request.prompt_tokens
        prompt, keep_special = request.token_ids[:prompt_tokens], request.stop.keep_special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, keep_special=keep_special)
        self._matcher = StopMatcher(request.stop.stop_strings, keep=request.stop.keep_stop)
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
    """Its place in the order of arrival; see `engine.scheduling.waiting_queue`."""
    tokens: list[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    cached_tokens: int = 0
    """Leading tokens whose KV was found in the prefix cache when it last started."""
    due_s: float = field(init=False)
    """When its next token is due, on the engine's clock, while it waits: `first_due_s` of its request."""
    block_ids: list[int] = field(default_factory=list)
    table_id: int = 0
    """Identifies its block table; see `ScheduledSequence`. 0 while it has none."""
    block_hashes: list[bytes] = field(default_factory=list)
    cached_blocks: int = 0
    """Leading blocks that are in the prefix cache, put there or found there."""
    bypassed: int = 0
    """Number of later requests that were served first because this one did not fit."""
    misfit: bool = False
    """Whether it did not fit into the free blocks when it was last tried."""
    started: bool = False
    """Whether it has been in a step."""
    reported: int = 0
    """Leading tokens whose KV has been reported as final (`prefill_only`)."""
    reservation: int | None = None
    prompt_logprobs: PromptLogprobs | None = field(init=False)
    """Those known so far; None: not wanted, or sent."""
    _text: OutputText | None = None
    _matcher: OutputMatcher | None = None
    _ending: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.arrival
        self.tokens = list(self.request.token_ids)
        self.prompt_tokens = self.request.prompt_tokens
        self.prompt_logprobs = PromptLogprobs(self.request.token_ids) if self.request.scores_prompt else None
        self.due_s = self.request.first_due_s
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
    def reusable_tokens(self) -> int:
        """Leading tokens that may be cached when it is computed here: all but those whose logits are needed."""
        return len(self.tokens) - 1 if self.prompt_logprobs is None else 0

    @property
    def num_output(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def precedence(self) -> Precedence:
        """Class, tenant and priority, which order it among other requests."""
        return self.request.precedence

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that must not be sampled next: those that would end the answer before `min_tokens`, or complete a bad
        sequence.

        With a grammar, end-of-sequence tokens are part of it; `ignore_eos` bans them as long as anything else is
        allowed.
        """
        stop, matcher = self.request.stop, self.matcher
        ignored = matcher.eos_token_ids if matcher is not None and stop.ignore_eos else frozenset()
        banned = self._ending | ignored if self.num_output < stop.min_tokens else ignored
        sampling = self.request.sampling
        if not sampling.bad_sequences:
            return banned
        return banned | sampling.bad_tokens(self.tokens, self.prompt_tokens, len(self.tokens))

    @property
    def matcher(self) -> OutputMatcher | None:
        """The output's state within the request's grammar, if it has one; created when first needed."""
        if self._matcher is None and self.request.grammar is not None:
            self._matcher = self.request.grammar.matcher()
            self._matcher.advance(self.tokens[self.prompt_tokens :])
        return self._matcher

    def close_matcher(self) -> None:
        """Ends the use of the grammar, as the output has ended."""
        matcher, self._matcher = self._matcher, None
        if matcher is not None:
            matcher.close()

    def ends_by(self, token_id: int) -> bool:
        """Whether this token, sampled next, would end the answer without being part of it."""
        may_stop = self.num_output >= self.request.stop.min_tokens
        matcher = self.matcher
        return (may_stop and token_id in self._ending) or (
            matcher is not None and token_id in matcher.eos_token_ids
        )

    def append(self, token_id: int, context_tokens: int) -> tuple[bool, FinishReason | None]:
        """Appends an output token. Returns whether its text is part of the answer, and the finish reason, if any.

        An end-of-sequence or stop token adds no text, unless the request keeps its stop. An answer ends at once when
        its grammar is complete: the grammar knows the token already. Stop strings are not considered here; see
        `OutputText`. Raises InvalidArgumentError (GRAMMAR_FAILED) for an output that the grammar does not allow.
        """
        stop, ends = self.request.stop, self.ends_by(token_id)
        self.tokens.append(token_id)
        self.prompt_logprobs = None
        if ends:
            return stop.keep_stop, FinishReason.STOP
        matcher = self.matcher
        if matcher is not None:
            if why := matcher.error:
                raise InvalidArgumentError(why, reason=GRAMMAR_FAILED, field="sampling.grammar")
            if matcher.complete:
                return True, FinishReason.STOP
        if self.num_output >= stop.max_tokens or len(self.tokens) >= context_tokens:
            return True, FinishReason.LENGTH
        return True, None

    def text(self, tokenizer: Tokenizer) -> OutputText:
        """The output's text, created when first needed; it may lag behind `tokens`."""
        if self._text is None:
            self._text = OutputText(tokenizer, self.request)
        return self._text

    def scheduled(self, num_new: int) -> ScheduledSequence:
        """This sequence's part of a step that computes its next `num_new` tokens."""
        request = self.request
        return ScheduledSequence(  # by position, which takes half of the time
            request.request_id,
            self.tokens,
            self.prompt_tokens,
            self.num_computed,
            num_new,
            self.block_ids,
            self.remaining == num_new,
            request.sampling,
            self.banned_token_ids,
            self.matcher,
            self.table_id,
            self.prompt_logprobs,
        )

    def take_progress(self, block_size: int) -> ChunkProgress:
        """The KV that became final since the last call."""
        start, self.reported = self.reported, self.num_computed
        blocks = self.block_ids[: blocks_for(self.num_computed, block_size)]
        return ChunkProgress(self.request_id, start, self.num_computed, blocks, self.cached_tokens)
