"""Estimates for an arriving request: output length, and how much of its prompt is cached.

Made once per request and shared by admission, routing and the signals for autoscaling.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from coordinator.request.inference_request import InferenceRequest
from coordinator.request.observer import RequestObserver
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.workers.prefix_index.hits import PrefixHits, bits
from coordinator.workers.prefix_index.tier_reads import held_prefix, near_slots
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.v1 import prefill_pb2

DEFAULT_OUTPUT_TOKENS = 128.0
"""Expected output length until a request has completed."""
MAX_LENGTH_KEYS = 4096
"""Tenants and sessions whose output lengths are remembered."""
MAX_LEVELS_LOOKED_AT = 12
"""Depths of a prefix at which workers with lower tiers are looked at for an estimate, the greatest first,"""
MAX_LOOKS_A_LEVEL = 2
"""and how many of those that hold as much."""
_MEMORY_ANSWERS = 64
"""Window of the learned means, in requests."""

LengthKey = tuple[str, str, str]
"""(model, tenant, session). An empty session stands for all requests of the tenant."""


@dataclass(slots=True)
class LearnedMean:
    """A running mean: arithmetic over the first values, exponential from `_MEMORY_ANSWERS` on."""

    value: float
    seen: int = 0

    def add(self, value: float) -> None:
        """Adds a value."""
        self.seen = min(self.seen + 1, _MEMORY_ANSWERS)
        self.value += (value - self.value) / self.seen


@dataclass(slots=True)
class ModelMeans:
    """Learned means of the requests for one base model and its adapters."""

    output_tokens: LearnedMean = field(default_factory=lambda: LearnedMean(DEFAULT_OUTPUT_TOKENS))
    cached_share: LearnedMean = field(default_factory=lambda: LearnedMean(0.0))
    """Cached share of the prompt, 0..1, as reported by prefill workers."""


class Estimates(RequestObserver):
    """Learns from every request. The least recently used sessions and tenants are forgotten first."""

    def __init__(self, registry: Registry, max_length_keys: int = MAX_LENGTH_KEYS) -> None:
        self._registry = registry
        self._max_length_keys = max_length_keys
        self._models: dict[str, ModelMeans] = {}
        self._means: OrderedDict[LengthKey, LearnedMean] = OrderedDict()
        self._prefill_slots: dict[int, int] = {}
        """Slots of prefill workers in the prefix index, as a bit set for each block size."""
        self._longest_block = 0
        """Of all workers with a slot, tokens."""
        self._near = self._tiered = 0
        """Bit sets of slots: what is among the KV blocks, and what may be below them."""
        self._by_slot: dict[int, WorkerKey] = {}
        registry.subscribe(self._on_registry_change)

    def of(self, request: InferenceRequest, now: float) -> RequestEstimate:
        """The estimate for a request that arrives now."""
        prompt_tokens = len(request.prompt)
        if request.block_keys and self._prefill_slots:
            hits = self._registry.prefixes.hits_of(request.block_keys, now)
            if self._tiered:
                held, read_s = self._soonest(hits, prompt_tokens)
            else:  # the last prompt token is always computed, for its logits
                held, read_s = min(self._most_tokens(hits), prompt_tokens - 1), 0.0
            uncached = float(prompt_tokens - held)
            longest = self._longest(hits, request)
            return RequestEstimate(self._output_tokens(request), uncached, hits, longest, read_s)
        uncached = prompt_tokens * (1.0 - self.of_model(request.model.base_name).cached_share.value)
        return RequestEstimate(self._output_tokens(request), uncached)

    def of_model(self, model: str) -> ModelMeans:
        """The learned means of a base model that is known to the registry, its adapters' requests included."""
        means = self._models.get(model)
        if means is None:
            means = self._models[model] = ModelMeans()
        return means

    def prefilled(self, state: RequestState, first: prefill_pb2.FirstToken) -> None:
        """See RequestObserver. Only the first attempt counts: a later one hits what the first one cached."""
        if state.attempts == 1:
            share = first.cached_tokens / max(1, len(state.request.prompt))
            self.of_model(state.request.model.base_name).cached_share.add(min(1.0, share))

    def completed(self, state: RequestState) -> None:
        """See RequestObserver."""
        count = len(state.token_ids)
        self.of_model(state.request.model.base_name).output_tokens.add(count)
        for key in _length_keys(state.request):
            mean = self._means.get(key)
            if mean is None:
                mean = self._means[key] = LearnedMean(0.0)
            self._means.move_to_end(key)
            mean.add(count)
        while len(self._means) > self._max_length_keys:
            self._means.popitem(last=False)

    def _output_tokens(self, request: InferenceRequest) -> float:
        """The mean of the narrowest key that is known, at most what was asked for."""
        known = next((mean for key in _length_keys(request) if (mean := self._means.get(key))), None)
        mean = known or self.of_model(request.model.base_name).output_tokens
        return min(mean.value, request.max_tokens)

    def _most_tokens(self, hits: PrefixHits) -> int:
        """The largest number of leading tokens that any prefill worker holds."""
        return max(
            (
                size * next((depth for depth, slots in reversed(hits.levels) if slots & ours), 0)
                for size, ours in self._prefill_slots.items()
            ),
            default=0,
        )

    def _longest(self, hits: PrefixHits, request: InferenceRequest) -> int | None:
        """Leading tokens that anybody holds at most, whatever the size of its blocks. None: the index does not know all
        that workers hold, or all blocks of the prompt that it can name are held and there are more."""
        depth, tokens = hits.levels[-1][0] if hits else 0, len(request.prompt)
        named = ((len(keys), size) for size, keys in request.block_keys.items())
        if self._registry.prefixes.gaps.any or any(
            n <= depth and (n + 1) * size <= tokens for n, size in named
        ):
            return None
        return min(depth * self._longest_block, tokens - 1)

    def _soonest(self, hits: PrefixHits, prompt_tokens: int) -> tuple[int, float]:
        """Leading tokens that the prefill worker which would be done first holds, and the seconds of reading them: of a
        few that hold most, as routing predicts it for each."""
        least_s, best = float("inf"), (0, 0.0)
        for _, slots in hits.levels[: -1 - MAX_LEVELS_LOOKED_AT : -1]:
            near = slots & self._near
            for slot in islice(bits(near or slots & self._tiered), 1 if near else MAX_LOOKS_A_LEVEL):
                worker = self._registry.get(self._by_slot[slot])
                load = self._registry.loads.prefill.get(self._by_slot[slot])
                if worker is None or load is None:
                    continue
                held, read_s = held_prefix(worker, hits, prompt_tokens, 1 / load.rate)
                done_s = read_s + (prompt_tokens - held) / load.rate
                if done_s < least_s:
                    least_s, best = done_s, (held, read_s)
            if near:  # whoever holds less computes more
                break
        return best

    def _on_registry_change(self, worker: Worker | None) -> None:
        if worker is None:
            self._prefill_slots, self._by_slot, self._near, self._tiered = {}, {}, 0, 0
        for one in (worker,) if worker is not None else self._registry.snapshot().workers:
            if one.prefix_slot >= 0:
                self._longest_block = max(self._longest_block, one.block_size_tokens)
            if one.computes_prompts and one.prefix_slot >= 0:
                slots = self._prefill_slots.get(one.block_size_tokens, 0)
                self._prefill_slots[one.block_size_tokens] = slots | 1 << one.prefix_slot
                self._near |= 1 << near_slots(one)[1]
                for slot in (one.prefix_slot, *near_slots(one)):
                    self._by_slot[slot] = one.key
                if one.near_slots is not None:
                    self._tiered |= 1 << one.prefix_slot | 1 << one.near_slots[0]


def _length_keys(request: InferenceRequest) -> tuple[LengthKey, ...]:
    model, tenant = request.model.name, request.caller.tenant
    wide = (model, tenant, "")
    return ((model, tenant, request.session_id), wide) if request.session_id else (wide,)
