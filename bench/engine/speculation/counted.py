"""What drafts save by count: known answers are given once more in virtual time, where a step takes what its rows take.

Nothing is computed, so neither noise nor other processes have a part in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.engine_core import EngineCore
from engine.core.model_runner import draft_rows, sample_in_order
from engine.core.types import (
    EngineRequest,
    ModelFacts,
    SampledToken,
    SamplingParams,
    ScheduledSequence,
    StopParams,
)
from engine.runner.simulated_runner import SimulatedRunner
from engine.speculation.drafter import Drafter
from splitserve.config.engine import EngineConfig
from splitserve.models.tokenizer import Tokenizer

STEP_S = 7.5e-3
ROW_TIMES = {1: 1.0, 2: 1.01, 4: 1.13, 6: 1.27, 8: 1.40, 12: 2.27, 16: 2.5, 24: 3.1, 32: 3.7}
"""Steps by their number of rows, in steps of one row, for rows of 100 tokens of context and one thread: as measured,
see docs/performance.md. Graphs are of these sizes, so a step takes as long as the next larger."""
_SIZES = sorted(ROW_TIMES)


def step_s(rows: int) -> float:
    """Seconds of a step over so many rows."""
    return STEP_S * ROW_TIMES[_SIZES[bisect_left(_SIZES, rows)]]


class KnownAnswers(SimulatedRunner):
    """Says what is known, and moves its clock by what the rows of a step take; prompts take nothing."""

    def __init__(self, config: EngineConfig, answers: dict[str, list[int]], vocabulary_size: int) -> None:
        super().__init__(config)
        self.facts = ModelFacts(self.facts.context_tokens, vocabulary_size, frozenset())
        self.now = 0.0
        self.steps = self.rows = 0
        self._answers = answers

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """See ModelRunner."""
        rows = draft_rows(batch)
        if all(row.num_new == 1 for row in rows):
            self.steps, self.rows, self.now = (
                self.steps + 1,
                self.rows + len(rows),
                self.now + step_s(len(rows)),
            )
        return sample_in_order(
            rows, (), lambda wanted: [SampledToken(self._next(rows[row])) for row in wanted]
        )

    def _next(self, row: ScheduledSequence) -> int:
        answer = self._answers[row.request_id]
        return answer[min(row.num_computed + row.num_new - row.prompt_tokens, len(answer) - 1)]


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
) -> Counted:
    """Answers the prompts together, with drafts or without. Raises ValueError if the answers are other ones."""
    known = {str(number): list(answer) for number, answer in enumerate(answers)}
    config = EngineConfig.model_validate({"kind": "simulated", "num_blocks": 65536, "prefix_cache": False})
    runner = KnownAnswers(config, known, vocabulary_size)
    core = EngineCore(runner, config, tokenizer, lambda: runner.now, drafter)
    for name, prompt in zip(known, prompts, strict=True):
        stop = StopParams(max_tokens=len(known[name]), ignore_eos=True)
        core.add_request(EngineRequest(name, tuple(prompt), SamplingParams(temperature=0.0), stop))
    given: dict[str, list[int]] = {name: [] for name in known}
    while core.has_work():
        for output in core.step().outputs:
            given[output.request_id] += output.token_ids
    core.close()
    if given != known:
        raise ValueError("drafts changed an answer")
    return Counted(runner.now, runner.steps, runner.rows)
