"""A holder that dies while a prefix of its cache is on the wire."""

from __future__ import annotations

import asyncio

from splitserve.errors import SplitserveError
from tests.support.journal import settled
from tests.support.neutral.direct_requests import DirectWorker
from tests.support.neutral.neutral_processes import NeutralProcesses

BLOCK = 16
HALF_A_PREFIX = "faults: {bandwidth_bytes_per_s: 50000000, stall_write: {at: [4]}}\n"
"""Of six blocks five go first, as a lane this slow is given 4 MiB at a time. The fourth write is the second piece of a
worker's second prefix, where it has sent nothing but prefixes."""


async def lose_the_holder_half_way(
    workers: NeutralProcesses, taker: DirectWorker, holder: DirectWorker, prefix: list[int]
) -> None:
    """Kills the holder, which is the worker "b" with HALF_A_PREFIX in its settings: the first piece of a prefix of six
    blocks has arrived in blocks that the taker has reserved, the second one is on its way."""
    ticket = await taker.reserve("half", prefix, holder.agent_id, prefix_only=True)
    assert ticket is not None
    assert len(ticket.block_indices) == 6
    push = asyncio.create_task(holder.compute("half", prefix, ticket, prefix_only=True))
    process = workers.members["b"]
    await settled(lambda: any(event["event"] == "fault.injected" for event in process.events()))
    process.kill()
    workers.registry.lost("b")
    for failed in await asyncio.gather(push, taker.rest("half"), return_exceptions=True):
        assert isinstance(failed, SplitserveError)
