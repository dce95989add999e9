"""Runs a `transformers` model over paged KV, one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from engine.backends.cpu.kernels import CpuKernels
from engine.backends.interface import StepLogits
from engine.backends.select import make_forward
from engine.core.model_runner import (
    DEFAULT_STEP_TOKENS,
    ModelRunner,
    PendingStep,
    StepShape,
    draft_rows,
    of_sequences,
    sample_in_order,
)
from engine.core.types import ModelFacts, RowsFailedError, SampledToken, ScheduledSequence
from engine.kv_cache.axis_orders import BlockConverter
from engine.kv_cache.kv_dtype import kv_dtype
from engine.kv_cache.memory import KvCacheMemory, choose_num_blocks
from engine.kv_cache.storages import HostCopy, host_copy
from engine.model.loaded_model import LoadedModel
from engine.model.named_weights import NamedWeights
from engine.runner.fp8_wire import Fp8Wire
from engine.runner.memory_profile import CudaMemory, with_kv_memory
from engine.runner.sampler import NanLogitsError, sample
from engine.runner.sampling_row import SamplingRow
from engine.runner.self_test.device_checks import EXPERIMENTAL, self_tested
from engine.runner.structured_output import Mask, MaskFiller
from engine.runner.weights import load_weights
from kv_transfer.layout import FP8_E4M3, SAME, KvLayout
from kv_transfer.transports.transport import VRAM, KvMemoryRegion
from kv_transfer.weights.taker import WeightsSource
from kv_transfer.wire_format import KvWire, PlainWire
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.models.sources import ModelSource


class TorchRunner(ModelRunner):
    """A model with its KV blocks: computes scheduled sequences and samples tokens."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        wire_dtype: str = SAME,
        kernels: CpuKernels | None = None,
        beside_bytes: int = 0,
    ) -> None:
        """`kernels` are those that the model was loaded with, if any. `beside_bytes`: memory that somebody else takes
        for each KV block."""
        self.facts = _facts(model.facts, config)
        self.layout = kv_layout(model, config)
        self.work = model.work
        if self.work is not None:
            kv_token_bytes = self.layout.block_bytes // self.layout.block_size_tokens
            self.work = replace(self.work, kv_token_bytes=kv_token_bytes)
        self._device = model.device
        self._module = model.module
        if model.tensors:
            named = model.tensors, model.fingerprint, model.form, model.content
            self.named_weights = NamedWeights(model.module, *named)
        self._weights: HostCopy | None = None
        """Where the weights are while the worker sleeps, if not on their device."""
        self._context = model.context
        self._samples_on_host = config.device_sampling == "off"
        self.overlaps = model.device.type == "cuda"
        narrow = wire_dtype == FP8_E4M3
        wire_bytes = replace(self.layout, wire_dtype=wire_dtype).block_bytes if narrow else 0
        num_blocks = choose_num_blocks(config, self.layout, wire_bytes + beside_bytes)
        also = num_blocks * (wire_bytes + beside_bytes) + (config.kv_host_tier_bytes or 0)
        self._pool = KvCacheMemory(self.layout, num_blocks, model.device, also)
        self._wire: KvWire = Fp8Wire(self._pool) if narrow else self._plain_wire()
        self._forward = make_forward(model, self._pool, config, self.facts.context_tokens, kernels)
        self._mask_filler = MaskFiller(self.facts.vocabulary_size)

    @property
    def num_blocks(self) -> int:
        """See `ModelRunner.num_blocks`."""
        return self._pool.num_blocks

    @property
    def pool_memory(self) -> KvMemoryRegion:
        """See `ModelRunner.pool_memory`."""
        return self._pool.memory()

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """See `ModelRunner.read_blocks`."""
        return self._pool.read_blocks(block_ids)

    @property
    def wire(self) -> KvWire:
        """See `ModelRunner.wire`."""
        return self._wire

    def _plain_wire(self) -> KvWire:
        if self._pool.scales is not None:
            return PlainWire(self._pool.memory, self.read_blocks)
        pieces = self._pool.tensor.flatten(2)
        layers = [pieces[:, layer] for layer in range(self.layout.num_layers)]
        return PlainWire(self._pool.memory, self.read_blocks, BlockConverter(self.layout, layers))

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """See `ModelRunner.execute`. Raises NanLogitsError and GrammarFailedError, whose `rows` index `batch`.

        A step may be run again, whole or without some of its sequences.
        """
        return self.begin(batch)()

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        """See `ModelRunner.begin`. When it returns, the model has run on cpu, and has been queued on a GPU."""
        if not batch:
            return list
        rows = draft_rows(batch)
        with torch.inference_mode():
            return partial(self._finish, rows, self._forward.logits(rows))

    def _finish(self, rows: Sequence[ScheduledSequence], logits: StepLogits) -> list[SampledToken | None]:
        with torch.inference_mode():
            try:
                # On a GPU the masks are computed while the model runs.
                masks = self._mask_filler.masks(rows)
                if self._samples_on_host:
                    logits = StepLogits(logits.values.cpu(), logits.order)
                return sample_in_order(rows, masks, _Sampling(rows, logits, masks))
            except RowsFailedError as error:
                if len(rows) == 1:
                    raise
                raise of_sequences(error, rows) from None
            finally:
                self._forward.finish()

    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        """See `ModelRunner.poll_while_computing`."""
        self._forward.poll_while_computing(poll)

    @property
    def speedup(self) -> float:
        """See `ModelRunner.speedup`."""
        return self._forward.speedup

    @property
    def shares_cores(self) -> bool:
        """See `ModelRunner.shares_cores`."""
        return self._forward.shares_cores

    @property
    def prepared(self) -> bool:
        """See `ModelRunner.prepared`."""
        return self._forward.prepared

    @property
    def mixes_steps(self) -> bool:
        """See `ModelRunner.mixes_steps`."""
        mixes = self._forward.mixes_steps
        return super().mixes_steps if mixes is None else mixes

    @property
    def prepares_steps(self) -> bool:
        """See `ModelRunner.prepares_steps`."""
        return self._forward.prepares_steps

    def first_steps(self, max_step_tokens: int) -> Sequence[StepShape]:
        """See `ModelRunner.first_steps`."""
        return self._forward.first_steps(max_step_tokens)

    def populate(self) -> bool:
        """See `ModelRunner.populate`."""
        return self._pool.populate() or self._wire.populate()

    def give_up_kv(self) -> None:
        """See `ModelRunner.give_up_kv`."""
        self._forward.forget_kv()
        self._pool.give_up()
        self._wire.give_up()
        if self._device.type == "cuda":
            # On cpu weights stay: they are mapped memory of the host that they would be moved to.
            self._weights = host_copy([*self._module.parameters(), *self._module.buffers()])

    @property
    def given_up_bytes(self) -> int:
        """See `ModelRunner.given_up_bytes`."""
        on_cpu = self._device.type == "cpu"
        return self._pool.total_bytes + self._wire.own_bytes if on_cpu else 0

    def take_kv_back(self) -> None:
        """See `ModelRunner.take_kv_back`."""
        if self._weights is not None:
            self._weights.bring_back()
            self._weights = None
        self._pool.take_back()
        self._wire.take_back()
        self._forward.take_memory_back()

    def rest(self) -> None:
        """See `ModelRunner.rest`."""
        self._forward.rest()

    def take_cores(self) -> None:
        """See `ModelRunner.take_cores`."""
        self._forward.take_cores()

    def demand(self) -> int | None:
        """See `ModelRunner.demand`."""
        return self._forward.demand()

    def is_lent(self) -> bool:
        """See `ModelRunner.is_lent`."""
        return self._forward.is_lent()

    def close(self) -> None:
        """Releases the pool and the weights."""
        self._forward.close()
        if self._weights is not None:
            self._weights.close()
        self.named_weights = None
        del self._forward, self._wire, self._pool, self._module, self._weights
        if self._device.type == "cuda":
            del self._context.backend  # it has views of the pool
            torch.cuda.empty_cache()


