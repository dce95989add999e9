"""Writes between workers whose blocks have different sizes, over real memory and lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.lane_probe import LaneProber
from kv_transfer.layout import HEADS_OUTERMOST
from kv_transfer.transports.faulty import FaultyTransport
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.nixl.transport import NixlTransport
from kv_transfer.transports.transport import PollResult, TransferEndpoint, Transport
from kv_transfer.transports.ucx.transport import UcxTransport
from splitserve.config.faults import FaultPlan
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from tests.support.engine.numpy_pool import LAYOUT, NumpyPool
from tests.support.transfer.rank_pools import RankPools
from tests.support.transfer.ucx import require_ucx
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(60)
TOKENS = 192
"""In each pool, whatever its block size."""
SIZES = [(16, 32), (32, 16), (8, 64), (64, 8), (48, 16), (1, 16)]
PLANES = LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads
Maker = Callable[[], Transport]


@pytest.fixture(params=["memory", "nixl", "memory with no fault"])
def make(request: pytest.FixtureRequest) -> Iterator[Maker]:
    hub, made = MemoryHub(), list[Transport]()
    makers: dict[str, Maker] = {
        "memory": lambda: MemoryTransport(hub),
        "nixl": NixlTransport,
        "memory with no fault": lambda: FaultyTransport(MemoryTransport(hub), FaultPlan()),
    }

    def make_one() -> Transport:
        made.append(makers[request.param]())
        return made[-1]

    yield make_one
    for transport in made:
        transport.close()


def a_pool(size: int, seed: int = 0) -> NumpyPool:
    pool = NumpyPool(TOKENS // size, layout=replace(LAYOUT, block_size_tokens=size))
    if seed:
        pool.stamp(seed)
    return pool


def by_sub_block(pool: NumpyPool, tokens: int) -> np.ndarray:  # type: ignore[type-arg]
    """A copy `[sub-blocks, layer * kv * head, tokens, dim]` of a pool."""
    size, dim = pool.memory.layout.block_size_tokens, LAYOUT.head_dim
    parts = pool.data.reshape(len(pool.data), -1, size // tokens, tokens, dim)
    return parts.swapaxes(1, 2).reshape(-1, parts.shape[1], tokens, dim).copy()


def settled(writer: Transport, owner: Transport) -> PollResult:
    seen, end = PollResult(), time.monotonic() + PATIENCE_S
    while not (seen.writes and seen.notifications):
        assert time.monotonic() < end
        seen.writes += writer.poll().writes
        seen.notifications += owner.poll().notifications
    return seen


@pytest.mark.parametrize(("mine", "theirs"), SIZES)
def test_sub_blocks_arrive_in_their_places_and_nowhere_else(make: Maker, mine: int, theirs: int) -> None:
    source, target = a_pool(mine, seed=1), a_pool(theirs, seed=2)
    writer, owner = make(), make()
    own = writer.register_memory(source.memory)
    endpoint = TransferEndpoint.from_proto(owner.register_memory(target.memory).to_proto())
    writer.connect(endpoint)
    tokens = min(mine, theirs)
    rng, count = np.random.default_rng(3), TOKENS // tokens
    local, remote = (rng.permutation(count)[: count // 2].tolist() for _ in range(2))
    expected = by_sub_block(target, tokens)
    expected[remote] = by_sub_block(source, tokens)[local]
    handle = writer.write(endpoint.agent_id, local, remote, b"done")
    seen = settled(writer, owner)
    assert [(write.handle, write.error) for write in seen.writes] == [(handle, None)]
    assert seen.notifications == [(own.agent_id, b"done")]
    np.testing.assert_array_equal(by_sub_block(target, tokens), expected)
    if not isinstance(writer, FaultyTransport):  # which counts runs
        assert writer.descriptors_posted == PLANES * len(local)
    for wrong in ([count], [-1]):
        with pytest.raises(InvalidArgumentError):
            writer.write(endpoint.agent_id, wrong, [0])
        with pytest.raises(InvalidArgumentError):
            writer.write(endpoint.agent_id, [0], wrong)


def test_peers_of_both_kinds_are_served_side_by_side(make: Maker) -> None:
    source, alike, other = a_pool(16, seed=1), a_pool(16), a_pool(32)
    writer, owners = make(), [make(), make()]
    writer.register_memory(source.memory)
    endpoints = [
        owner.register_memory(pool.memory) for owner, pool in zip(owners, (alike, other), strict=True)
    ]
    for endpoint in endpoints:
        writer.connect(endpoint)
    for owner, endpoint in zip(owners, endpoints, strict=True):
        writer.write(endpoint.agent_id, [0, 1, 2], [4, 5, 6], b"done")
        settled(writer, owner)
    np.testing.assert_array_equal(alike.data[4:7], source.data[:3])
    np.testing.assert_array_equal(by_sub_block(other, 16)[4:7], by_sub_block(source, 16)[:3])
    if not isinstance(writer, FaultyTransport):
        assert writer.descriptors_posted == 1 + 3 * PLANES
    writer.disconnect(endpoints[1].agent_id)
    writer.connect(endpoints[1])
    writer.write(endpoints[1].agent_id, [7], [0], b"again")
    settled(writer, owners[1])
    np.testing.assert_array_equal(by_sub_block(other, 16)[0], by_sub_block(source, 16)[7])


def test_the_lane_is_measured_in_blocks_nobody_owns(make: Maker) -> None:
    source, target = a_pool(16, seed=1), a_pool(32)
    memories = [replace(pool.memory, probe_blocks=2) for pool in (source, target)]
    writer, owner = make(), make()
    writer.register_memory(memories[0])
    endpoint = owner.register_memory(memories[1])
    writer.connect(endpoint)
    prober = LaneProber(writer, memories[0], "", lambda: None)
    prober.add(endpoint)
    end = time.monotonic() + PATIENCE_S
    while prober.active:
        assert time.monotonic() < end
        prober.poll()
        owner.poll()
    (lane,) = prober.take()
    assert lane.gb_per_s > 0
    assert not target.data[:-2].any()
    assert target.data[-2:].any()


RANKS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (4, 4)]


@pytest.mark.parametrize(("prefill", "decode"), RANKS)
@pytest.mark.parametrize(("mine", "theirs"), [(8, 32), (32, 8), (16, 16)])
def test_ranks_with_blocks_of_different_sizes(prefill: int, decode: int, mine: int, theirs: int) -> None:
    """Heads are outermost in a layer's piece of a block, and tokens in order within each."""
    hub, heads = MemoryHub(), 4
    order = "tests" + HEADS_OUTERMOST + ",kv,token,dim"
    source = RankPools(64 // mine, prefill, block_size=mine, axis_order=order)
    target = RankPools(64 // theirs, decode, block_size=theirs, axis_order=order)
    tokens, layers, dim = min(mine, theirs), LAYOUT.num_layers + 1, LAYOUT.head_dim
    rng = np.random.default_rng(1)
    whole = rng.integers(1, 256, (layers, 64 // mine, heads, 2 * mine * dim), dtype=np.uint8)
    source.fill(whole)
    writer, _ = source.transport(lambda: MemoryTransport(hub))
    owner, endpoint = target.transport(lambda: MemoryTransport(hub))
    writer.connect(endpoint)
    count = 64 // tokens
    remote = rng.permutation(count).tolist()
    writer.write(endpoint.agent_id, list(range(count)), remote, b"done")
    settled(writer, owner)

    def parts(pool: np.ndarray, size: int) -> np.ndarray:  # type: ignore[type-arg]
        split = pool.reshape(layers, 64 // size, heads, 2, size // tokens, tokens * dim)
        return split.transpose(1, 4, 0, 2, 3, 5).reshape(count, layers, heads, 2, tokens * dim)

    expected = np.zeros((layers, 64 // theirs, heads, 2 * theirs * dim), dtype=np.uint8)
    arrived = np.empty_like(parts(expected, theirs))
    arrived[remote] = parts(whole, mine)
    split = arrived.reshape(64 // theirs, theirs // tokens, layers, heads, 2, tokens * dim)
    expected[:] = split.transpose(2, 0, 3, 4, 1, 5).reshape(expected.shape)
    target.assert_holds(expected)


def test_a_transport_of_whole_blocks_refuses_by_name() -> None:
    require_ucx()
    writer, owner = UcxTransport(), UcxTransport()
    try:
        writer.register_memory(a_pool(16).memory)
        endpoint = owner.register_memory(a_pool(32).memory)
        with pytest.raises(FailedPreconditionError, match="16 here and 32") as raised:
            writer.connect(endpoint)
        assert (raised.value.reason, raised.value.field) == ("LAYOUT_MISMATCH", "block_size_tokens")
    finally:
        writer.close()
        owner.close()
