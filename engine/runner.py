"""The interface between the scheduler and whatever computes: a torch model or a simulated one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from engine.types import SampledToken, SamplingParams
from kv_transfer.layout import KvLayout
from kv_transfer.transport import PoolMemory
from kv_transfer.wire import KvWire, PlainWire
from splitserve.errors import SplitserveError

if TYPE_CHECKING:
    from engine.grammar import GrammarMatcher


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step. A tuple, for it is cheaper to make than a frozen dataclass: each step makes many.

    Computes positions [`num_computed`, `num_computed + num_new`) of `token_ids` (prompt and output, the
    whole sequence known so far, shared with the scheduler and not to be changed). `block_ids` is its block
    table and covers those positions. When `sample` is set, the last computed position is the end of the
    sequence and its next token is wanted; `prompt_tokens` tells where the output begins (penalties,
    position of the sampled token).
    """

    request_id: str
    token_ids: Sequence[int]
    prompt_tokens: int
    num_computed: int
    num_new: int
    block_ids: Sequence[int]
    sample: bool
    sampling: SamplingParams
    banned_token_ids: frozenset[int] = frozenset()
    """Tokens that must not be chosen now (end-of-sequence before `min_tokens`)."""
    matcher: GrammarMatcher | None = None
    """Where the output stands in its grammar, if it is held to one."""


PendingStep = Callable[[], list[SampledToken | None]]
"""A step that was begun. To be called once, before the next one is begun; see `ModelRunner.begin`."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of the worker must know about the model."""

    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]


class RowsFailedError(SplitserveError):
    """Some sequences of a step cannot be continued; `rows` are their indices in the batch.

    The others are fine: whoever drops the failed ones may run the step again, because computing a
    position twice writes the same KV.
    """

    default_reason = "ROWS_FAILED"

    def __init__(self, message: str, rows: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rows = rows


class ModelRunner(ABC):
    """Owns weights and the KV pool; used from one thread."""

    facts: ModelFacts
    layout: KvLayout
    overlaps: bool = False
    """Whether `begin` returns long before the step is computed, so that the host has time for other things."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks in the pool."""

    @property
    @abstractmethod
    def pool_memory(self) -> PoolMemory:
        """The pool's memory; stays put for the runner's life.

        Its probe blocks come behind the `num_blocks` that requests use.
        """

    @abstractmethod
    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of each block in host memory, for checksums; to be used before the next step."""

    @property
    def wire(self) -> KvWire:
        """How KV travels; its memory is what peers write to. By default the pool itself."""
        return PlainWire(self.pool_memory, self.read_blocks)

    @abstractmethod
    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """Computes one step; returns one entry a sequence, None where `sample` was not set.

        Writes KV of the new positions into the pool. Sampling is a pure function of
        (logits, parameters, seed, position). Raises RowsFailedError for single sequences.
        """

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        """The first half of `execute`: queues a step. What comes back waits for it, and returns or raises as `execute`.

        When that is over, nothing of the step is under way any more: its KV may be read and its blocks be written,
        past any queue of the device. By default everything is computed then.
        """
        return partial(self.execute, batch)

    @abstractmethod
    def close(self) -> None:
        """Releases the pool and the weights."""