class _Sampling:
    """Samples rows of a step; `rows` of an error index the step, not the logits."""

    def __init__(
        self, rows: Sequence[ScheduledSequence], logits: StepLogits, masks: Mapping[int, Mask]
    ) -> None:
        self._rows, self._masks, self._values = rows, masks, logits.values
        self._order = logits.order
        self._place = {row: place for place, row in enumerate(logits.order)}
        self._wait_argmax = logits.argmax
        self._argmax: list[int] | None = None

    def __call__(self, rows: list[int]) -> list[SampledToken]:
        places = sorted(self._place[row] for row in rows)
        order = [self._order[place] for place in places]
        sampling = [SamplingRow.of(self._rows[row], self._masks.get(row)) for row in order]
        values = self._values if len(places) == len(self._order) else self._values[places]
        try:
            sampled = sample(values, sampling, self._argmax_of(places))
        except RowsFailedError as error:
            failed = tuple(sorted(order[place] for place in error.rows))
            message = error.message
            if isinstance(error, NanLogitsError):
                message = f"logits are not finite: {', '.join(self._rows[row].request_id for row in failed)}"
            raise type(error)(message, failed, reason=error.reason) from None
        token_of = dict(zip(order, sampled, strict=True))
        return [token_of[row] for row in rows]

    def _argmax_of(self, places: list[int]) -> Callable[[], list[int]] | None:
        if (wait := self._wait_argmax) is None:
            return None

        def wanted() -> list[int]:
            if self._argmax is None:
                self._argmax = wait()
            return [self._argmax[place] for place in places]

        return wanted


