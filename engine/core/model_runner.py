"""The interface of model runners, and the inputs and outputs of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kv_transfer.handoff.checksums import KvMemory
from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import KvMemoryRegion
from splitserve.errors import SplitserveError
from splitserve.generation.kv_blocks import Adapter, blocks_for
from splitserve.logs import log_event
from splitserve.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the model that the rest of the worker needs. `adapters`: those that requests may name.
    `scores_prompts`: whether the runner has log-probabilities of prompts. `pooling`: what a pooling model
    computes; 0: it generates."""

    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    scores_prompts: bool = True
    pooling: generation_pb2.Pooling.ValueType = generation_pb2.POOLING_UNSPECIFIED


class OutputMatcher(Protocol):
    """The state of one output within its grammar, which another process computes. Used on the engine thread."""

    eos_token_ids: frozenset[int]
    """Tokens that may be sampled to end the answer where the grammar is complete."""
    complete: bool
    """Whether the output is complete and nothing can follow."""
    error: str
    """Why the grammar cannot continue; empty while it can."""
    mask: NDArray[np.int32]
    """The tokens that may follow: int32 `[ceil(vocabulary / 32)]`, one bit per token."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Hands over the next tokens of the output, and asks what may follow. The attributes hold the answer once
        `wait` returns True."""

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Whether the last question is answered; waits for that, at most `timeout_s` seconds."""

    def close(self) -> None:
        """Ends the use of the grammar, as the output has ended. Idempotent."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Ranges are those of protos/splitserve/v1/generation.proto, already checked."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the token is always the argmax."""
        return self.temperature == 0.0

    def bad_tokens(self, token_ids: Sequence[int], begin: int, end: int) -> frozenset[int]:
        """The tokens that would complete one of `bad_sequences` after the output `token_ids[begin:end]`."""
        return frozenset(
            bad[-1]
            for bad in self.bad_sequences
            if len(bad) <= end - begin + 1 and tuple(token_ids[end + 1 - len(bad) : end]) == bad[:-1]
        )


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities (natural logarithms) of a prompt's tokens, without the first, which has no context.

    `logprobs` and `ranks` `[tokens - 1]`: a rank is 1 + the number of more probable tokens. `top_token_ids` and
    `top_logprobs` `[tokens - 1, alternatives]`: the most probable tokens, the most probable first.
    """

    token_ids: Sequence[int]
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_token_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)

    def put(
        self,
        position: int,
        logprobs: list[float],
        ranks: list[int],
        top_token_ids: list[list[int]],
        top_logprobs: list[list[float]],
    ) -> None:
        """Sets the values that the positions from `position` on predict. Later ones are dropped: a prompt that was
        preempted is computed again."""
        self.logprobs[position:] = logprobs
        self.ranks[position:] = ranks
        self.top_token_ids[position:] = top_token_ids
        self.top_logprobs[position:] = top_logprobs


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step. A tuple: each step makes many, and a frozen dataclass costs more to make.

    The step computes positions [`num_computed`, `num_computed + num_new`) of `token_ids`, which is the whole sequence
    so far, prompt and output; it is shared with the scheduler and must not be changed. `block_ids` is the block table
    and covers those positions. With `sample`, the last computed position is the end of the sequence, and its next token
    is sampled. The output begins at `prompt_tokens` (for penalties and the position of the sampled token).
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
    """Tokens that must not be sampled now: the end of sequence before `min_tokens`, the ends of bad sequences."""
    matcher: OutputMatcher | None = None
    """For structured output: the state of the output within its grammar."""
    table_id: int = 0
    """Identifies the block table in this process: as long as it is the same, `block_ids` only grows. 0: a table without
    identity, which may differ in each step."""
    prompt_logprobs: PromptLogprobs | None = None
    """Takes the log-probabilities of the prompt's tokens that the step's positions predict; None: not wanted."""


