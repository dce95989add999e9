"""Tapes of steps that compute one chunk of a prompt, for lengths that come again: long prompts are cut into equal
chunks.

Small operations between the products are a seventh of such a step. A tape is noted down while a step of that length is
computed, so making one costs hardly more than the step.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
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
MOST_LENGTHS = 1024
"""Lengths that are counted; then counting begins anew."""
RECORDING_BYTES = 1 << 30
"""All results of a step must fit in while it is noted down."""


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
        self._seen: Counter[int] = Counter()
        self._works = True
        self.tapes: OrderedDict[int, tuple[ChunkStep, Tape]] = OrderedDict()
        """By tokens of the chunk, the one that was played last at the end."""

    def logits(self, batch: Sequence[ScheduledSequence], token_bytes: int) -> torch.Tensor | None:
        """Logits `[1, vocabulary]` of a chunk's last token, overwritten by the next step; None where there is no tape.

        `token_bytes`: of all results of one token's step.
        """
        (sequence,) = batch
        tokens = sequence.num_new
        found = self.tapes.get(tokens)
        if found is not None:
            self.tapes.move_to_end(tokens)
            step, tape = found
            step.fill(sequence, self._block_size)
            return tape.play()
        if not self._works or tokens * token_bytes > RECORDING_BYTES:
            return None
        if len(self._seen) >= MOST_LENGTHS:
            self._seen.clear()
        self._seen[tokens] += 1
        return self._make(sequence) if self._seen[tokens] > SEEN_BEFORE else None

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
        if len(self.tapes) > MOST_TAPES:
            self.tapes.popitem(last=False)
        return logits
