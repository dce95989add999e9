"""Tapes of steps that compute one chunk of a prompt, for lengths that come again: long prompts are cut into equal
chunks.

Small operations between the products are a seventh of such a step of 512 tokens, and most of a short one. A tape is
noted down while a step of that length is computed, which takes that step about 0.1 s longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from engine.cpu.arena import Arena
from engine.cpu.kernel_attention import ChunkInputs
from engine.cpu.kernels import CpuKernels
from engine.cpu.tape import CANNOT_BE_NOTED, Recording, Tape
from engine.runner import ScheduledSequence
from splitserve.logs import log_event

MOST_TAPES = 8
SEEN_BEFORE = 1
"""Steps of a length before the next one is noted down."""
COUNTED_STEPS = 4096
"""Then all counts are halved, so that what was frequent once is forgotten."""


class Lengths:
    """Which lengths of chunks are worth a tape: those seen most often."""

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()
        self._steps = 0

    def see(self, length: int) -> None:
        """A step of this length."""
        self._seen[length] += 1
        self._steps += 1
        if self._steps >= COUNTED_STEPS:
            self._seen = Counter({length: count // 2 for length, count in self._seen.items() if count > 1})
            self._steps //= 2

    def makes_room(self, length: int, taped: Collection[int]) -> int | None:
        """Which of these tapes gives way to one of this length, 0 where there is room; None: none is to be made."""
        if self._seen[length] <= SEEN_BEFORE:
            return None
        if len(taped) < MOST_TAPES:
            return 0
        rarest = min(taped, key=lambda other: self._seen[other])
        return rarest if self._seen[length] > self._seen[rarest] else None


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """Inputs of one length: `token_ids` and `positions` `[1, tokens]` int64."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    inputs: ChunkInputs

    @classmethod
    def make(cls, tokens: int, columns: int) -> ChunkStep:
        """For so many tokens; `columns`: blocks of a sequence at most."""
        zeros = torch.zeros(2, 1, tokens, dtype=torch.int64)
        return cls(zeros[0], zeros[1], ChunkInputs(columns))

    def fill(self, sequence: ScheduledSequence, block_size: int) -> None:
        """Takes a sequence's next chunk, of this length."""
        begin, end = sequence.num_computed, sequence.num_computed + sequence.num_new
        self.token_ids[0] = torch.tensor(sequence.token_ids[begin:end])
        self.positions[0] = torch.arange(begin, end)
        self.inputs.fill(end, sequence.block_ids[: -(-end // block_size)])


class ChunkTapes:
    """Counts lengths, makes tapes, plays them."""

    def __init__(
        self,
        kernels: CpuKernels,
        compute: Callable[[ChunkStep], torch.Tensor],
        arena: Arena,
        columns: int,
        block_size: int,
    ) -> None:
        """`compute` runs the model on a chunk and returns its last token's logits `[1, vocabulary]`."""
        self._kernels, self._compute, self._arena = kernels, compute, arena
        self._columns, self._block_size = columns, block_size
        self._lengths = Lengths()
        self._works = True
        self.tapes: dict[int, tuple[ChunkStep, Tape]] = {}
        """By tokens of the chunk."""

    def logits(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor | None:
        """Logits `[1, vocabulary]` of a chunk's last token, overwritten by the next step; None without a tape."""
        (sequence,) = batch
        if not self._works:
            return None
        self._lengths.see(sequence.num_new)
        found = self.tapes.get(sequence.num_new)
        if found is not None:
            step, tape = found
            step.fill(sequence, self._block_size)
            return tape.play()
        leaves = self._lengths.makes_room(sequence.num_new, self.tapes)
        if leaves is None:
            return None
        self.tapes.pop(leaves, None)
        return self._make(sequence)

    def _make(self, sequence: ScheduledSequence) -> torch.Tensor | None:
        step = ChunkStep.make(sequence.num_new, self._columns)
        step.fill(sequence, self._block_size)
        try:
            with Recording(self._kernels) as recording:
                logits = self._compute(step)
            tape = recording.tape(logits, self._arena)
        except CANNOT_BE_NOTED as error:
            self._works = False
            log_event("engine.chunk_tapes_off", why=str(error).partition("\n")[0])
            return None
        self.tapes[sequence.num_new] = step, tape
        return logits
