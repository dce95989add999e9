"""The interface between the engine core and what computes a step: a torch model or a simulated one.

Drafts are rows of a step: each drafted token is a row of one token behind its sequence's own, over the same blocks. A
row attends to those before it, whose KV the same step writes. So its logits are those of a step of its own, provided
that the drafted tokens are the ones sampled; otherwise nobody looks at them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from engine.core.step_stats import StepWork
from engine.core.types import ModelFacts, RowsFailedError, SampledToken, SamplingParams, ScheduledSequence
from kv_transfer.layout import KvLayout
from kv_transfer.transports.transport import KvMemoryRegion
from kv_transfer.weights.manifest import WeightsReader
from kv_transfer.wire_format import KvWire, PlainWire
from splitserve.errors import BrokenInvariantError
from splitserve.generation.kv_blocks import blocks_for
from splitserve.logs import log_event

DEFAULT_STEP_TOKENS = {"DRAM": 512, "VRAM": 2048}
"""Default of `max_step_tokens` by the pool's memory kind: just enough to fill the device. With small chunks all but the
last chunk's KV is sent while later ones are computed, and a cancelled prompt stops soon."""

PROMPT_TOKENS = 64
SHORT_PROMPT_TOKENS = 8
"""Length of the warm-up's prompt where steps are prepared, and where they are not."""

PendingStep = Callable[[], list[SampledToken | None]]
"""Waits for a step that was begun. Call it once, before the next step begins; see `ModelRunner.begin`."""

SampleRows = Callable[[list[int]], Sequence[SampledToken]]
"""Samples the tokens of these rows."""


class StepShape(NamedTuple):
    """What a step computes: so many sequences that decode, and chunks of so many tokens."""

    decodes: int
    chunks: tuple[int, ...]


class ModelRunner(ABC):
    """Owns the weights and the KV blocks. Used from one thread."""

    facts: ModelFacts
    layout: KvLayout
    work: StepWork | None = None
    """What a step asks of the device; None if unknown."""
    overlaps: bool = False
    """Whether `begin` returns before the step is computed, so that the host can do other work meanwhile."""
    named_weights: WeightsReader | None = None
    """Its weights, for workers of the model that start; None: it has none to give."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of KV blocks for requests."""

    @property
    @abstractmethod
    def pool_memory(self) -> KvMemoryRegion:
        """The memory of the KV blocks; its address is the same for the runner's life.

        The blocks for lane probes follow the `num_blocks` for requests.
        """

    @abstractmethod
    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of each block in host memory, for checksums; valid until the next step."""

    @property
    def wire(self) -> KvWire:
        """The form in which KV is transferred, and the memory that peers write to. By default the KV blocks as is."""
        return PlainWire(lambda: self.pool_memory, self.read_blocks)

    @abstractmethod
    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """Computes one step; returns one entry per sequence, None where `sample` is not set.

        Writes the KV of the new positions. Sampling is a pure function of (logits, parameters, seed, position). Raises
        RowsFailedError if single sequences fail.
        """

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        """The first half of `execute`: queues a step. The returned function waits for it; it returns or raises as
        `execute` does.

        After that nothing of the step is in progress: its KV may be read and its blocks may be written, also by those
        that bypass the device's queue. By default the whole step is computed then.
        """
        return partial(self.execute, batch)

    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        """`poll` is called again and again, on the same thread, while a step that was begun is waited for. Ignored by
        runners whose thread computes itself."""
        return

    @property
    def speedup(self) -> float:
        """How many times as much compute as this worker's own the last step had; 1 where nobody lends any."""
        return 1.0

    @property
    def shares_cores(self) -> bool:
        """Whether this worker and neighbours of its host lend each other cores."""
        return False

    @property
    def prepared(self) -> bool:
        """Whether the last step made something for all like it, and so took longer than they will."""
        return False

    @property
    def mixes_steps(self) -> bool:
        """Whether a step that computes prompts and decodes takes less than one of each."""
        return self.pool_memory.memory_kind != "DRAM"

    @property
    def prepares_steps(self) -> bool:
        """Whether a step's first time makes something for all like it: compiles, captures. Else it takes as long as
        any other, and a short one shows that all works."""
        return True

    @property
    def warm_up_tokens(self) -> int:
        """Length of the warm-up's prompt."""
        return PROMPT_TOKENS if self.prepares_steps else SHORT_PROMPT_TOKENS

    def first_steps(self, max_step_tokens: int) -> Sequence[StepShape]:
        """Steps of up to so many tokens that would still make something for all like them: idle time is for those. None
        where that is made at the start, or cannot be made."""
        return ()

    def populate(self) -> bool:
        """Populates some memory of KV blocks, in idle time; whether there was any left. Some milliseconds."""
        return False

    def rest(self) -> None:
        """There is nothing to do until the next step. Ignored where nobody can use the device meanwhile."""
        return

    def take_cores(self) -> None:
        """Ends `rest` before the next step: something else of this worker computes now."""
        return

    def demand(self) -> int | None:
        """None unless a neighbour would compute on this worker's cores now, if it rested. Then a number that changes as
        long as one does so."""
        return None

    def is_lent(self) -> bool:
        """Whether a neighbour computes on this worker's cores, or would as soon as it rests."""
        return False

    def give_up_kv(self) -> None:
        """Gives up the memory of all KV blocks, whose content is lost, and of what is made of them; on a device that of
        weights too, which the host keeps meanwhile. No step may follow before `take_kv_back`, and no transport may have
        the memory registered."""
        raise BrokenInvariantError("this runner keeps its KV blocks")

    @property
    def given_up_bytes(self) -> int:
        """Main memory that `take_kv_back` populates; 0 where pages are only taken as they are used, and on a device."""
        return 0

    def take_kv_back(self) -> None:
        """Makes the KV blocks usable again, with any content. The caller has seen that `given_up_bytes` are free, with
        what else it takes back."""
        raise BrokenInvariantError("this runner keeps its KV blocks")

    @abstractmethod
    def close(self) -> None:
        """Releases the KV blocks and the weights."""