class RowsFailedError(SplitserveError):
    """Some sequences of a step cannot be continued; `rows` are their indices in the batch.

    The others are unaffected. The step may be run again without the failed ones, because computing a position twice
    writes the same KV.
    """

    default_reason = "ROWS_FAILED"

    def __init__(self, message: str, rows: tuple[int, ...], *, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.rows = rows


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability (natural logarithm) of an emitted token and of the most probable alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token that the runner sampled for one sequence."""

    token_id: int
    logprob: Logprob | None = None


DEFAULT_STEP_TOKENS = {"DRAM": 512, "VRAM": 2048}
"""Default of `max_step_tokens` by the pool's memory kind: just enough to fill the device. With small chunks all but the
last chunk's KV is sent while later ones are computed, and a cancelled prompt stops soon."""

WARM_UP_TOKENS = 64
"""Length of the warm-up's prompt."""

PendingStep = Callable[[], list[SampledToken | None]]
"""Waits for a step that was begun. Call it once, before the next step begins; see `ModelRunner.begin`."""


class ModelRunner(ABC):
    """Owns the weights and the KV blocks. Used from one thread."""

    facts: ModelFacts
    layout: KvLayout
    num_blocks: int
    """Number of KV blocks for requests."""
    pool_memory: KvMemoryRegion
    """The memory of the KV blocks; its address is the same for the runner's life. The blocks for lane probes follow the
    `num_blocks` for requests."""
    overlaps: bool = False
    """Whether `begin` returns before the step is computed, so that the host can do other work meanwhile."""

    @abstractmethod
    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of each block in host memory, for checksums; valid until the next step."""

    @property
    def kv_memory(self) -> KvMemory:
        """The KV blocks as handoffs see them."""
        return KvMemory(self.pool_memory, self.read_blocks)

    @abstractmethod
    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """Computes one step; returns one entry per sequence, None where `sample` is not set.

        Writes the KV of the new positions. Sampling is a pure function of (logits, parameters, seed, position). Raises
        RowsFailedError if single sequences fail.
        """

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        """The first half of `execute`: queues a step. The returned function waits for it; it returns or raises as
        `execute` does.

        When the returned function has returned, nothing of the step is in progress: peers may read its KV and write its
        blocks without regard to the device's queue. By default that function computes the whole step.
        """
        return partial(self.execute, batch)

    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        """Has `poll` called repeatedly, on this thread, while the runner waits for a step. Ignored by runners whose own
        thread computes the step."""
        return

    @property
    def prepared(self) -> bool:
        """Whether the last step also compiled or captured something for later steps like it, and so took longer."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Releases the KV blocks and the weights."""


def warm_up(runner: ModelRunner, max_step_tokens: int | None, prompt_tokens: int = WARM_UP_TOKENS) -> None:
    """Computes a prompt of up to `prompt_tokens` and one more token, so that compilation and allocation happen early.

    Their KV is written to blocks that no request owns yet.
    """
    size = runner.layout.block_size_tokens
    limit = min(max_step_tokens or prompt_tokens + 1, runner.num_blocks * size, runner.facts.context_tokens)
    prompt = min(prompt_tokens, limit - 1)
    if prompt < 1:
        return
    blocks = list(range(blocks_for(prompt + 1, size)))
    try:
        runner.execute([_made_up(runner, 0, prompt, blocks)])
        runner.execute([_made_up(runner, prompt, 1, blocks)])
    except RowsFailedError as error:
        # The model may fail on this prompt (NaN logits) and still work on others; the code has run.
        log_event("worker.warm_up_failed", error=error.message)


def _made_up(runner: ModelRunner, computed: int, new: int, blocks: list[int]) -> ScheduledSequence:
    """A sequence of tokens 0, 1, ..., sampled greedily."""
    return ScheduledSequence(
        request_id="warm-up",
        token_ids=[token % runner.facts.vocabulary_size for token in range(computed + new)],
        prompt_tokens=computed or new,
        num_computed=computed,
        num_new=new,
        block_ids=blocks,
        sample=True,
        sampling=SamplingParams(temperature=0.0),
    )
