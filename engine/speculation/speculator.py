"""Plans the drafts of a step: asks the drafter, cuts what cannot be accepted, and lets the policy choose lengths.

A drafted token is one more row of the step that computes its sequence's last token. Each row's token is sampled as it
would be without drafts, in order, for as long as the token before was the drafted one. So a draft changes how many
tokens a step gives, never which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.prompt_pacing import PromptPacing
from engine.core.scheduler import SchedulerOutput
from engine.core.sequence import Sequence
from engine.core.step_stats import DraftOutcome
from engine.core.types import RequestLimits
from engine.speculation.acceptance import Acceptance, SequenceAcceptance
from engine.speculation.draft_lengths import (
    MAX_DRAFT,
    MAX_PROBE_COST,
    MAX_ROWS,
    MAX_SEQUENCES,
    PROBE_EVERY,
    choose_lengths,
    may_pay,
)
from engine.speculation.draft_room import DraftRoom, StreamAccount
from engine.speculation.drafter import Draft, Drafter, DraftRequest
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.row_costs import RowCosts
from splitserve.config.engine import EngineConfig


def max_decode_rows(config: EngineConfig) -> int:
    """Most rows of a step that only decodes."""
    return (
        config.max_running_requests
        if config.speculation == "off"
        else max(config.max_running_requests, MAX_ROWS)
    )


def warm_up_drafts(config: EngineConfig) -> range:
    """Lengths of drafts to compute at the start, for what is compiled or captured for each number of rows."""
    return range(0) if config.speculation == "off" else range(1, MAX_DRAFT + 1)


def make_drafter(config: EngineConfig) -> Drafter | None:
    """The drafter that the settings choose; None without speculation."""
    return None if config.speculation == "off" else PromptLookup()


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
        self._drafter, self._kv, self._limits, self._clock = drafter, kv, limits, pacing.clock
        self._costs = RowCosts()
        self._everywhere = Acceptance()
        self._streams: dict[Sequence, DraftedStream] = {}

    def plan(self, step: SchedulerOutput, watermark: int) -> dict[Sequence, tuple[int, ...]]:
        """The drafts that a scheduled step checks, with blocks for them; at least `watermark` blocks stay free.

        None beside prompts, whose steps are longer than it takes to read the weights. A sequence whose grammar raises
        leaves the step and fails.
        """
        batch = list(step.num_new)
        if not 0 < len(batch) <= MAX_SEQUENCES or any(tokens > 1 for tokens in step.num_new.values()):
            return {}
        max_rows = min(len(batch) + step.budget, MAX_ROWS)
        if not may_pay(len(batch), self._costs, max_rows):
            return {}
        guesses = self._guesses(step, batch)
        if not guesses:
            return {}
        batch = list(step.num_new)
        paces, plain_s = [sequence.pace for sequence in batch], self._costs.step_s(len(batch))
        room = DraftRoom(step.now, paces, self._clock, plain_s)
        lengths = self._lengths(guesses, batch, room, max_rows)
        drafts: dict[Sequence, tuple[int, ...]] = {}
        for sequence, wanted in lengths.items():
            length = self._with_blocks(sequence, wanted, watermark)
            if length:
                drafts[sequence] = tuple(guesses[sequence].token_ids[:length])
                self._streams[sequence].support = guesses[sequence].support
                step.budget -= length
        return drafts

    def stepped(
        self, num_new: Mapping[Sequence, int], outcomes: Mapping[Sequence, DraftOutcome], duration_s: float
    ) -> None:
        """The step that was planned last took so long, and its drafts came out like this."""
        if not num_new or any(tokens > 1 for tokens in num_new.values()):
            return
        batch, drafted = len(num_new), sum(one.drafted for one in outcomes.values())
        ratio = self._costs.ratio(batch, drafted) if drafted else 1.0
        for sequence in num_new:
            if (stream := self._streams.get(sequence)) is None:
                continue
            outcome = outcomes.get(sequence)
            stream.account.stepped(1 + outcome.accepted if outcome else 1, ratio)
            if outcome is not None:
                stream.acceptance.record(stream.support, *outcome)
        self._costs.record(batch + drafted, duration_s)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._drafter.forget(sequence)
        self._streams.pop(sequence, None)

    def _guesses(self, step: SchedulerOutput, batch: list[Sequence]) -> dict[Sequence, Draft]:
        """The drafts that could be accepted, none of them empty."""
        most = {
            sequence: min(MAX_DRAFT, further - 1)
            for sequence in batch
            if (further := sequence.further_tokens(self._limits.sequence_tokens)) > 1
        }
        asked = [DraftRequest(sequence, sequence.tokens, tokens) for sequence, tokens in most.items()]
        guesses: dict[Sequence, Draft] = {}
        for sequence, draft in zip(most, self._drafter.drafts(asked), strict=True):
            if not draft.token_ids:
                continue
            try:
                count = sequence.leading(draft.token_ids[: most[sequence]])
            except BaseException as error:  # from its grammar
                step.fail(sequence, error)
                continue
            if count:
                guesses[sequence] = Draft(draft.token_ids[:count], draft.support)
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
        for sequence in guesses:
            self._streams[sequence].left_out = 0
        return dict(zip(batch, chosen, strict=True))

    def _probe(
        self, guesses: Mapping[Sequence, Draft], batch: int, room: DraftRoom, max_rows: int
    ) -> dict[Sequence, int]:
        """One token of the draft that was left out for longest, now and then."""
        for sequence in guesses:
            self._streams[sequence].left_out += 1
        longest = max(guesses, key=lambda sequence: self._streams[sequence].left_out)
        if self._streams[longest].left_out < PROBE_EVERY or batch >= max_rows:
            return {}
        for sequence in guesses:
            self._streams[sequence].left_out = 0
        return {longest: 1} if self._costs.ratio(batch, 1) <= min(MAX_PROBE_COST, room.longest) else {}

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
