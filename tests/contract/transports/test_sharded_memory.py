"""KV that lies in tensor-parallel ranks: each head of each rank is written once, and told of when all have arrived."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.layout import AXIS_ORDER
from kv_transfer.transports.nixl.transport import NixlTransport
from kv_transfer.transports.sharded import ShardedTransport
from kv_transfer.transports.transport import PollResult, TransferEndpoint, Transport
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, TransferError
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport
from tests.support.transfer.rank_pools import HEAD_BYTES, LAYERS, RankPools
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(60)
BLOCKS = 9
SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1)]


def maker(kind: str) -> Callable[[], Transport]:
    hub = MemoryHub()
    return NixlTransport if kind == "nixl" else lambda: MemoryTransport(hub)


def polled_until_told(writer: Transport, owner: Transport, handle: int) -> list[tuple[str, bytes]]:
    seen, end = PollResult(), time.monotonic() + PATIENCE_S
    while not (seen.writes and seen.notifications):
        assert time.monotonic() < end
        seen.writes += writer.poll().writes
        seen.notifications += owner.poll().notifications
    assert [(write.handle, write.error) for write in seen.writes] == [(handle, None)]
    return seen.notifications


@pytest.mark.parametrize("kind", ["memory", "nixl"])
@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_each_head_arrives_where_it_is_held(kind: str, prefill: int, decode: int) -> None:
    make = maker(kind)
    source, target = RankPools(BLOCKS, prefill), RankPools(BLOCKS + 2, decode)
    whole = np.random.default_rng(1).integers(1, 256, (LAYERS, BLOCKS, 4, HEAD_BYTES), dtype=np.uint8)
    source.fill(whole)
    writer, mine = source.transport(make)
    owner, endpoint = target.transport(make)
    writer.connect(endpoint)
    writer.connect(endpoint)
    assert endpoint.agent_id in writer.connected()
    local, remote = [3, 4, 8, 0], [5, 6, 0, 10]
    expected = np.zeros((LAYERS, BLOCKS + 2, 4, HEAD_BYTES), dtype=np.uint8)
    expected[:, remote] = whole[:, local]
    told = polled_until_told(writer, owner, writer.write(endpoint.agent_id, local, remote, b"done"))
    assert told == [(mine.agent_id, b"done")]
    target.assert_holds(expected)
    pairs = max(prefill, decode)
    assert writer.descriptors_posted == LAYERS * (3 if prefill == decode else 4) * pairs
    writer.close()
    owner.close()


@pytest.mark.parametrize(("prefill", "decode"), [(4, 2), (2, 4), (1, 4), (4, 4)])
def test_replicas_of_a_head_are_all_written(prefill: int, decode: int) -> None:
    make = maker("memory")
    source, target = RankPools(BLOCKS, prefill, kv_heads=2), RankPools(BLOCKS, decode, kv_heads=2)
    whole = np.random.default_rng(2).integers(1, 256, (LAYERS, BLOCKS, 2, HEAD_BYTES), dtype=np.uint8)
    source.fill(whole)
    writer, _ = source.transport(make)
    owner, endpoint = target.transport(make)
    writer.connect(endpoint)
    blocks = list(range(BLOCKS))
    polled_until_told(writer, owner, writer.write(endpoint.agent_id, blocks, blocks, b"done"))
    target.assert_holds(whole)


def test_a_lost_rank_is_a_lost_peer_and_may_come_back() -> None:
    hub = MemoryHub()
    source, target = RankPools(BLOCKS, 2), RankPools(BLOCKS, 2)
    writer, _ = source.transport(lambda: MemoryTransport(hub))
    owner, endpoint = target.transport(lambda: MemoryTransport(hub))
    writer.connect(endpoint)
    lost = endpoint.ranks[1]
    hub.leave(lost.agent_id)
    handle = writer.write(endpoint.agent_id, [0], [0], b"never")
    assert [(write.handle, write.error is None) for write in writer.poll().writes] == [(handle, False)]
    assert owner.poll().notifications == []
    assert endpoint.agent_id not in writer.connected()
    with pytest.raises(TransferError):
        writer.connect(endpoint)
    with pytest.raises(TransferError):
        writer.write(endpoint.agent_id, [0], [0])
    hub.join(lost.agent_id)
    writer.connect(endpoint)
    polled_until_told(writer, owner, writer.write(endpoint.agent_id, [0], [0], b"again"))


def test_a_disconnected_peer_gets_nothing_from_any_rank() -> None:
    hub = MemoryHub()
    source, target = RankPools(BLOCKS, 2), RankPools(BLOCKS, 1)
    source.fill(np.ones((LAYERS, BLOCKS, 4, HEAD_BYTES), dtype=np.uint8))
    writer, _ = source.transport(lambda: MemoryTransport(hub))
    owner, endpoint = target.transport(lambda: MemoryTransport(hub))
    writer.connect(endpoint)
    handle = writer.write(endpoint.agent_id, [0], [0], b"never")
    writer.disconnect(endpoint.agent_id)
    assert [(write.handle, write.error is None) for write in writer.poll().writes] == [(handle, False)]
    assert owner.poll().notifications == []
    assert not target.data[0].any()
    assert writer.connected() == frozenset()


def refusal(mine: RankPools, endpoint: TransferEndpoint) -> FailedPreconditionError | InvalidArgumentError:
    writer, _ = mine.transport(maker("memory"))
    with pytest.raises((FailedPreconditionError, InvalidArgumentError)) as raised:
        writer.connect(endpoint)
    assert writer.connected() == frozenset()
    return raised.value


def test_peers_that_do_not_fit_are_refused_by_field() -> None:
    one, two = RankPools(BLOCKS, 1), RankPools(BLOCKS, 2)
    _, endpoint = two.transport(maker("memory"))
    assert refusal(one, replace(endpoint, ranks=endpoint.ranks[:1])).field == "ranks"
    assert refusal(one, replace(endpoint, ranks=())).field == "ranks"
    three = replace(endpoint.memory, layout=replace(endpoint.memory.layout, tensor_parallel_size=3))
    refused = refusal(one, replace(endpoint, memory=three, ranks=endpoint.ranks + endpoint.ranks[:1]))
    assert refused.field == "tensor_parallel_size"
    many = replace(endpoint.memory, layout=replace(endpoint.memory.layout, tensor_parallel_size=65))
    assert refusal(one, replace(endpoint, memory=many, ranks=endpoint.ranks * 33)).field == "ranks"
    whole = tuple(replace(rank, memory=replace(rank.memory, layer_stride=0)) for rank in endpoint.ranks)
    assert refusal(one, replace(endpoint, ranks=whole)).field == "layer_stride"
    plain = replace(endpoint.memory, layout=replace(endpoint.memory.layout, axis_order=AXIS_ORDER))
    assert refusal(one, replace(endpoint, memory=plain)).field == "axis_order"
    assert refusal(two, replace(endpoint, transport="pigeon")).field == "transport"


def test_a_transport_of_one_piece_refuses_ranks() -> None:
    make = maker("memory")
    _, endpoint = RankPools(BLOCKS, 2).transport(make)
    plain = make()
    plain.register_memory(RankPools(BLOCKS, 1).memory)
    with pytest.raises(FailedPreconditionError) as raised:
        plain.connect(endpoint)
    assert (raised.value.reason, raised.value.field) == ("LAYOUT_MISMATCH", "ranks")


def test_memory_is_registered_first_and_once() -> None:
    transport = ShardedTransport(MemoryTransport(MemoryHub()))
    pools = RankPools(BLOCKS, 1)
    with pytest.raises(FailedPreconditionError):
        transport.connect(pools.transport(maker("memory"))[1])
    transport.register_memory(pools.memory)
    with pytest.raises(FailedPreconditionError):
        transport.register_memory(pools.memory)
