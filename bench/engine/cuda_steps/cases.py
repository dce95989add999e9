"""The steps that `python -m bench.engine.cuda_steps` times, their turns, and what comes of the times. Pure."""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from statistics import median

from bench.engine.turns import GREEDY, TOKENS
from engine.core.types import ScheduledSequence

BLOCK = 16
CHUNK_TOKENS = 2048
_SIZES = {"decode": r"(\d+)x(\d+)()", "prefill": r"()()(\d+)", "mixed": r"(\d+)x(\d+)\+(\d+)"}
"""By phase: batch, context and prompt."""
_TABLES = count(1)


@dataclass(frozen=True, slots=True)
class StepCase:
    """Sequences of one step: `batch` that decode after `context` tokens, and a prompt of `prompt` tokens or none."""

    name: str
    batch: int
    context: int
    prompt: int

    @property
    def num_sequences(self) -> int:
        """Those that decode, and the one with the prompt."""
        return self.batch + bool(self.prompt)

    @property
    def num_blocks(self) -> int:
        """KV blocks of all sequences."""
        return sum(-(-length // BLOCK) for length, _ in self._lengths())

    def _lengths(self) -> list[tuple[int, int]]:
        """Tokens of each sequence, and those computed before."""
        decodes = [(self.context, self.context - 1)] * self.batch
        return decodes + ([(self.prompt, 0)] if self.prompt else [])

    def sequences(self) -> list[ScheduledSequence]:
        """As a scheduler would have them; blocks are in no order, as after hours of service."""
        pick = random.Random(0)
        blocks = pick.sample(range(self.num_blocks), self.num_blocks)
        found = []
        for index, (length, computed) in enumerate(self._lengths()):
            mine = [blocks.pop() for _ in range(-(-length // BLOCK))]
            tokens = [pick.choice(TOKENS) for _ in range(length)]
            name, table = f"{self.name}-{index}", next(_TABLES)
            new = length - computed
            found.append(
                ScheduledSequence(
                    name, tokens, computed or length, computed, new, mine, True, GREEDY, table_id=table
                )
            )
        return found


def prompts_of(steps: Sequence[ScheduledSequence]) -> Iterator[ScheduledSequence]:
    """Steps that write the KV that these read, a chunk of one sequence each."""
    for step in steps:
        for start in range(0, step.num_computed, CHUNK_TOKENS):
            new = min(CHUNK_TOKENS, step.num_computed - start)
            yield step._replace(num_computed=start, num_new=new, sample=False)


def parse_case(text: str) -> StepCase:
    """`decode:BATCHxCONTEXT`, `prefill:TOKENS` or `mixed:BATCHxCONTEXT+TOKENS`. Raises argparse.ArgumentTypeError."""
    phase, _, sizes = text.partition(":")
    found = re.fullmatch(_SIZES[phase], sizes, re.ASCII) if phase in _SIZES else None
    parts = found.groups() if found else ("0",)
    if not all(1 <= int(part) <= 1 << 16 for part in parts if part):
        raise argparse.ArgumentTypeError(
            f"{text} is neither decode:BATCHxCONTEXT, prefill:TOKENS nor mixed:BATCHxCONTEXT+TOKENS"
        )
    batch, context, prompt = (int(part or 0) for part in parts)
    return StepCase(text, batch, context, prompt)


def turns_of(count: int) -> Iterator[tuple[bool, ...]]:
    """Whether with it, in the order of each turn: A B, B A, A B, ..."""
    for turn in range(count):
        yield (True, False) if turn % 2 == 0 else (False, True)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One case; see the module. `steps`: of each kind."""

    case: str
    steps: int
    with_ms: float
    without_ms: float
    ratio: float


def row_of(case: str, with_s: Sequence[Sequence[float]], without_s: Sequence[Sequence[float]]) -> StepRow:
    """From each kind's step times, by turn."""
    ratios = [median(slow) / median(fast) for fast, slow in zip(with_s, without_s, strict=True)]
    return StepRow(
        case=case,
        steps=sum(map(len, with_s)),
        with_ms=round(median(chain.from_iterable(with_s)) * 1e3, 3),
        without_ms=round(median(chain.from_iterable(without_s)) * 1e3, 3),
        ratio=round(median(ratios), 3),
    )


def step_times(
    step: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Of steps one after the other for so long, at least two."""
    times: list[float] = []
    began = clock()
    while len(times) < 2 or clock() - began < seconds:
        before = clock()
        step()
        times.append(clock() - before)
    return times
