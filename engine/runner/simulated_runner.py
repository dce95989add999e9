"""A model without weights: step times come from a formula, tokens from the content of the KV blocks.

A block has two 64-bit words per token: a hash of the token and of everything before it (chained through the blocks),
and a hash of that. The next token is a function of all words of the sequence, in order, as attention reads all keys and
values. So tokens are deterministic, and a handoff that writes wrong bytes, or to wrong blocks, shows as wrong tokens.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from engine.core.model_runner import ModelFacts, ModelRunner, SampledToken, ScheduledSequence
from engine.runner.structured_output import (
    NOTHING_LEFT,
    GrammarFailedError,
    Mask,
    allowed_tokens,
    masks_of,
)
from kv_transfer.lanes import probe_blocks
from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.generation.kv_blocks import blocks_for

FINGERPRINT = hashlib.sha256(b"simulated").hexdigest()
VOCABULARY_SIZE = 257
EOS_TOKEN_ID = 256
DEFAULT_CONTEXT_TOKENS = 131072
DEFAULT_NUM_BLOCKS = 65536
_FIRST_PRINTABLE, _END_PRINTABLE = 32, 127
_WORD = (1 << 64) - 1
_VALUE_SALT = 0xA5A5A5A5A5A5A5A5
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class SimulatedRunner(ModelRunner):
    """Sleeps for as long as a step would take, by the settings `EngineConfig.simulated_*`, all in seconds.

    A step takes `simulated_step_s`, plus `simulated_sequence_s` and `simulated_context_token_s` per token of context
    for every decode, plus `simulated_prefill_token_s * (e - s) + simulated_prefill_token2_s * (e^2 - s^2)` for every
    chunk from position s to e, so that a prompt costs the same however it is cut. Sampling parameters are ignored,
    except for banned tokens and grammars; with a grammar all allowed tokens are equally likely.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.facts = ModelFacts(
            context_tokens=config.context_tokens or DEFAULT_CONTEXT_TOKENS,
            vocabulary_size=VOCABULARY_SIZE,
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
        )
        self.layout = KvLayout(FINGERPRINT, "uint8", config.block_size_tokens, 1, 1, 8)
        self.num_blocks = config.num_blocks or DEFAULT_NUM_BLOCKS
        if config.num_blocks is None and config.kv_memory_bytes is not None:
            self.num_blocks = max(2, config.kv_memory_bytes // self.layout.block_bytes)
        # An anonymous mapping is page-aligned and takes memory only where it is written.
        probes = probe_blocks(self.layout.block_bytes)
        total = self.num_blocks + probes
        try:
            pages = mmap.mmap(-1, total * self.layout.block_bytes, flags=_PRIVATE)
        except OSError as error:
            setting = "kv_memory_bytes" if config.num_blocks is None else "num_blocks"
            message = f"engine.{setting}: {self.num_blocks} KV blocks cannot be allocated: {error.strerror}"
            raise ConfigError(message, field=f"engine.{setting}") from None
        blocks = np.frombuffer(pages, dtype=np.uint8).reshape(total, -1)
        # Reads of untouched pages would all hit the kernel's one page of zeros, and so measure too fast a lane.
        blocks[self.num_blocks :] = 1
        self.pool: NDArray[np.uint8] = blocks[: self.num_blocks]
        """KV bytes, uint8 `[num_blocks, block_bytes]`."""
        self.pool_memory = KvMemoryRegion(self.pool.ctypes.data, total, self.layout, probe_blocks=probes)
        self._words = self.pool.view(np.uint64).reshape(self.num_blocks, 2, config.block_size_tokens)

    @override
    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.pool[block]) for block in block_ids]

    @override
    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        end = time.monotonic() + self._duration_s(batch)
        masks = masks_of(batch)
        decodes = [n for n, row in enumerate(batch) if row.num_new == 1 and row.sample and n not in masks]
        tokens = self._decode([batch[n] for n in decodes]) if decodes else []
        decoded = dict(zip(decodes, tokens, strict=True))
        sampled = [
            decoded[n] if n in decoded else self._compute(row, masks.get(n)) for n, row in enumerate(batch)
        ]
        if stuck := tuple(index for index in masks if sampled[index] is None):
            raise GrammarFailedError(NOTHING_LEFT, stuck)
        left = end - time.monotonic()
        if left > 0:
            time.sleep(left)
        return sampled

    @override
    def close(self) -> None:
        """The memory is freed when nothing refers to it any more."""

    def _duration_s(self, batch: Sequence[ScheduledSequence]) -> float:
        config = self._config
        total = config.simulated_step_s
        for sequence in batch:
            start, end = sequence.num_computed, sequence.num_computed + sequence.num_new
            if sequence.num_new == 1:
                total += config.simulated_sequence_s + config.simulated_context_token_s * end
            else:
                total += config.simulated_prefill_token_s * (end - start)
                total += config.simulated_prefill_token2_s * (end**2 - start**2)
        return total

    def _decode(self, batch: list[ScheduledSequence]) -> list[SampledToken]:
        """As `_compute`, for a whole batch of sequences with one new token each."""
        size = self.layout.block_size_tokens
        ends = np.array([row.num_computed + 1 for row in batch])
        last, before = ends - 1, np.maximum(ends - 2, 0)
        tables = [row.block_ids[: blocks_for(row.num_computed + 1, size)] for row in batch]
        counts = np.array([len(table) for table in tables])
        blocks = np.array([*chain.from_iterable(tables)])
        firsts = np.cumsum(counts) - counts
        previous = np.where(last > 0, self._words[blocks[firsts + before // size], 0, before % size], 0)
        newest = np.array([row.token_ids[row.num_computed] for row in batch], dtype=np.uint64)
        keys = _mixed(previous.astype(np.uint64) ^ _mixed(newest))
        rows, slots = blocks[firsts + last // size], last % size
        self._words[rows, 0, slots], self._words[rows, 1, slots] = keys, _mixed(keys ^ np.uint64(_VALUE_SALT))
        summands = self._words[blocks, 0] + np.uint64(3) * self._words[blocks, 1]
        summands[firsts + counts - 1] *= (np.arange(size) < (ends - (counts - 1) * size)[:, None]).astype(
            np.uint64
        )
        # A word's weight is 2 * its position + 1.
        slot_weights = np.arange(1, 2 * size, 2, dtype=np.uint64)
        block_weights = (2 * size * (np.arange(len(blocks)) - np.repeat(firsts, counts))).astype(np.uint64)
        of_blocks = (summands * slot_weights).sum(axis=1) + summands.sum(axis=1) * block_weights
        folded = np.add.reduceat(of_blocks, firsts)
        choices = zip(batch, keys.tolist(), folded.tolist(), strict=True)
        return [SampledToken(_next_token(key, fold, row.banned_token_ids)) for row, key, fold in choices]

    def _compute(self, sequence: ScheduledSequence, mask: Mask | None) -> SampledToken | None:
        start, end = sequence.num_computed, sequence.num_computed + sequence.num_new
        size = self.layout.block_size_tokens
        blocks = np.asarray(sequence.block_ids, dtype=np.int64)
        key = int(self._words[blocks[(start - 1) // size], 0, (start - 1) % size]) if start else 0
        keys: list[int] = []
        for token in sequence.token_ids[start:end]:
            key = _key(key, token)
            keys.append(key)
        positions = np.arange(start, end)
        rows, slots = blocks[positions // size], positions % size
        self._words[rows, 0, slots] = np.array(keys, dtype=np.uint64)
        self._words[rows, 1, slots] = np.array([_mix(key ^ _VALUE_SALT) for key in keys], dtype=np.uint64)
        if not sequence.sample:
            return None
        folded = self._fold(blocks[: blocks_for(end, size)], end)
        if mask is not None:
            allowed = np.flatnonzero(allowed_tokens(mask, VOCABULARY_SIZE, sequence.banned_token_ids))
            if not allowed.size:
                return None
            return SampledToken(int(allowed[_mix(key ^ folded) % len(allowed)]))
        return SampledToken(_next_token(key, folded, sequence.banned_token_ids))

    def _fold(self, blocks: NDArray[np.int64], num_tokens: int) -> int:
        words = self._words[blocks]
        keys = words[:, 0].reshape(-1)[:num_tokens]
        values = words[:, 1].reshape(-1)[:num_tokens]
        weights = np.arange(1, 2 * num_tokens, 2, dtype=np.uint64)
        return int(((keys + np.uint64(3) * values) * weights).sum(dtype=np.uint64))


def _mix(word: int) -> int:
    """A bijection of 64-bit words that spreads every bit (finalizer of SplitMix64, Steele et al. 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of each word."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _key(previous: int, token: int) -> int:
    return _mix(previous ^ _mix(token))


def _next_token(key: int, folded: int, banned: frozenset[int]) -> int:
    printable = range(_FIRST_PRINTABLE, _END_PRINTABLE)
    choice = _mix(key ^ folded)
    for step in range(len(printable)):
        token = printable[(choice + step) % len(printable)]
        if token not in banned:
            return token
    return EOS_TOKEN_ID
