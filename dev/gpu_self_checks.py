"""Checks of a device against references: attention, graphs, sampling, transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.forward import AsyncArgmax, PagedAttention
from engine.backends.cuda.staging import Staging, StepInputs
from engine.backends.cuda.step_graphs import Compute, CudaStepGraphs
from engine.backends.interface import flatten
from engine.core.model_runner import SampledToken, SamplingParams, ScheduledSequence
from engine.kv_cache.memory import DTYPES, KvCacheMemory
from engine.model.attention_interface import AttentionContext, LayerState, NewTokens
from engine.model.probe import AttentionKind
from engine.runner.sampler import sample, sample_rows
from engine.runner.sampling_row import SamplingRow
from kv_transfer.layout import KvLayout
from kv_transfer.transports.transport import Transport
from splitserve.errors import SplitserveError, TransferError
from splitserve.generation.kv_blocks import blocks_for


class WrongResultError(AssertionError):
    """The device's result differs from the reference."""


MakeAttention = Callable[[KvCacheMemory], PagedAttention]
LAYERS = 2
LONG_CONTEXT = 1500
"""Tokens; enough that the keys of a decode row are split over several programs."""
MAX_WINDOW = 8192
TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}
"""Maximum difference of an element; the inputs are normally distributed."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shapes that kernels are compiled for, besides the kind of layer. `dtype`: "float32" or "bfloat16"."""

    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def pool(self, num_blocks: int, device: torch.device) -> KvCacheMemory:
        """A small pool of blocks of this shape."""
        layout = KvLayout("self-test", self.dtype, self.block_size, LAYERS, self.kv_heads, self.head_dim)
        return KvCacheMemory(layout, num_blocks, device)


def check_attention(
    make: MakeAttention,
    shape: KvShape,
    kinds: Sequence[AttentionKind],
    device: torch.device,
    long_context: int = LONG_CONTEXT,
) -> None:
    """Decode rows and chunks at and around the ends of blocks, and a long context, for each kind of layer.

    The pool is full of NaN but for the KV of the sequences. Raises WrongResultError.
    """
    for kind in kinds:
        beyond = min(kind.window or 0, MAX_WINDOW) + shape.block_size + 1
        _check_kind(make, shape, kind, device, max(long_context, beyond))


def _check_kind(
    make: MakeAttention, shape: KvShape, kind: AttentionKind, device: torch.device, long_context: int
) -> None:
    """Checks sequences with random KV for one kind of layer. Raises WrongResultError."""
    numbers, size = torch.Generator().manual_seed(7), shape.block_size

    def random(*sizes: int) -> torch.Tensor:
        """On the host, rounded to the dtype of the model."""
        return torch.randn(sizes, generator=numbers).to(DTYPES[shape.dtype])

    # Tokens computed before, and now. Rows of one token come first, so the results have this order.
    steps = [(size - 1, 1), (size, 1), (long_context, 1), (0, size + 1), (3, size + 3)]
    counts = [blocks_for(computed + new, size) for computed, new in steps]
    pool = shape.pool(sum(counts) + 1, device)
    pool.tensor.fill_(float("nan"))
    free = torch.randperm(sum(counts) + 1, generator=numbers).tolist()
    batch, expected, new_rows = [], [], []
    for (computed, new), count in zip(steps, counts, strict=True):
        blocks, free = free[:count], free[count:]
        total = computed + new
        kv = random(2, shape.kv_heads, total, shape.head_dim)
        query = random(kind.heads, new, shape.head_dim)
        _write(pool, blocks, kv[:, :, :computed])
        batch.append(ScheduledSequence("", [0] * total, 1, computed, new, blocks, True, SamplingParams()))
        expected.append(reference(query, kv, kind))
        new_rows.append((query, *kv[:, :, computed:]))
    # As a model passes them: heads beside each other in a token's row.
    parts = (torch.cat(part, 1).transpose(0, 1) for part in zip(*new_rows, strict=True))
    tokens = NewTokens(*(part.contiguous().to(device).transpose(0, 1) for part in parts))
    backend = make(pool)
    table = DeviceBlockTable(len(batch), max(counts), size, device)
    backend.inputs = Staging(8, device).stage(table.place(flatten(batch)))
    layer = LayerState(1, AttentionContext(), kind.window, True)
    result = backend.attend(layer, tokens, shape.head_dim**-0.5, kind.softcap)
    require_close(result, torch.cat(expected), shape.dtype, _shown(kind))


def _write(pool: KvCacheMemory, blocks: Sequence[int], kv: torch.Tensor) -> None:
    """Puts `kv` `[2, kv_heads, tokens, head_dim]` into the blocks of layer 1."""
    size = pool.layout.block_size_tokens
    for number in range(blocks_for(kv.shape[2], size)):
        part = kv[:, :, number * size : (number + 1) * size]
        place = blocks[number], 1, slice(None), slice(None), slice(part.shape[2])
        pool.tensor[place] = part.to(pool.device)


