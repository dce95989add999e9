"""The steps that `python -m bench.engine.elementwise` times, their turns, and what comes of the times. Pure."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from statistics import median

from bench.engine.turns import GREEDY, TOKENS
from engine.core.types import ScheduledSequence

BLOCK = 16
CHUNK_TOKENS = 2048
_TABLES = count(1)


@dataclass(frozen=True, slots=True)
class StepCase:
    """Sequences of one step: `batch` that decode after `tokens`, or one whose prompt of `tokens` is computed."""

    name: str
    batch: int
    tokens: int
    decodes: bool

    @property
    def num_blocks(self) -> int:
        """KV blocks of all sequences."""
        return self.batch * -(-self.tokens // BLOCK)

    def sequences(self) -> list[ScheduledSequence]:
        """As a scheduler would have them; blocks are in no order, as after hours of service."""
        pick = random.Random(0)
        blocks = pick.sample(range(self.num_blocks), self.num_blocks)
        each = self.num_blocks // self.batch
        return [
            ScheduledSequence(
                f"{self.name}-{index}",
                [pick.choice(TOKENS) for _ in range(self.tokens)],
                self.tokens - 1 if self.decodes else self.tokens,
                self.tokens - 1 if self.decodes else 0,
                1 if self.decodes else self.tokens,
                blocks[index * each : (index + 1) * each],
                True,
                GREEDY,
                table_id=next(_TABLES),
            )
            for index in range(self.batch)
        ]


def prompts_of(steps: Sequence[ScheduledSequence]) -> Iterator[ScheduledSequence]:
    """Steps that write the KV that these read, a chunk of one sequence each."""
    for step in steps:
        for start in range(0, step.num_computed, CHUNK_TOKENS):
            new = min(CHUNK_TOKENS, step.num_computed - start)
            yield step._replace(num_computed=start, num_new=new, sample=False)


def parse_case(text: str) -> StepCase:
    """`decode:BATCHxCONTEXT` or `prefill:TOKENS`. Raises argparse.ArgumentTypeError."""
    phase, _, sizes = text.partition(":")
    batch, _, tokens = sizes.rpartition("x") if phase == "decode" else ("1", "", sizes)
    numbers = [int(part) if part.isdecimal() else 0 for part in (batch, tokens)]
    if phase not in ("decode", "prefill") or min(numbers) < 1 or max(numbers) > 1 << 16:
        raise argparse.ArgumentTypeError(f"{text} is neither decode:BATCHxCONTEXT nor prefill:TOKENS")
    return StepCase(text, numbers[0], numbers[1], phase == "decode")


def turns_of(count: int) -> Iterator[tuple[bool, ...]]:
    """Whether fused, in the order of each turn: A B, B A, A B, ..."""
    for turn in range(count):
        yield (True, False) if turn % 2 == 0 else (False, True)


@dataclass(frozen=True, slots=True)
class ElementwiseRow:
    """One case; see the module. `steps`: of each kind."""

    case: str
    steps: int
    fused_ms: float
    plain_ms: float
    ratio: float


def row_of(
    case: str, fused_s: Sequence[Sequence[float]], plain_s: Sequence[Sequence[float]]
) -> ElementwiseRow:
    """From each kind's step times, by turn."""
    ratios = [median(plain) / median(fused) for fused, plain in zip(fused_s, plain_s, strict=True)]
    return ElementwiseRow(
        case=case,
        steps=sum(map(len, fused_s)),
        fused_ms=round(median(chain.from_iterable(fused_s)) * 1e3, 3),
        plain_ms=round(median(chain.from_iterable(plain_s)) * 1e3, 3),
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
