"""Replayed steps against the same steps computed one operation after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.forward import PagedAttention
from engine.backends.cuda.staging import PlacedStep, Staging, StepInputs, StepSize
from engine.backends.interface import flatten
from engine.core.types import SamplingParams, ScheduledSequence
from engine.kv_cache.memory import DTYPES, KvCacheMemory
from engine.model.attention_interface import AttentionContext, LayerState
from engine.model.probe import AttentionKind
from engine.runner.self_test.attention_check import LAYERS, KvShape, MakeAttention, require_close
from engine.runner.self_test.verdict import WrongResultError

MAX_ROWS = 4
MAX_CHUNKS = 2
MAX_BLOCKS = 5
STEPS = ((1, 0), (2, 1), (3, 0), (4, 2), (0, 1), (2, 0))
"""Of each step, sequences that decode and chunks of prompts."""
CHUNK_TOKENS = 3
VOCABULARY = 64


class ReplayedSteps(Protocol):
    """What `engine.backends.cuda.step_graphs.CudaStepGraphs` is to the check."""

    @property
    def captured(self) -> list[StepSize]:
        """Sizes that have a graph."""

    def logits(self, step: PlacedStep) -> torch.Tensor | None:
        """Logits of the sampled rows of a step."""


Compute = Callable[[StepInputs], torch.Tensor]
Capture = Callable[[Compute, torch.device, int, int, DeviceBlockTable], ReplayedSteps]
"""From a computation, device, most rows that decode, most tokens of chunks and the block table to its captured
steps."""


def check_graphs(
    capture: Capture, make: MakeAttention, shape: KvShape, kind: AttentionKind, device: torch.device
) -> None:
    """Sequences of different lengths decode a few tokens, in batches that do and do not fill a graph, some of them
    beside chunks of prompts.

    Logits must be close, and the KV written exactly that of the eager steps, whose block tables are sent anew each
    time: padded rows write nothing. Raises WrongResultError.
    """
    sequences = MAX_ROWS + MAX_CHUNKS
    pools = [shape.pool(sequences * MAX_BLOCKS, device) for _ in range(2)]
    model = _OneLayer(shape, kind, device)
    kept, anew = (DeviceBlockTable(sequences, MAX_BLOCKS, shape.block_size, device) for _ in range(2))
    most = MAX_ROWS, MAX_CHUNKS * CHUNK_TOKENS
    replayed = capture(model.over(make(pools[0]), pools[0]), device, *most, kept)
    if not replayed.captured:
        raise WrongResultError("nothing could be captured; engine.cuda_graphs_off in the log says why")
    eager, staging = model.over(make(pools[1]), pools[1]), Staging(8, device)
    for step in range(len(STEPS)):
        flat = flatten(_batch(step, shape.block_size))
        what = f"{flat.num_decode} rows" + (f" and {flat.num_prefill} chunks" if flat.num_prefill else "")
        found = replayed.logits(kept.place(flat))
        if found is None:
            raise WrongResultError(f"no graph for {what}")
        nameless = [sequence._replace(table_id=0) for sequence in flat.sequences]
        expected = eager(staging.stage(anew.place(flatten(nameless))))
        require_close(found, expected.cpu(), shape.dtype, f"step {step} of {what}")
    if not torch.equal(pools[0].bytes, pools[1].bytes):
        raise WrongResultError("replayed steps wrote other KV than eager ones")


def _batch(step: int, block_size: int) -> list[ScheduledSequence]:
    """Sequences that decode, each further by one token with every step, and so across the end of a block;
    some rows have no logits. Chunks go on from step to step."""
    rows, chunks = STEPS[step]
    batch = []
    for number in [*range(rows), *range(MAX_ROWS, MAX_ROWS + chunks)]:
        new = 1 if number < MAX_ROWS else CHUNK_TOKENS
        computed = step * new
        if number < MAX_ROWS:
            computed += number * block_size + block_size - len(STEPS) // 2
        tokens = [(1 + 7 * place + number + step) % VOCABULARY for place in range(computed + new)]
        blocks = [MAX_BLOCKS * number + block for block in range(MAX_BLOCKS)]
        batch.append(
            ScheduledSequence(
                "",
                tokens,
                1,
                computed,
                new,
                blocks,
                step + number != 3,
                SamplingParams(),
                table_id=number + 1,
            )
        )
    return batch


class _OneLayer:
    """A model of one attention layer: token ids to query, key and value, and the output of sampled rows to logits."""

    def __init__(self, shape: KvShape, kind: AttentionKind, device: torch.device) -> None:
        numbers = torch.Generator().manual_seed(3)
        self._shape, self._kind = shape, kind
        heads = (kind.heads, shape.kv_heads, shape.kv_heads)
        dtype = DTYPES[shape.dtype]
        self._tables = [
            torch.randn(VOCABULARY, count, shape.head_dim, generator=numbers).to(device, dtype)
            for count in heads
        ]
        wide = kind.heads * shape.head_dim
        # In float32, so that no rounding of a logit exceeds what attention may differ by.
        self._output = (torch.randn(wide, VOCABULARY, generator=numbers) / wide**0.5).to(device)

    def over(self, backend: PagedAttention, pool: KvCacheMemory) -> Compute:
        """The computation with a pool of its own, which starts empty."""
        pool.tensor.fill_(0.0)
        return lambda inputs: self._compute(backend, inputs)

    def _compute(self, backend: PagedAttention, inputs: StepInputs) -> torch.Tensor:
        query, key, value = (table[inputs.token_ids[0]].transpose(0, 1) for table in self._tables)
        backend.inputs = inputs
        layer = LayerState(LAYERS - 1, AttentionContext(), self._kind.window, True)
        attended = backend.attend(layer, query, key, value, self._shape.head_dim**-0.5, self._kind.softcap)
        logits: torch.Tensor = attended.flatten(1)[inputs.sample_rows].float() @ self._output
        return logits