def reference(query: torch.Tensor, kv: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    """Attention of the last tokens of a sequence in float64: `query` `[heads, new, head_dim]`, `kv` `[2, kv_heads,
    tokens, head_dim]` to `[new, heads, head_dim]`."""
    heads, new, head_dim = query.shape
    keys, values = kv.double().repeat_interleave(heads // kv.shape[1], 1)
    scores = query.double() @ keys.transpose(1, 2) * head_dim**-0.5
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    places = torch.arange(kv.shape[2])
    rows = places[-new:, None]
    hidden = places > rows
    if kind.window is not None:
        hidden |= places <= rows - kind.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1)


def require_close(result: torch.Tensor, expected: torch.Tensor, dtype: str, what: str) -> None:
    """Raises WrongResultError where an element of `result` differs by more than the dtype's tolerance, or is a NaN."""
    difference = (result.cpu().double() - expected.double()).abs().max().item()
    if not difference <= TOLERANCES[dtype]:  # a NaN is not
        raise WrongResultError(f"{what}: off by {difference:.2g}, {TOLERANCES[dtype]:g} is allowed")


def _shown(kind: AttentionKind) -> str:
    window = "" if kind.window is None else f", window {kind.window}"
    softcap = "" if kind.softcap is None else f", soft cap {kind.softcap:g}"
    return f"{kind.heads} heads{window}{softcap}"


MAX_ROWS = 4
MAX_BLOCKS = 5
STEPS = (1, 2, 3, 4, 2)
"""For each step, the number of sequences that decode."""
VOCABULARY = 64


Capture = Callable[[Compute, torch.device, int, DeviceBlockTable], CudaStepGraphs]
"""Captures the steps of a computation on a device, up to a number of rows, over a block table."""


def check_graphs(
    capture: Capture, make: MakeAttention, shape: KvShape, kind: AttentionKind, device: torch.device
) -> None:
    """Sequences of different lengths decode a few tokens, in batches that do and do not fill a graph.

    Logits must be close, and the KV written exactly that of the eager steps, whose block tables are sent anew each
    time: padded rows write nothing. Raises WrongResultError.
    """
    pools = [shape.pool(MAX_ROWS * MAX_BLOCKS, device) for _ in range(2)]
    model = _OneLayer(shape, kind, device)
    kept, anew = (DeviceBlockTable(MAX_ROWS, MAX_BLOCKS, shape.block_size, device) for _ in range(2))
    replayed = capture(model.over(make(pools[0]), pools[0]), device, MAX_ROWS, kept)
    if not replayed.captured:
        raise WrongResultError("nothing could be captured; engine.cuda_graphs_off in the log says why")
    eager, staging = model.over(make(pools[1]), pools[1]), Staging(8, device)
    for step, rows in enumerate(STEPS):
        flat = flatten(_batch(step, shape.block_size))
        result = replayed.logits(kept.place(flat))
        if result is None:
            raise WrongResultError(f"no graph for {rows} rows")
        nameless = [sequence._replace(table_id=0) for sequence in flat.sequences]
        expected = eager(staging.stage(anew.place(flatten(nameless))))
        require_close(result, expected.cpu(), shape.dtype, f"step {step} of {rows} rows")
    if not torch.equal(pools[0].bytes, pools[1].bytes):
        raise WrongResultError("replayed steps wrote other KV than eager ones")


def _batch(step: int, block_size: int) -> list[ScheduledSequence]:
    """The sequences of a step. They advance by one token each step, across the end of a block; some have no logits."""
    batch = []
    for number in range(STEPS[step]):
        computed = step + number * block_size + block_size - len(STEPS) // 2
        tokens = [(1 + 7 * place + number + step) % VOCABULARY for place in range(computed + 1)]
        blocks = [MAX_BLOCKS * number + block for block in range(MAX_BLOCKS)]
        sampled = step + number != 3
        item = ScheduledSequence("", tokens, 1, computed, 1, blocks, sampled, SamplingParams())
        batch.append(item._replace(table_id=number + 1))
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
        # In float32, so that no rounding of a logit exceeds the tolerance of attention.
        self._output = (torch.randn(wide, VOCABULARY, generator=numbers) / wide**0.5).to(device)

    def over(self, backend: PagedAttention, pool: KvCacheMemory) -> Compute:
        """The computation with a pool of its own, which starts empty."""
        pool.tensor.fill_(0.0)
        return lambda inputs: self._compute(backend, inputs)

    def _compute(self, backend: PagedAttention, inputs: StepInputs) -> torch.Tensor:
        tokens = NewTokens(*(table[inputs.token_ids[0]].transpose(0, 1) for table in self._tables))
        backend.inputs = inputs
        layer = LayerState(LAYERS - 1, AttentionContext(), self._kind.window, True)
        attended = backend.attend(layer, tokens, self._shape.head_dim**-0.5, self._kind.softcap)
        logits: torch.Tensor = attended.flatten(1)[inputs.sample_rows].float() @ self._output
        return logits


SampleRows = Callable[[torch.Tensor, Sequence[SamplingRow]], list[SampledToken | SplitserveError | None]]
Argmax = Callable[[torch.Tensor], Callable[[], list[int]]]
_PARAMETERS: Sequence[SamplingParams] = (
    SamplingParams(),
    SamplingParams(temperature=0.05),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=20, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=4.0, top_p=0.95),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias=((3, 60.0), (5, 50.0)), frequency_penalty=-10.0),
    SamplingParams(temperature=0.0, logprobs=5),
)
_CONTEXT = (1, 2, 3, 3, 5, 5, 5)
_PROMPT_TOKENS = 3
_NEAR = 1e-6
"""Tolerance of log-probabilities: float64 sums of equal numbers in another order."""


