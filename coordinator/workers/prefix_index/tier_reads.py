"""What of a prefix lies below a worker's KV blocks, and how long it takes until it is among them. Pure.

The worker reads what is there sooner than computed, or than transferred by a peer (`engine.tiers.read_choice`).
Predicted is the least of three: nothing is read, what is in host memory is, or the disk's is, too. Both read at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coordinator.workers.prefix_index.hits import Depths, PrefixHits
from coordinator.workers.snapshot import Worker
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import registry_pb2

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_GB_PER_S = 1e6
MAX_WAITING_BYTES = 2**50
_GB = 1e9


_Numbers = Depths | np.float64


class Brought(NamedTuple):
    """How a prefix that a worker holds comes to be among its KV blocks: numbers, or columns of [workers]."""

    lacking: Depths
    """Blocks that are not read, from its end on, as computing or transferring them is sooner."""
    read_s: Depths
    """Seconds until the others have been read."""


class TierColumns:
    """The tiers of workers. `slots` int64 [2, workers]: of what is in host memory or nearer, and in the pool.

    `block_s` and `wait_s` float64 [2, workers]: seconds of reading a block from host memory and disk, and of the reads
    before it."""

    def __init__(self, slots: npt.NDArray[np.int64]) -> None:
        """Workers without tiers, whose slots in the index are these."""
        self.slots = np.stack((slots, slots))
        self.block_s, self.wait_s = np.zeros(self.slots.shape), np.zeros(self.slots.shape)

    def write(self, row: int, worker: Worker) -> None:
        """Takes a worker's new state."""
        self.slots[:, row] = near_slots(worker)
        for at, tier in enumerate((worker.load.host_tier, worker.load.disk_tier)):
            self.block_s[at, row], self.wait_s[at, row] = _seconds(worker, tier)

    def brought(self, held: Depths, by_slot: Depths, otherwise_s: Depths, row: int | None = None) -> Brought:
        """Of the `held` leading blocks of each worker, or of the one at `row`, float64 [workers]. `otherwise_s`: of a
        block that is not read, float64 [workers or cases]. `by_slot`: see `PrefixHits.by_slot`."""
        at = slice(None) if row is None else row
        own = held[at]
        host, pool = np.minimum(by_slot.take(self.slots[:, at], mode="wrap"), own)
        return _brought(host - pool, own - host, self.block_s[:, at], self.wait_s[:, at], otherwise_s)


def brought(worker: Worker, hits: PrefixHits, held: float, otherwise_s: float) -> Brought | None:
    """The same of one worker; None without tiers."""
    if worker.near_slots is None:
        return None
    host, pool = (np.float64(min(hits.blocks(slot), held)) for slot in worker.near_slots)
    tiers = (worker.load.host_tier, worker.load.disk_tier)
    block_s, wait_s = np.array([_seconds(worker, tier) for tier in tiers]).T
    return _brought(host - pool, held - host, block_s, wait_s, np.float64(otherwise_s))


class Near(NamedTuple):
    """The leading blocks of a prefix that a worker has among its KV blocks, once it has read for so long."""

    blocks: int
    read_s: float = 0.0


def nearness(worker: Worker, hits: PrefixHits) -> list[Near]:
    """What a worker holds of a prefix among its KV blocks; with what is in host memory; with what is on disk, too: each
    if it is more, and there is room to read it. A holder reads all that it is asked to send, or nothing."""
    held = hits.blocks(worker.prefix_slot)
    if worker.near_slots is None or not held:
        return [Near(held)]
    host, pool = (min(hits.blocks(slot), held) for slot in worker.near_slots)
    host = max(host, pool)  # the index is only a hint
    found = [Near(pool)]
    for blocks in (host, held):
        if blocks > found[-1].blocks and _may_read(worker, blocks - pool):
            found.append(Near(blocks, _read_s(worker, host - pool, blocks - host)))
    return found


def _read_s(worker: Worker, in_host: int, on_disk: int) -> float:
    """Seconds until so many blocks have been read, from both at once."""
    tiers = (in_host, worker.load.host_tier), (on_disk, worker.load.disk_tier)
    return max(
        wait_s + count * block_s
        for count, tier in tiers
        for block_s, wait_s in (_seconds(worker, tier),)
        if count
    )


def _may_read(worker: Worker, blocks: int) -> bool:
    """Whether there is room to read so many; see `KvTiers` in `engine.tiers.kv_tiers`."""
    return 4 * blocks <= 3 * worker.load.free_blocks and 2 * blocks <= worker.load.total_blocks


def held_prefix(worker: Worker, hits: PrefixHits, prompt_tokens: int, token_s: float) -> tuple[int, float]:
    """Leading tokens of a prompt that a worker does not compute, at `token_s` seconds a token, and the seconds until it
    has read those that are below its KV blocks. The last token is always computed, for its logits."""
    size = worker.block_size_tokens
    cached = min(hits.blocks(worker.prefix_slot) * size, prompt_tokens - 1)
    below = brought(worker, hits, cached / size, token_s * size)
    if below is None:
        return cached, 0.0
    return cached - round(float(below.lacking) * size), float(below.read_s)


def near_slots(worker: Worker) -> tuple[int, int]:
    """The slots of what is in a worker's host memory or nearer, and of what is in its pool."""
    return worker.near_slots or (worker.prefix_slot, worker.prefix_slot)


def read_back_speed(prefill: Worker, decode: Worker | None) -> float:
    """GB/s of the lane between a pair, which a decode worker with tiers compares its reads with; else 0."""
    if decode is None or not decode.load.HasField("host_tier"):
        return 0.0
    return next((lane.gb_per_second for lane in prefill.lanes if lane.agent_id == decode.agent_id), 0.0)


def check_tier_reads(load: registry_pb2.WorkerLoad) -> None:
    """Raises InvalidArgumentError naming field and bound."""
    for name, tier in (("host_tier", load.host_tier), ("disk_tier", load.disk_tier)):
        if not load.HasField(name):  # type: ignore[arg-type]
            continue
        if not 0 < tier.gb_per_second <= MAX_GB_PER_S:
            field = f"load.{name}.gb_per_second"
            raise InvalidArgumentError(f"{field}: must be above 0, at most {MAX_GB_PER_S:g}", field=field)
        if tier.waiting_bytes > MAX_WAITING_BYTES:
            field = f"load.{name}.waiting_bytes"
            raise InvalidArgumentError(f"{field}: must be at most 2^50", field=field)


def _seconds(worker: Worker, tier: registry_pb2.TierReads) -> tuple[float, float]:
    """Of reading a block, and of the reads before it; nothing where nothing is known."""
    if not tier.gb_per_second:
        return 0.0, 0.0
    speed = tier.gb_per_second * _GB
    return worker.block_bytes / speed, tier.waiting_bytes / speed


def _brought(
    in_host: _Numbers, on_disk: _Numbers, block_s: Depths, wait_s: Depths, otherwise_s: _Numbers
) -> Brought:
    host_s = np.where(in_host > 0, wait_s[0] + in_host * block_s[0], 0.0)
    both_s = np.maximum(host_s, np.where(on_disk > 0, wait_s[1] + on_disk * block_s[1], 0.0))
    none_s, near_s = (in_host + on_disk) * otherwise_s, host_s + on_disk * otherwise_s
    reads = near_s < none_s
    reads_both = both_s < np.minimum(near_s, none_s)
    lacking = np.where(reads_both, 0.0, np.where(reads, on_disk, in_host + on_disk))
    return Brought(lacking, np.where(reads_both, both_s, np.where(reads, host_s, 0.0)))
