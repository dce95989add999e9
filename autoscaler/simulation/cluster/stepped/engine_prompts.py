"""Prompts of a trace as the engine takes them, and its prefix cache as the router knows it: by the trace's blocks."""

from __future__ import annotations

from collections.abc import Sequence

from autoscaler.simulation.cluster.replica import CacheChanges, SimulatedRequest
from autoscaler.simulation.cluster.stepped.virtual_engine import KV_BLOCK_TOKENS, VOCABULARY_SIZE
from autoscaler.simulation.traces.trace import BLOCK_TOKENS
from engine.core.types import EngineRequest
from engine.kv_cache.cache_events import KvEventLog
from splitserve.generation.kv_blocks import extend_block_hashes, name_of

_DIGITS = 4
"""Tokens that spell a block's name."""
_SALT_BYTES = 8


def prompt_of(request: SimulatedRequest, number: int) -> tuple[tuple[int, ...], bytes]:
    """The prompt's tokens and salt: equal beginnings where the trace has equal blocks, and nowhere else.

    `number` tells requests of one engine apart.
    """
    if not request.block_ids:
        return (0,) * request.prompt_tokens, number.to_bytes(_SALT_BYTES, "little")
    tokens: list[int] = []
    for block in request.block_ids:
        tokens += _spelled(block)
    if len(tokens) < request.prompt_tokens:
        # A tail that the trace does not name; odd, so that it is no block's.
        tokens += _spelled(2 * number + 1)
        tokens += [1] * (request.prompt_tokens - len(tokens))
    return tuple(tokens[: request.prompt_tokens]), b""


def _spelled(block: int) -> list[int]:
    digits = [block // VOCABULARY_SIZE**place % VOCABULARY_SIZE for place in range(_DIGITS)]
    return digits + [0] * (BLOCK_TOKENS - _DIGITS)


class EngineCacheChanges:
    """What an engine's prefix cache took in and gave up, in blocks of the trace: one stands for the engine's last block
    within it."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._blocks: dict[bytes, int] = {}
        self._told: dict[bytes, None] = {}
        self._position: int | None = None
        self.unread = False
        """Whether anything has changed since the last `take`."""
        log.subscribe(self._changed)

    def _changed(self) -> None:
        self.unread = True

    def expect(self, asked: EngineRequest, block_ids: Sequence[int]) -> None:
        """Learns the names that the engine gives to a prompt's blocks."""
        hashes: list[bytes] = []
        tokens = asked.token_ids
        extend_block_hashes(hashes, tokens, KV_BLOCK_TOKENS, asked.cache_salt, len(tokens) // KV_BLOCK_TOKENS)
        for index, block in enumerate(block_ids):
            last = min((index + 1) * BLOCK_TOKENS, len(tokens)) // KV_BLOCK_TOKENS
            if last * KV_BLOCK_TOKENS > index * BLOCK_TOKENS:
                self._blocks[name_of(hashes[last - 1])] = block

    def take(self) -> CacheChanges:
        """The changes since the last call; parents first."""
        self.unread = False
        changes = None if self._position is None else self._log.since(self._position)
        if changes is None:
            names, self._position = self._log.snapshot()
            changed = {**dict.fromkeys(self._told.keys() - names.keys()), **names}
        else:
            changed, self._position = changes
        stored: list[int] = []
        removed: list[int] = []
        for name, place in changed.items():
            block = self._blocks.get(name)
            if block is None or (place is not None) == (name in self._told):
                continue
            if place is not None:
                self._told[name] = None
                stored.append(block)
            else:
                del self._told[name]
                removed.append(block)
        return CacheChanges(stored, removed)
