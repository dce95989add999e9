"""What drafts save by count: known answers are given once more in virtual time, where a step takes what its rows take.

Nothing is computed, so neither noise nor other processes have a part in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.engine_core import EngineCore
from engine.core.model_runner import ModelRunner, draft_rows, sample_in_order
from engine.core.types import (
    EngineRequest,
    ModelFacts,
    SampledToken,
    SamplingParams,
    ScheduledSequence,
    StopParams,
)
from engine.runner.simulated_runner import SimulatedRunner
from engine.speculation.drafter import GREEDY, Drafter
from kv_transfer.transports.transport import KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.models.tokenizer import Tokenizer

STEP_S = 7.5e-3
ROW_TIMES = {1: 1.0, 2: 1.01, 4: 1.13, 6: 1.27, 8: 1.40, 12: 2.27, 16: 2.5, 24: 3.1, 32: 3.7}
"""Steps by their number of rows, in steps of one row, for rows of 100 tokens of context and one thread: as measured,
see docs/performance.md. Graphs are of these sizes, so a step takes as long as the next larger."""
PROMPT_TOKEN_S = 1.3e-3
"""A token of a prompt, on the same machine."""
_SIZES = sorted(ROW_TIMES)


def step_s(rows: int) -> float:
    """Seconds of a step over so many rows."""
    return STEP_S * ROW_TIMES[_SIZES[bisect_left(_SIZES, rows)]]


class VirtualTime:
    """The clock of a count, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        """Seconds since the count began."""
        return self.now


class KnownAnswers(SimulatedRunner):
    """Says what is known, and moves its clock by what the rows of a step take; prompts take nothing."""

    def __init__(
        self, config: EngineConfig, answers: dict[str, list[int]], vocabulary_size: int, clock: VirtualTime
    ) -> None:
        super().__init__(config)
        self.facts = ModelFacts(self.facts.context_tokens, vocabulary_size, frozenset())
        self.clock = clock
        self.steps = self.rows = 0
        self._answers = answers

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """See ModelRunner."""
        rows = draft_rows(batch)
        if all(row.num_new == 1 for row in rows):
            self.steps, self.rows = self.steps + 1, self.rows + len(rows)
            self.clock.now += step_s(len(rows))
        return sample_in_order(
            rows, (), lambda wanted: [SampledToken(self._next(rows[row])) for row in wanted]
        )

    def _next(self, row: ScheduledSequence) -> int:
        answer = self._answers[row.request_id]
        return answer[min(row.num_computed + row.num_new - row.prompt_tokens, len(answer) - 1)]


class CostingRunner(ModelRunner):
    """A draft model's runner that computes, and moves a clock by `cost` of what the model's steps take instead of by
    the time that passes; of a prompt's tokens each by `cost` of `PROMPT_TOKEN_S`."""

    def __init__(self, runner: ModelRunner, clock: VirtualTime, cost: float) -> None:
        self._runner, self._virtual, self._cost = runner, clock, cost
        self.facts, self.layout = runner.facts, runner.layout

    @property
    def num_blocks(self) -> int:
        """See `ModelRunner`."""
        return self._runner.num_blocks

    @property
    def pool_memory(self) -> KvMemoryRegion:
        """See `ModelRunner`."""
        return self._runner.pool_memory

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """See `ModelRunner`."""
        return self._runner.read_blocks(block_ids)

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """See `ModelRunner`."""
        prompts = sum(each.num_new for each in batch if each.num_new > 1)
        rows = sum(1 for each in batch if each.num_new == 1)
        self._virtual.now += self._cost * (prompts * PROMPT_TOKEN_S + (step_s(rows) if rows else 0.0))
        return self._runner.execute(batch)

    def close(self) -> None:
        """Leaves the runner as it is: others count with it."""


@dataclass(frozen=True)
class Counted:
    """Virtual seconds, decode steps, and their rows."""

    seconds: float
    steps: int
    rows: int


def counted(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    vocabulary_size: int,
    drafter: Drafter | None,
    clock: VirtualTime | None = None,
    num_blocks: int = 65536,
    sampling: SamplingParams = GREEDY,
) -> Counted:
    """Answers the prompts together, with drafts or without. `clock`: that of the drafter, if it has one; `sampling`:
    what the answers were sampled with, for drafters that sample.

    Raises ValueError if the answers are other ones.
    """
    known = {str(number): list(answer) for number, answer in enumerate(answers)}
    config = EngineConfig.model_validate(
        {"kind": "simulated", "num_blocks": num_blocks, "prefix_cache": False}
    )
    clock = clock or VirtualTime()
    began_s = clock.now
    runner = KnownAnswers(config, known, vocabulary_size, clock)
    core = EngineCore(runner, config, tokenizer, clock, drafter)
    for name, prompt in zip(known, prompts, strict=True):
        stop = StopParams(max_tokens=len(known[name]), ignore_eos=True)
        core.add_request(EngineRequest(name, tuple(prompt), sampling, stop))
    given: dict[str, list[int]] = {name: [] for name in known}
    while core.has_work():
        for output in core.step().outputs:
            given[output.request_id] += output.token_ids
    core.close()
    if given != known:
        raise ValueError("drafts changed an answer")
    return Counted(clock.now - began_s, runner.steps, runner.rows)
