"""Tapes of steps that compute one chunk of a prompt, one for each length in `chunk_rows`; a chunk takes the next larger
one, whose last rows are then nobody's.

They are made when they are first needed: noted down while the model computes such a step, which takes that step 50 to
100 ms longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.cpu.arena import Arena
from engine.cpu.kernel_attention import ChunkInputs
from engine.cpu.kernels import CpuKernels
from engine.cpu.tape import CANNOT_BE_NOTED, Recording, Tape
from engine.runner import ScheduledSequence
from splitserve.logs import log_event

MOST_TAPES = 36
"""As many lengths as there are up to 512."""
SHORT_ROWS, SHORT_STEP = 64, 8
"""What is left of a prompt whose beginning is cached is often short."""
STEP, MOST_STEPS = 16, 32


def chunk_rows(tokens: int) -> int:
    """Rows of the tape for a chunk of so many tokens: at most 7 more, from 64 on 15, then a sixteenth."""
    step = SHORT_STEP if tokens <= SHORT_ROWS else STEP
    while tokens > MOST_STEPS * step:
        step *= 2
    return -(-tokens // step) * step


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """Inputs of one length: `token_ids` and `positions` `[1, rows]`, `last` `[1]`: the last token's row; int64."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    inputs: ChunkInputs

    @classmethod
    def make(cls, rows: int, columns: int) -> ChunkStep:
        """For so many tokens; `columns`: blocks of a sequence at most."""
        zeros = torch.zeros(2, 1, rows, dtype=torch.int64)
        return cls(zeros[0], zeros[1], torch.zeros(1, dtype=torch.int64), ChunkInputs(columns))

    def fill(self, sequence: ScheduledSequence, block_size: int) -> None:
        """Takes a sequence's next chunk, of at most this length."""
        begin, tokens = sequence.num_computed, sequence.num_new
        end = begin + tokens
        self.token_ids[0, :tokens] = torch.tensor(sequence.token_ids[begin:end])
        self.token_ids[0, tokens:] = 0
        self.positions[0, :tokens] = torch.arange(begin, end)
        self.positions[0, tokens:] = 0
        self.last[0] = tokens - 1
        self.inputs.fill(end, tokens, sequence.block_ids[: -(-end // block_size)])


class ChunkTapes:
    """Makes tapes and plays them."""

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
        self._works = True
        self.tapes: OrderedDict[int, tuple[ChunkStep, Tape]] = OrderedDict()
        """By rows, the one that was played last at the end."""

    def logits(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor | None:
        """Logits `[1, vocabulary]` of a chunk's last token, overwritten by the next step; None without a tape."""
        (sequence,) = batch
        if not self._works:
            return None
        rows = chunk_rows(sequence.num_new)
        found = self.tapes.get(rows)
        if found is None:
            return self._make(rows, sequence)
        self.tapes.move_to_end(rows)
        step, tape = found
        step.fill(sequence, self._block_size)
        return tape.play()

    def _make(self, rows: int, sequence: ScheduledSequence) -> torch.Tensor | None:
        step = ChunkStep.make(rows, self._columns)
        step.fill(sequence, self._block_size)
        try:
            with Recording(self._kernels) as recording:
                logits = self._compute(step)
            tape = recording.tape(logits, self._arena)
        except CANNOT_BE_NOTED as error:
            self._works = False
            log_event("engine.chunk_tapes_off", why=str(error).partition("\n")[0])
            return None
        self.tapes[rows] = step, tape
        if len(self.tapes) > MOST_TAPES:
            self.tapes.popitem(last=False)
        return logits
