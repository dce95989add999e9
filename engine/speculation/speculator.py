"""Plans the drafts of a step: asks the drafter, cuts what cannot be accepted, and lets the policy choose lengths.

A drafted token is one more row of the step that computes its sequence's last token. Each row's token is sampled as it
would be without drafts, in order, for as long as the token before was the drafted one. So a draft changes how many
tokens a step gives, never which.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import SchedulerOutput
from engine.core.sequence import Sequence
from engine.core.step_stats import DraftOutcome
from engine.speculation.draft_lengths import (
    MAX_DRAFT,
    MAX_PROBE_COST,
    MAX_ROWS,
    MAX_SEQUENCES,
    PROBE_EVERY,
    Acceptance,
    RowCosts,
    SequenceAcceptance,
    choose_lengths,
)
from engine.speculation.drafter import Draft, Drafter, DraftRequest
from engine.speculation.prompt_lookup import PromptLookup
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


class Speculator:
    """The drafts of an engine's steps. `sequence_tokens`: the longest sequence."""

    def __init__(self, drafter: Drafter, kv: KVCacheManager, sequence_tokens: int) -> None:
        self._drafter, self._kv, self._sequence_tokens = drafter, kv, sequence_tokens
        self._costs = RowCosts()
        self._everywhere = Acceptance()
        self._acceptance: dict[Sequence, SequenceAcceptance] = {}
        self._supports: dict[Sequence, int] = {}
        """Of the drafts of the step that is under way."""

    def plan(self, step: SchedulerOutput, watermark: int) -> dict[Sequence, tuple[int, ...]]:
        """The drafts that a scheduled step checks, with blocks for them; at least `watermark` blocks stay free.

        None beside prompts, whose steps are longer than it takes to read the weights. A sequence whose grammar raises
        leaves the step and fails.
        """
        self._supports = {}
        batch = list(step.num_new)
        if not 0 < len(batch) <= MAX_SEQUENCES:
            return {}
        if any(tokens > 1 for tokens in step.num_new.values()):
            return {}
        guesses = self._guesses(step, batch)
        if not guesses:
            return {}
        lengths = self._lengths(guesses, batch, len(batch) + step.budget)
        drafts: dict[Sequence, tuple[int, ...]] = {}
        for sequence, wanted in lengths.items():
            length = self._with_blocks(sequence, wanted, watermark)
            if length:
                drafts[sequence] = tuple(guesses[sequence].token_ids[:length])
                self._supports[sequence] = guesses[sequence].support
                step.budget -= length
        return drafts

    def stepped(
        self, num_new: Mapping[Sequence, int], outcomes: Mapping[Sequence, DraftOutcome], duration_s: float
    ) -> None:
        """The step that was planned last took so long, and its drafts came out like this."""
        if not num_new or any(tokens > 1 for tokens in num_new.values()):
            return
        for sequence, (drafted, accepted) in outcomes.items():
            if (acceptance := self._acceptance.get(sequence)) is not None:
                acceptance.record(self._supports[sequence], drafted, accepted)
        self._costs.record(len(num_new) + sum(one.drafted for one in outcomes.values()), duration_s)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._drafter.forget(sequence)
        self._acceptance.pop(sequence, None)

    def _guesses(self, step: SchedulerOutput, batch: list[Sequence]) -> dict[Sequence, Draft]:
        """The drafts that could be accepted, none of them empty."""
        most = {
            sequence: min(MAX_DRAFT, further - 1)
            for sequence in batch
            if (further := sequence.further_tokens(self._sequence_tokens)) > 1
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
        self, guesses: Mapping[Sequence, Draft], batch: list[Sequence], max_rows: int
    ) -> dict[Sequence, int]:
        """The length of each sequence's draft in a step of up to `max_rows` rows."""
        most, rates = [0] * len(batch), [0.0] * len(batch)
        for index, sequence in enumerate(batch):
            if (draft := guesses.get(sequence)) is not None:
                acceptance = self._acceptance.setdefault(sequence, SequenceAcceptance(self._everywhere))
                most[index], rates[index] = len(draft.token_ids), acceptance.rate(draft.support)
        chosen = choose_lengths(most, rates, self._costs, min(max_rows, MAX_ROWS))
        if not any(chosen):
            return self._probe(guesses, len(batch), max_rows)
        for sequence in guesses:
            self._acceptance[sequence].left_out = 0
        return dict(zip(batch, chosen, strict=True))

    def _probe(self, guesses: Mapping[Sequence, Draft], batch: int, max_rows: int) -> dict[Sequence, int]:
        """One token of the draft that was left out for longest, now and then."""
        for sequence in guesses:
            self._acceptance[sequence].left_out += 1
        longest = max(guesses, key=lambda sequence: self._acceptance[sequence].left_out)
        if self._acceptance[longest].left_out < PROBE_EVERY or batch >= min(max_rows, MAX_ROWS):
            return {}
        for sequence in guesses:
            self._acceptance[sequence].left_out = 0
        return {longest: 1} if self._costs.ratio(batch, 1) <= MAX_PROBE_COST else {}

    def _with_blocks(self, sequence: Sequence, length: int, watermark: int) -> int:
        """As many drafted tokens as there are blocks for; nobody is preempted for a guess."""
        if self._kv.grow(sequence, ahead=length, watermark=watermark):
            return length
        return len(sequence.block_ids) * self._kv.block_size - len(sequence.tokens)
