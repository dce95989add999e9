"""Plans the drafts of a step: asks the drafter, cuts what cannot be accepted, and lets the policy choose lengths.

A drafted token is one more row of the step that computes its sequence's last token. Each row's token is sampled as it
would be without drafts, in order, for as long as the token before was the drafted one. So a draft changes how many
tokens a step gives, never which.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.prompt_pacing import PromptPacing
from engine.core.scheduler import SchedulerOutput
from engine.core.sequence import Sequence
from engine.core.step_stats import DraftOutcome
from engine.core.types import RequestLimits
from engine.speculation.acceptance import Acceptance, SequenceAcceptance
from engine.speculation.draft_lengths import (
    MAX_DRAFT,
    MAX_ROWS,
    MAX_SEQUENCES,
    NOTHING_OWED,
    PROBE_COST,
    PROBE_EVERY,
    choose_guesses,
    choose_lengths,
    may_pay,
)
from engine.speculation.draft_room import DraftRoom, StreamAccount
from engine.speculation.drafter import OF_A_MODEL, ComputingDrafter, Draft, Drafter, DraftRequest
from engine.speculation.prompt_reading import MIN_CHUNK, READY, ReadingChance, ahead_s
from engine.speculation.row_costs import FORGET_AFTER, RowCosts

_FIRST_GUESS_COST = 0.25
"""Plain steps that a computed guess takes before any was measured."""


@dataclass(slots=True)
class DraftedStream:
    """What is known of one sequence's drafts. `left_out`: of how many steps since the last that checked any."""

    acceptance: SequenceAcceptance
    account: StreamAccount = field(default_factory=StreamAccount)
    left_out: int = 0
    support: int = 0
    """Of its draft in the step that is under way."""


