"""Ranks behind sockets: commands reach their transports, events come back, and the end of a rank is noticed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from engine.vllm.kv_memory import read_blocks
from engine.vllm.ranks.rank_group import block_digests
from engine.vllm.ranks.rank_link import RankEndedError, RankLink
from engine.vllm.ranks.rank_transport import RankTransport
from engine.vllm.ranks.remote_transport import POST_S, RemoteTransport
from kv_transfer.transports.nixl.transport import NixlTransport
from kv_transfer.transports.sharded import ShardedTransport
from kv_transfer.transports.transport import PollResult, TransferEndpoint, Transport
from splitserve.errors import FailedPreconditionError, TransferError
from splitserve.v1 import ranks_pb2 as pb
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport
from tests.support.transfer.rank_pools import HEAD_BYTES, LAYERS, RankPools
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(60)
BLOCKS = 9


@dataclass
class Side:
    """A worker of two ranks, each behind a pipe."""

    pools: RankPools
    ranks: list[RemoteTransport]
    rank_ends: list[Connection]
    transport: ShardedTransport
    endpoint: TransferEndpoint


def side(make: Callable[[], Transport], clock: Callable[[], float] = time.monotonic) -> Side:
    pools, ranks, ends = RankPools(BLOCKS, 2), [], []
    for region in pools.regions:
        worker_end, rank_end = Pipe()
        link, other = RankLink(worker_end, "a rank"), RankLink(rank_end, "the worker")
        RankTransport(other, make, region).start()
        started = TransferEndpoint.from_proto(link.receive(pb.RankStarted).endpoint)
        ranks.append(RemoteTransport(link, started, clock))
        ends.append(rank_end)
    transport = ShardedTransport(make(), ranks, [rank.endpoint for rank in ranks])
    endpoint = transport.register_memory(pools.memory)
    return Side(pools, ranks, ends, transport, TransferEndpoint.from_proto(endpoint.to_proto()))


@pytest.fixture(params=["memory", "nixl"])
def make(request: pytest.FixtureRequest) -> Callable[[], Transport]:
    hub = MemoryHub()
    return NixlTransport if request.param == "nixl" else lambda: MemoryTransport(hub)


def polled(transport: Transport, done: Callable[[PollResult], bool]) -> PollResult:
    seen, end = PollResult(), time.monotonic() + PATIENCE_S
    while not done(seen):
        assert time.monotonic() < end
        more = transport.poll()
        seen.writes += more.writes
        seen.notifications += more.notifications
    return seen


def test_ranks_write_what_the_worker_says(make: Callable[[], Transport]) -> None:
    writer, target = side(make), RankPools(BLOCKS, 1)
    whole = np.random.default_rng(1).integers(1, 256, (LAYERS, BLOCKS, 4, HEAD_BYTES), dtype=np.uint8)
    writer.pools.fill(whole)
    owner, endpoint = target.transport(make)
    writer.transport.connect(endpoint)
    assert endpoint.agent_id in writer.transport.connected()
    blocks = list(range(BLOCKS))
    handle = writer.transport.write(endpoint.agent_id, blocks, blocks, b"done")
    writes = polled(writer.transport, lambda seen: bool(seen.writes)).writes
    assert [(write.handle, write.error) for write in writes] == [(handle, None)]
    told = polled(owner, lambda seen: bool(seen.notifications)).notifications
    assert told == [(writer.endpoint.agent_id, b"done")]
    target.assert_holds(whole)
    writer.transport.disconnect(endpoint.agent_id)
    with pytest.raises(TransferError):
        writer.transport.write(endpoint.agent_id, blocks, blocks)
    writer.transport.close()
    owner.close()


def test_checksums_do_not_depend_on_the_number_of_ranks(make: Callable[[], Transport]) -> None:
    two, one = side(make), RankPools(BLOCKS, 1)
    whole = np.random.default_rng(3).integers(0, 256, (LAYERS, BLOCKS, 4, HEAD_BYTES), dtype=np.uint8)
    two.pools.fill(whole)
    one.fill(whole)
    blocks = [4, 0, 8]
    by_rank = [rank.read_digests(blocks) for rank in two.ranks]
    digests = [block_digests(by_rank, two.pools.held, place) for place in range(len(blocks))]
    alone = read_blocks(one.memory, blocks)
    assert [np.frombuffer(block, np.uint64).tolist() for block in alone] == digests
    two.pools.data[1][0, 4, 0, 0] ^= 1
    changed = [rank.read_digests(blocks) for rank in two.ranks]
    assert [a != b for a, b in zip(block_digests(changed, two.pools.held, 0), digests[0], strict=True)] == [
        False,
        False,
        True,
        False,
    ]
    two.transport.close()


def test_replicas_that_differ_match_nothing() -> None:
    held = [range(1), range(1), range(1, 2), range(1, 2)]
    assert block_digests([[5, 7], [5, 7], [6, 8], [6, 9]], held, 0) == [5, 6]
    assert block_digests([[5, 7], [5, 7], [6, 8], [6, 9]], held, 1) == [7, 0]


def test_a_rank_that_is_told_late_posts_nothing() -> None:
    hub = MemoryHub()
    make = lambda: MemoryTransport(hub)  # noqa: E731
    writer, target = side(make, clock=lambda: time.monotonic() - POST_S), RankPools(BLOCKS, 2)
    writer.pools.fill(np.ones((LAYERS, BLOCKS, 4, HEAD_BYTES), dtype=np.uint8))
    owner, endpoint = target.transport(make)
    writer.transport.connect(endpoint)
    handle = writer.transport.write(endpoint.agent_id, [0], [0], b"never")
    writes = polled(writer.transport, lambda seen: bool(seen.writes)).writes
    assert [(write.handle, write.error, write.in_doubt) for write in writes] == [
        (handle, "the rank was late", False)
    ]
    assert owner.poll().notifications == []
    assert not any(part.any() for part in target.data)


def test_a_peer_that_a_rank_cannot_reach_is_refused() -> None:
    hub = MemoryHub()
    writer = side(lambda: MemoryTransport(hub))
    _, endpoint = RankPools(BLOCKS, 2).transport(lambda: MemoryTransport(hub))
    hub.leave(endpoint.ranks[1].agent_id)
    with pytest.raises(TransferError, match="cannot be reached"):
        writer.transport.connect(endpoint)
    assert writer.transport.connected() == frozenset()
    with pytest.raises(FailedPreconditionError):
        writer.ranks[0].connect_part(replace(endpoint, ranks=()), None)


def test_the_end_of_a_rank_is_the_end_of_its_worker() -> None:
    hub = MemoryHub()
    writer = side(lambda: MemoryTransport(hub))
    writer.transport.poll()
    with socket.socket(fileno=os.dup(writer.rank_ends[1].fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)  # as the end of its process does
    with pytest.raises(RankEndedError):
        writer.transport.poll()


def test_what_is_no_message_ends_the_link() -> None:
    here, there = Pipe()
    link = RankLink(here, "a rank")
    there.send_bytes(b"\xff" * 5)
    with pytest.raises(RankEndedError):
        link.receive(pb.RankEvent)
    there.send_bytes(b"x" * 9)
    with pytest.raises(RankEndedError, match="9 bytes of 10"):
        link.receive_bytes(10)