def draft_rows(batch: Sequence[ScheduledSequence]) -> Sequence[ScheduledSequence]:
    """The batch with a row for each drafted token, those of a sequence in order and directly behind it."""
    if not any(sequence.draft for sequence in batch):
        return batch
    rows: list[ScheduledSequence] = []
    for sequence in batch:
        rows.append(sequence._replace(draft=()) if sequence.draft else sequence)
        if not sequence.draft:
            continue
        token_ids = [*sequence.token_ids, *sequence.draft]
        for ahead in range(1, len(sequence.draft) + 1):
            computed = sequence.num_computed + ahead
            rows.append(rows[-1]._replace(token_ids=token_ids, num_computed=computed, ahead=ahead))
    return rows


def sample_in_order(
    rows: Sequence[ScheduledSequence], masks: Container[int], sample: SampleRows
) -> list[SampledToken | None]:
    """Samples the rows of sequences, then those of drafts for as long as the token before was the drafted one.

    Returns one entry for each sequence, None where nothing is sampled. What `sample` raises for sequences propagates. A
    draft's row that fails, or has a grammar and no mask, ends the draft: the sequence's own row fails next time.
    """
    first_rows = [index for index, row in enumerate(rows) if not row.ahead]
    tokens: dict[int, list[SampledToken]] = {}
    going = [(index, index) for index in first_rows if rows[index].sample]
    while going:
        try:
            sampled = sample([row for _, row in going])
        except RowsFailedError as error:
            if not rows[going[0][1]].ahead:
                raise
            going = [each for each in going if each[1] not in error.rows]
            continue
        further = []
        for (first, row), token in zip(going, sampled, strict=True):
            tokens.setdefault(first, []).append(token)
            behind = rows[row + 1] if row + 1 < len(rows) else None
            if behind is None or not behind.ahead or (behind.matcher is not None and row + 1 not in masks):
                continue
            if behind.token_ids[behind.num_computed] == token.token_id:
                further.append((first, row + 1))
        going = further
    return [_joined(tokens[index]) if index in tokens else None for index in first_rows]


def batch_index(rows: Sequence[ScheduledSequence], row: int) -> int:
    """The index, in the batch, of the sequence that a row is of."""
    return sum(1 for each in rows[: row + 1] if not each.ahead) - 1


def of_sequences(error: RowsFailedError, rows: Sequence[ScheduledSequence]) -> RowsFailedError:
    """An error of rows as one of the sequences, in the batch, that they are of."""
    failed = tuple(sorted({batch_index(rows, row) for row in error.rows}))
    return type(error)(error.message, failed, reason=error.reason)


def _joined(tokens: list[SampledToken]) -> SampledToken:
    return tokens[0] if len(tokens) == 1 else replace(tokens[0], following=tuple(tokens[1:]))


def warm_up(
    runner: ModelRunner,
    max_step_tokens: int | None,
    prompt_tokens: int | None = None,
    drafts: Sequence[int] = (),
) -> int:
    """Computes a prompt of up to `prompt_tokens` (by default those of the runner) and one token more, in blocks that
    nobody owns yet, to compile and allocate early. The token also with `drafts` of these lengths, unless nothing is
    made for them. Returns the length of the prompt, whose KV is in the first blocks; 0 where none was computed."""
    if prompt_tokens is None:
        prompt_tokens = runner.warm_up_tokens
    if not runner.prepares_steps:
        drafts = ()
    size = runner.layout.block_size_tokens
    limit = min(max_step_tokens or prompt_tokens + 1, runner.num_blocks * size, runner.facts.context_tokens)
    prompt = min(prompt_tokens, limit - 1)
    if prompt < 1:
        return 0
    room = min(runner.num_blocks * size, runner.facts.context_tokens) - prompt - 1
    drafts = [length for length in drafts if length <= room]
    blocks = range(blocks_for(prompt + 1 + max(drafts, default=0), size))
    try:
        for computed, new, draft in ((0, prompt, 0), *((prompt, 1, length) for length in (0, *drafts))):
            runner.execute([made_up(runner, computed, new, blocks)._replace(draft=(0,) * draft)])
        runner.rest()
    except RowsFailedError as error:
        # The model may fail on this prompt (NaN logits) and still work on others; the code has run.
        log_event("worker.warm_up_failed", error=error.message)
        return 0
    return prompt


def made_up(
    runner: ModelRunner, computed: int, new: int, blocks: Sequence[int], row: int = 0
) -> ScheduledSequence:
    """A sequence of which nobody wants an answer, of tokens 0, 1, ..., sampled greedily."""
    return ScheduledSequence(
        request_id=f"warm-up-{row}",
        token_ids=[token % runner.facts.vocabulary_size for token in range(computed + new)],
        prompt_tokens=computed or new,
        num_computed=computed,
        num_new=new,
        block_ids=list(blocks),
        sample=True,
        sampling=SamplingParams(temperature=0.0),
    )