class Speculator:
    """The drafts of an engine's steps, within what the token clock of its `pacing` leaves."""

    def __init__(
        self, drafter: Drafter, kv: KVCacheManager, limits: RequestLimits, pacing: PromptPacing
    ) -> None:
        """The meter of `pacing` is told how long drafts took to compute."""
        self._drafter, self._kv, self._limits, self._clock = drafter, kv, limits, pacing.clock
        self._meter = pacing.meter
        self._computing = drafter if isinstance(drafter, ComputingDrafter) else None
        self._guessing_s = 0.0
        """How long a computing drafter took before the step that was planned last."""
        self._unasked = 0
        """Steps in a row before which a computing drafter computed nothing."""
        self._costs = RowCosts()
        self._everywhere = Acceptance()
        self._streams: dict[Sequence, DraftedStream] = {}

    def plan(self, step: SchedulerOutput, watermark: int) -> dict[Sequence, tuple[int, ...]]:
        """The drafts that a scheduled step checks, with blocks for them; at least `watermark` blocks stay free.

        None beside prompts, whose steps are longer than it takes to read the weights. A sequence whose grammar raises
        leaves the step and fails.
        """
        drafts = self._plan(step, watermark)
        if self._computing is not None:
            self._guessing_s = self._computing.take_spent_s()
            self._meter.guessed(self._guessing_s)
            self._unasked = 0 if self._guessing_s else self._unasked + 1
            if self._unasked >= FORGET_AFTER:
                # It seems too slow, and shows nothing else as long as it is not asked.
                self._computing.forget_times()
                self._unasked = 0
        return drafts

    def stepped(
        self,
        num_new: Mapping[Sequence, int],
        outcomes: Mapping[Sequence, DraftOutcome],
        duration_s: float,
        *,
        is_first: bool = False,
    ) -> None:
        """The step that was planned last took so long, and its drafts came out like this. `is_first`: see
        `ModelRunner.prepared`; what rows cost is not told by such a step."""
        if not num_new or any(tokens > 1 for tokens in num_new.values()):
            return
        batch, drafted = len(num_new), sum(one.drafted for one in outcomes.values())
        ratio = self._costs.ratio(batch, drafted) if drafted else 1.0
        if self._guessing_s and (plain_s := self._costs.step_s(batch)):
            ratio += self._guessing_s / plain_s
        for sequence in num_new:
            if (stream := self._streams.get(sequence)) is None:
                continue
            outcome = outcomes.get(sequence)
            stream.account.stepped(1 + outcome.accepted if outcome else 1, ratio)
            if outcome is not None:
                stream.acceptance.record(stream.support, *outcome)
        if not is_first:
            self._costs.record(batch + drafted, max(0.0, duration_s - self._guessing_s))

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._drafter.forget(sequence)
        self._streams.pop(sequence, None)

    def close(self) -> None:
        """Closes the drafter."""
        self._drafter.close()

    def _plan(self, step: SchedulerOutput, watermark: int) -> dict[Sequence, tuple[int, ...]]:
        batch = list(step.num_new)
        if not 0 < len(batch) <= MAX_SEQUENCES or any(tokens > 1 for tokens in step.num_new.values()):
            return {}
        max_rows = min(len(batch) + step.budget, MAX_ROWS)
        if not may_pay(len(batch), self._costs, max_rows, self._guess_cost(len(batch))):
            return {}
        if self._computing is not None:
            guesses = self._computed(step, batch, max_rows, watermark)
        else:
            guesses = self._chosen(step, batch, max_rows, watermark)
        for sequence, guess in guesses.items():
            self._streams[sequence].support = guess.support
            step.budget -= len(guess.token_ids)
        return {sequence: tuple(guess.token_ids) for sequence, guess in guesses.items()}

    def _chosen(
        self, step: SchedulerOutput, batch: list[Sequence], max_rows: int, watermark: int
    ) -> dict[Sequence, Draft]:
        """Of guesses that cost nothing, those that pay to be checked."""
        guesses = self._guesses(step, self._requests(batch))
        if not guesses:
            return {}
        batch = list(step.num_new)
        room = self._room(step, batch)
        found: dict[Sequence, Draft] = {}
        for sequence, wanted in self._lengths(guesses, batch, room, max_rows).items():
            if length := self._with_blocks(sequence, wanted, watermark):
                found[sequence] = guesses[sequence]._replace(token_ids=guesses[sequence].token_ids[:length])
        return found

    def _computed(
        self, step: SchedulerOutput, batch: list[Sequence], max_rows: int, watermark: int
    ) -> dict[Sequence, Draft]:
        """Guesses that pay to be computed; or none, where a sequence's tokens are read for later ones instead."""
        assert self._computing is not None
        room, plain_s = self._room(step, batch), self._costs.step_s(len(batch))
        requests = {each.key: each for each in self._requests(batch, self._computing.context_tokens)}
        behind = {key: self._computing.behind(each) for key, each in requests.items()}
        streams = [self._stream(sequence) for sequence in batch]
        shares = room.shares([stream.account for stream in streams])
        expected = [
            stream.acceptance.chances(OF_A_MODEL, requests[sequence].most) if sequence in requests else ()
            for sequence, stream in zip(batch, streams, strict=True)
        ]
        choose = partial(
            choose_guesses, costs=self._costs, max_rows=max_rows, guess_cost=self._guess_cost(len(batch))
        )
        if max(behind.values(), default=0) > READY:
            saved_s = plain_s * (1 - 1 / choose(expected, [NOTHING_OWED] * len(batch), longest=math.inf).gain)
            reading = ReadingChance(saved_s, ahead_s(shares, room.longest, plain_s), room.regained_s, plain_s)
            if self._read(requests, behind, reading):
                return {}
        ready = [
            chances if behind.get(sequence, READY + 1) <= READY else ()
            for sequence, chances in zip(batch, expected, strict=True)
        ]
        lengths = dict(zip(batch, choose(ready, shares, longest=room.longest).lengths, strict=True))
        candidates = [sequence for sequence, chances in zip(batch, ready, strict=True) if chances]
        if not any(lengths.values()):
            lengths = self._probe(candidates, len(batch), room, max_rows, self._guess_cost(len(batch)))
        else:
            self._checked(candidates)
        wanted = {
            sequence: self._with_blocks(sequence, length, watermark) for sequence, length in lengths.items()
        }
        return self._guesses(
            step,
            [requests[sequence]._replace(most=length) for sequence, length in wanted.items() if length],
        )

    def _read(
        self,
        requests: Mapping[Hashable, DraftRequest],
        behind: Mapping[Hashable, int],
        reading: ReadingChance,
    ) -> bool:
        """Has a computing drafter read what it lacks of one sequence, if that pays and there is room for some of it.
        The one that is the least behind goes first. Returns whether anything was read."""
        assert self._computing is not None
        for key in sorted(behind, key=lambda each: behind[each]):
            late, request = behind[key], requests[key]
            if late <= READY:
                continue
            emitted = len(request.token_ids) - request.prompt_tokens
            further = cast(Sequence, key).further_tokens(self._limits.sequence_tokens)
            chunk_s = self._computing.chunk_s(MIN_CHUNK)
            tokens = reading.tokens(late, self._computing.chunk_s(late), chunk_s, emitted, further)
            if tokens is not None:
                if tokens:
                    self._computing.catch_up(request, tokens)
                return tokens > 0
        return False

    def _requests(self, batch: list[Sequence], context_tokens: float = math.inf) -> list[DraftRequest]:
        """What may be drafted for each sequence, if anything may."""
        found = []
        for sequence in batch:
            further = sequence.further_tokens(self._limits.sequence_tokens)
            most = min(MAX_DRAFT, further - 1, context_tokens - len(sequence.tokens))
            if most > 0:
                found.append(
                    DraftRequest(
                        sequence,
                        sequence.tokens,
                        int(most),
                        sequence.prompt_tokens,
                        sequence.request.sampling,
                        sequence.block_ids,
                        sequence.block_hashes,
                        sequence.table_id,
                    )
                )
        return found

    def _guesses(self, step: SchedulerOutput, asked: list[DraftRequest]) -> dict[Sequence, Draft]:
        """The drafts that could be accepted, none of them empty."""
        guesses: dict[Sequence, Draft] = {}
        for request, draft in zip(asked, self._drafter.drafts(asked), strict=True):
            if not draft.token_ids:
                continue
            sequence = cast(Sequence, request.key)
            try:
                count = sequence.leading(draft.token_ids[: request.most])
            except BaseException as error:  # from its grammar
                step.fail(sequence, error)
                continue
            if count:
                guesses[sequence] = Draft(draft.token_ids[:count], draft.support)
            elif self._computing is not None:  # it would cost the same again
                self._stream(sequence).acceptance.record(draft.support, 1, 0)
        return guesses

    def _lengths(
        self, guesses: Mapping[Sequence, Draft], batch: list[Sequence], room: DraftRoom, max_rows: int
    ) -> dict[Sequence, int]:
        """The length of each sequence's draft in a step of up to `max_rows` rows."""
        streams = [self._stream(sequence) for sequence in batch]
        chances = [
            stream.acceptance.chances(draft.support, len(draft.token_ids))
            if (draft := guesses.get(sequence)) is not None
            else ()
            for sequence, stream in zip(batch, streams, strict=True)
        ]
        shares = room.shares([stream.account for stream in streams])
        chosen = choose_lengths(chances, shares, self._costs, max_rows, room.longest)
        if not any(chosen):
            return self._probe(guesses, len(batch), room, max_rows)
        self._checked(guesses)
        return dict(zip(batch, chosen, strict=True))

    def _checked(self, candidates: Iterable[Sequence]) -> None:
        for sequence in candidates:
            self._streams[sequence].left_out = 0

    def _probe(
        self,
        candidates: Collection[Sequence],
        batch: int,
        room: DraftRoom,
        max_rows: int,
        before: float = 0.0,
    ) -> dict[Sequence, int]:
        """One token of the draft that was left out for longest, now and then. `before`: plain steps that it takes."""
        if not candidates:
            return {}
        for sequence in candidates:
            self._streams[sequence].left_out += 1
        longest = max(candidates, key=lambda sequence: self._streams[sequence].left_out)
        cost = self._costs.ratio(batch, 1) + before
        every = PROBE_EVERY * max(1.0, (cost - 1.0) / (PROBE_COST - 1.0))
        if self._streams[longest].left_out < every or batch >= max_rows:
            return {}
        self._checked(candidates)
        return {longest: 1} if cost <= room.longest else {}

    def _room(self, step: SchedulerOutput, batch: list[Sequence]) -> DraftRoom:
        paces = [sequence.pace for sequence in batch]
        return DraftRoom(step.now, paces, self._clock, self._costs.step_s(len(batch)))

    def _guess_cost(self, batch: int) -> float:
        """What one more guess for each of so many sequences takes, in plain steps."""
        plain_s = self._costs.step_s(batch)
        if self._computing is None or not plain_s:
            return 0.0
        return (self._computing.token_s(batch) or _FIRST_GUESS_COST * plain_s) / plain_s

    def _stream(self, sequence: Sequence) -> DraftedStream:
        stream = self._streams.get(sequence)
        if stream is None:
            stream = self._streams[sequence] = DraftedStream(SequenceAcceptance(self._everywhere))
        return stream

    def _with_blocks(self, sequence: Sequence, length: int, watermark: int) -> int:
        """As many drafted tokens as there are blocks for; nobody is preempted for a guess."""
        if self._kv.grow(sequence, ahead=length, watermark=watermark):
            return length
        return len(sequence.block_ids) * self._kv.block_size - len(sequence.tokens)
