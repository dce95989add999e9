"""Who computes a prompt whose prefix lies below a worker's KV blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.snapshot import Worker
from splitserve.v1 import registry_pb2
from tests.unit.coordinator.routing.test_prompt_placement import D0, P0, Bench, Clock, clock, worker

__all__ = ["clock"]

BLOCKS = 19


def reading(read_s: float) -> Worker:
    """A worker that takes so long to read its blocks of the prompt from host memory."""
    size = 100_000
    tier = registry_pb2.TierReads(gb_per_second=BLOCKS * size / read_s / 1e9)
    return replace(worker("d1", "decode", host_tier=tier), prefix_slot=0, near_slots=(1, 2), block_bytes=size)


@pytest.mark.parametrize(
    ("queued", "read_s", "reader_is_first"),
    [(200, 0.2, True), (0, 0.2, True), (0, 0.302, True), (290, 0.1, True), (310, 0.1, False)],
)
def test_a_prefix_is_read_while_the_queue_ahead_is_computed(
    clock: Clock, queued: int, read_s: float, reader_is_first: bool
) -> None:
    """The other one computes all 320 tokens in 0.32 s, the reader the last 16."""
    reader = reading(read_s)
    bench = Bench(clock, P0, D0, reader)
    bench.queue(P0, 900)
    if queued:
        bench.queue(reader, queued)
    pair = bench.pair(bench.request(320), hits=PrefixHits.of({0: BLOCKS, 1: BLOCKS}))
    assert pair.decode == (reader if reader_is_first else D0)
