"""Tapes of steps that only decode, one for each size of batch in `tape_sizes`; a step takes the next larger one.

They are made when they are first needed. The first one is compared with the model's own pass on the first step that it
is for, which is the warm-up's.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import torch

from engine.cpu.arena import Arena
from engine.cpu.decode_inputs import DecodeInputs
from engine.cpu.kernels import CpuKernels
from engine.cpu.tape import CANNOT_BE_NOTED, Recording, Tape
from engine.model_linears import relative_difference
from engine.runner import ScheduledSequence
from splitserve.logs import log_event

MOST_ROWS = 256
"""Larger batches have no tape."""
FIRST_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64)
FURTHER_STEP = 16
MAX_DIFFERENCE = 0.05
"""Of logits in bfloat16, relative norm: the kernels may round a value to its other neighbour."""


def tape_sizes(most: int) -> list[int]:
    """Rows of each tape for batches of up to `most`."""
    most = min(most, MOST_ROWS)
    sizes = [*FIRST_SIZES, *range(FIRST_SIZES[-1] + FURTHER_STEP, MOST_ROWS + FURTHER_STEP, FURTHER_STEP)]
    return sizes[: bisect.bisect_left(sizes, most) + 1]


class DecodeTapes:
    """Makes tapes and plays them."""

    def __init__(
        self,
        kernels: CpuKernels,
        inputs: DecodeInputs,
        compute: Callable[[int], torch.Tensor],
        eager: Callable[[Sequence[ScheduledSequence]], torch.Tensor],
        most_rows: int,
        arena: Arena,
    ) -> None:
        """`compute` runs the model on the first rows of `inputs`, `eager` on a batch; logits `[rows, vocabulary]`."""
        self._kernels, self._inputs = kernels, inputs
        self._compute, self._eager = compute, eager
        self._sizes = tape_sizes(most_rows)
        self._arena = arena
        self._works = True
        self.tapes: dict[int, Tape] = {}
        """By size."""

    def logits(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor | None:
        """Logits `[sequences, vocabulary]` of sequences that compute one token each; overwritten by the next step.

        None where there is no tape.
        """
        index = bisect.bisect_left(self._sizes, len(batch))
        if not self._works or index == len(self._sizes):
            return None
        size = self._sizes[index]
        if size not in self.tapes and not self._make(size, batch):
            return None
        self._inputs.fill(batch)
        return self.tapes[size].play()[: len(batch)]

    def _make(self, size: int, batch: Sequence[ScheduledSequence]) -> bool:
        self._inputs.clear()
        why = None
        try:
            with Recording(self._kernels) as recording:
                logits = self._compute(size)
            tape = recording.tape(logits, self._arena)
            if not self.tapes:
                why = self._differs(tape, batch)
        except CANNOT_BE_NOTED as error:
            why = str(error).partition("\n")[0]
        if why is not None:
            self._works = False
            self.tapes = {}
            log_event("engine.decode_tapes_off", why=why)
            return False
        self.tapes[size] = tape
        return True

    def _differs(self, tape: Tape, batch: Sequence[ScheduledSequence]) -> str | None:
        """What is wrong with a tape, on inputs other than those that it was made with."""
        expected = self._eager(batch).float()
        self._inputs.fill(batch)
        difference = relative_difference(tape.play()[: len(batch)].float(), expected)
        return None if difference <= MAX_DIFFERENCE else f"logits differ by {difference:.3g}"