def kv_layout(model: LoadedModel, config: EngineConfig) -> KvLayout:
    """The layout of a model's KV blocks."""
    return KvLayout(
        model_fingerprint=model.fingerprint,
        dtype=kv_dtype(config, model.dtype),
        block_size_tokens=config.block_size_tokens,
        num_layers=model.attention.num_layers,
        num_kv_heads=model.attention.num_kv_heads,
        head_dim=model.attention.head_dim,
        quantization=config.quantization,
    )


def _facts(facts: ModelFacts, config: EngineConfig) -> ModelFacts:
    limit = config.context_tokens
    if limit is None:
        return facts
    if limit > facts.context_tokens:
        message = f"engine.context_tokens: {limit} is more than the model's own {facts.context_tokens}"
        raise ConfigError(message, field="engine.context_tokens")
    return ModelFacts(limit, facts.vocabulary_size, facts.eos_token_ids)


def build_torch_runner(
    config: EngineConfig,
    source: ModelSource,
    progress: Callable[[float], None],
    wire_dtype: str = SAME,
    loaded: Callable[[str], None] = lambda origin: None,
    beside_bytes: int = 0,
    peer: WeightsSource | None = None,
) -> TorchRunner:
    """Loads a model and allocates its KV blocks; sets the number of compute threads of the process.

    `loaded` is called between the two, with where the weights came from. `beside_bytes`: as for `TorchRunner`; `peer`:
    as for `load_weights`.

    Raises UnavailableError, UnsupportedModelError and ConfigError as `load_model`, `choose_num_blocks`,
    `kv_dtype`, `check_wire_dtype`, `choose_backend` and `check_quantization`; the last four before anything is loaded.
    """
    model, kernels, origin = load_weights(config, source, progress, wire_dtype, peer)
    loaded(origin)
    if model.device.type == "cuda":
        log_event("engine.experimental", level=logging.WARNING, device=str(model.device), why=EXPERIMENTAL)
        config = self_tested(config, model)
    return make_torch_runner(model, config, wire_dtype, kernels, beside_bytes)


def make_torch_runner(
    model: LoadedModel,
    config: EngineConfig,
    wire_dtype: str = SAME,
    kernels: CpuKernels | None = None,
    beside_bytes: int = 0,
) -> TorchRunner:
    """The runner of a loaded model; on cuda with as much KV as `device_memory_share` leaves, unless that is set."""
    if model.device.type == "cuda":
        step_tokens = config.max_step_tokens or DEFAULT_STEP_TOKENS[VRAM]
        trial = partial(TorchRunner, model, wire_dtype=wire_dtype)
        config = with_kv_memory(config, step_tokens, trial, CudaMemory(model.device))
    return TorchRunner(model, config, wire_dtype, kernels, beside_bytes)