def check_sampling(
    vocabulary: int,
    dtype: str,
    device: torch.device,
    on_device: SampleRows = sample_rows,
    argmax: Argmax = AsyncArgmax,
) -> None:
    """Tokens and log-probabilities of random logits with `vocabulary` entries, and the largest logits. Raises
    WrongResultError.

    The largest logit of a row with a NaN must be reported as -1: only its request fails.
    """
    numbers = torch.Generator().manual_seed(11)
    on_host = (3 * torch.randn(len(_PARAMETERS), vocabulary, generator=numbers)).to(DTYPES[dtype])
    rows = [_row(replace(params, seed=seed)) for seed, params in enumerate(_PARAMETERS)]
    expected = sample(on_host, rows)
    for row, (sampled, wanted) in enumerate(zip(on_device(on_host.to(device), rows), expected, strict=True)):
        if not isinstance(sampled, SampledToken) or not _alike(sampled, wanted):
            raise WrongResultError(f"row {row}: sampled {sampled}, the host samples {wanted}")
    greedy = [_row(SamplingParams(temperature=0.0)) for _ in rows]
    best = [token.token_id for token in sample(on_host, greedy)]
    on_host[1, vocabulary // 2] = float("nan")
    best[1] = -1
    largest = argmax(on_host.to(device))()
    if largest != best:
        raise WrongResultError(f"the largest logits are those of {largest}, on the host of {best}")


def _row(params: SamplingParams) -> SamplingRow:
    return SamplingRow(params, _CONTEXT, _PROMPT_TOKENS, len(_CONTEXT), frozenset({7}))


def _alike(sampled: SampledToken, expected: SampledToken) -> bool:
    if sampled.token_id != expected.token_id or sampled.logprob is None or expected.logprob is None:
        return sampled == expected
    mine, theirs = (
        dict(logprob.top) | {-1: logprob.logprob} for logprob in (sampled.logprob, expected.logprob)
    )
    return mine.keys() == theirs.keys() and all(abs(mine[key] - theirs[key]) < _NEAR for key in mine)


BLOCKS = 16
FROM, TO = (3, 4, 5, 9, 1), (10, 11, 2, 7, 0)
"""Blocks in no order, two of them next to each other on both sides."""
LAYOUT = KvLayout("self-test", "bfloat16", block_size_tokens=16, num_layers=2, num_kv_heads=2, head_dim=64)
DONE = b"self-test"
TIMEOUT_S = 20.0
POLL_S = 5e-4


def check_transfer(
    make: Callable[[], Transport],
    device: torch.device,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """One transport writes blocks with a notification to another of this process; both register memory of `device`.

    The bytes must lie in these blocks and nowhere else when the notification is there. Raises WrongResultError,
    TransferError, or what the transport raises.
    """
    writer, owner = make(), make()
    try:
        ours, theirs = (KvCacheMemory(LAYOUT, BLOCKS, device) for _ in range(2))
        numbers = torch.Generator().manual_seed(5)
        for memory in (ours, theirs):
            random = torch.randint(256, memory.bytes.shape, generator=numbers, dtype=torch.uint8)
            memory.bytes.copy_(random)
        expected = theirs.bytes.clone()
        expected[list(TO)] = ours.bytes[list(FROM)]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # transports do not wait for the device's queue
        writer.register_memory(ours.memory())
        endpoint = owner.register_memory(theirs.memory())
        writer.connect(endpoint)
        handle = writer.write(endpoint.agent_id, FROM, TO, DONE)
        _wait(writer, owner, handle, clock, sleep)
        if not torch.equal(theirs.bytes, expected):
            raise WrongResultError("other bytes arrived than were sent")
    finally:
        for transport in (writer, owner):
            with suppress(TransferError):
                transport.close()


def _wait(
    writer: Transport,
    owner: Transport,
    handle: int,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    written, notified, deadline = False, False, clock() + TIMEOUT_S
    while not (written and notified):
        for write in writer.poll().writes:
            if write.handle == handle:
                if write.error is not None:
                    raise TransferError(write.error)
                written = True
        notified = notified or any(message == DONE for _, message in owner.poll().notifications)
        if clock() > deadline:
            missing = "its notification did not arrive" if written else "it did not end"
            raise TransferError(f"{missing} in {TIMEOUT_S:g} s")
        sleep(POLL_S)
