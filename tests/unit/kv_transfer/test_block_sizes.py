"""Blocks of different sizes: every token of each layer and head arrives once, in its place, whatever is cached."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.block_sizes import block_sizes, sub_blocks, whole_blocks
from kv_transfer.handoff.checksums import HandoffVerifier
from kv_transfer.handoff.notification import WriteCompletion, decode
from kv_transfer.handoff.push_state import PushDone
from kv_transfer.handoff.pusher import KvPusher
from kv_transfer.handoff.ticket import KvTicket
from kv_transfer.layout import FP8_E4M3, HEADS_OUTERMOST, KEYS_BY_DIM, KvLayout
from kv_transfer.transports.descriptors import in_common
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.transport import KvMemoryRegion, TransferEndpoint
from kv_transfer.wire_format import PlainWire
from splitserve.errors import FailedPreconditionError
from splitserve.generation.kv_blocks import blocks_for
from tests.support.engine.numpy_pool import LAYOUT, NumpyPool

SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
PAIRS = [(a, b) for a in SIZES for b in SIZES if a % b == 0 or b % a == 0]


def tokens_of(pool: NumpyPool) -> np.ndarray:  # type: ignore[type-arg]
    """A view `[blocks, layer * kv * head, token, dim]` of a pool."""
    layout = pool.memory.layout
    return pool.data.reshape(len(pool.data), -1, layout.block_size_tokens, layout.head_dim)


def pools(writer: int, reader: int, tokens: int) -> tuple[NumpyPool, NumpyPool]:
    """A stamped pool and an empty one, with room for a prompt and some more."""
    made = [
        NumpyPool(blocks_for(tokens, size) + 2, layout=replace(LAYOUT, block_size_tokens=size))
        for size in (writer, reader)
    ]
    made[0].stamp(tokens)
    return made[0], made[1]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
@given(data=st.data())
def test_every_token_arrives_once(writer: int, reader: int, data: st.DataObject) -> None:
    """Through the pusher, chunk by chunk, over a transport that copies; checksums of all blocks match on arrival."""
    large = max(writer, reader)
    tokens = data.draw(st.integers(1, 4 * large + 1), label="prompt")
    cached = data.draw(st.integers(0, tokens // reader), label="cached blocks") * reader
    ends = data.draw(st.lists(st.integers(1, tokens), max_size=4), label="chunks")
    source, target = pools(writer, reader, tokens)
    hub = MemoryHub()
    sender, owner = MemoryTransport(hub), MemoryTransport(hub)
    sender.register_memory(source.memory)
    endpoint = owner.register_memory(target.memory)
    sender.connect(endpoint)
    table = data.draw(st.permutations(range(len(source.data))), label="blocks of the writer")
    table = table[: blocks_for(tokens, writer)]
    order = data.draw(st.permutations(range(len(target.data))), label="blocks of the reader")
    reserved = order[: blocks_for(tokens, reader) - cached // reader]
    ticket = KvTicket(
        endpoint.agent_id,
        9,
        5,
        tuple(reserved),
        cached,
        len(reserved) * target.memory.layout.block_bytes,
        deadline_s=100.0,
        verify_one_in=1,
    )
    wires = [
        PlainWire(
            lambda pool=pool: pool.memory, lambda ids, pool=pool: [memoryview(pool.data[i]) for i in ids]
        )
        for pool in (source, target)
    ]
    verifier = HandoffVerifier(9, 1, wires[1])
    verifier.expect(5, reserved, tokens - cached)
    pusher = KvPusher(sender, wires[0])
    pusher.start("r", ticket, endpoint, 0.0)
    events = []
    for end in sorted({*ends, tokens}):
        last = end == tokens
        pusher.on_progress("r", end, table[: blocks_for(end, writer)], last, 7 if last else None, 1.0)
        events += pusher.poll(1.0)
    while not events:
        events += pusher.poll(1.0)
    (done,) = events
    assert isinstance(done, PushDone)

    expected = np.zeros_like(tokens_of(target))
    whole = tokens_of(source)[table].swapaxes(1, 2).reshape(-1, *np.delete(tokens_of(source).shape, [0, 2]))
    for position in range(cached, tokens):
        block, at = divmod(position - cached, reader)
        expected[reserved[block], :, at] = whole[position]
    sub = min(writer, reader)
    written = tokens_of(target).copy()
    for position in range(
        tokens, blocks_for(tokens, sub) * sub
    ):  # what lies behind the prompt is of no account
        block, at = divmod(position - cached, reader)
        written[reserved[block], :, at] = 0
    np.testing.assert_array_equal(written, expected)
    assert done.written_bytes == (blocks_for(tokens, sub) - cached // sub) * sub * LAYOUT.block_bytes // 16

    ((_, message),) = owner.poll().notifications
    completion = decode(message)
    assert isinstance(completion, WriteCompletion)
    assert completion.written_bytes == ticket.total_bytes
    damaged = replace(completion, checksums=(*completion.checksums[:-1], 1))
    assert verifier.matches(completion)
    verifier.expect(5, reserved, tokens - cached)
    assert verifier.matches(damaged) == (not completion.checksums and damaged == completion)


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_the_parts_of_both_sides_cover_their_memory_once(writer: int, reader: int) -> None:
    """Whole, layer by layer, and for each share of the heads, as tensor-parallel ranks have them."""
    heads = 4
    for layered in (False, True):
        for count in (1, 2, 4) if layered else (heads,):
            sides = []
            for size in (writer, reader):
                layout = replace(LAYOUT, block_size_tokens=size, num_kv_heads=heads)
                blocks = 2 * max(writer, reader) // size
                stride = blocks * layout.block_bytes // layout.num_layers if layered else 0
                region = KvMemoryRegion(4096, blocks, layout, layer_stride=stride)
                parts = (
                    [region.heads(first, count) for first in range(0, heads, count)] if layered else [region]
                )
                sides.append(parts)
            addresses: list[Counter[int]] = [Counter(), Counter()]
            for pair in zip(*sides, strict=True):
                mine, theirs = in_common(*pair)
                assert mine.piece_bytes == theirs.piece_bytes
                assert len(mine.rows) // mine.divisions == len(theirs.rows) // theirs.divisions
                assert mine.num_blocks * mine.divisions == theirs.num_blocks * theirs.divisions
                for side, seen in zip((mine, theirs), addresses, strict=True):
                    starts = (
                        row + block * side.stride for row in side.rows for block in range(side.num_blocks)
                    )
                    seen.update(byte for start in starts for byte in range(start, start + side.piece_bytes))
            for seen, parts in zip(addresses, sides, strict=True):
                size = parts[0].num_blocks * parts[0].layout.block_bytes * len(parts)
                assert seen == Counter(range(4096, 4096 + size))


@pytest.mark.parametrize(("layered", "whole"), [(16, 16), (16, 32), (64, 16)])
def test_rows_and_whole_blocks_pair_the_same_vectors(layered: int, whole: int) -> None:
    """A descriptor on one side has the layer, key or value, head and tokens of its counterpart."""
    stride = 1 << 20

    def vector(side: KvMemoryRegion, row: int, number: int) -> tuple[int, int]:
        """Which key or value of which head and layer begins a part, and its token, from its address alone."""
        size = side.layout.block_size_tokens
        block = number // side.divisions
        address = side.rows[row * side.divisions + number % side.divisions] + block * side.stride
        layer, offset = divmod(address - 4096, stride if side.layer_stride == stride else 1 << 40)
        block_bytes = side.layout.block_bytes // (
            side.layout.num_layers if side.layer_stride == stride else 1
        )
        at, inside = divmod(offset, block_bytes)
        which, token = divmod((layer * block_bytes + inside) // side.layout.token_bytes, size)
        return which, at * size + token

    def region(size: int, layer_stride: int) -> KvMemoryRegion:
        return KvMemoryRegion(
            4096, 128 // size, replace(LAYOUT, block_size_tokens=size), layer_stride=layer_stride
        )

    mine, theirs = in_common(region(layered, stride), region(whole, 0))
    rows = len(mine.rows) // mine.divisions
    assert rows == len(theirs.rows) // theirs.divisions
    assert rows % LAYOUT.num_layers == 0
    assert mine.piece_bytes == theirs.piece_bytes
    assert mine.num_sub_blocks == theirs.num_sub_blocks
    assert theirs.span_bytes == region(whole, 0).span_bytes
    for row in range(rows):
        for number in range(mine.num_sub_blocks):
            assert vector(mine, row, number) == vector(theirs, row, number)


def test_equal_sizes_use_the_blocks_as_they_are() -> None:
    blocks = [3, 1, 2]
    assert sub_blocks(blocks, 1) is blocks
    assert whole_blocks(blocks, 1) is blocks
    region = KvMemoryRegion(4096, 8, LAYOUT)
    assert in_common(region, region) == (region, region)
    assert block_sizes(16, 16).final(33, is_last=False) == 2
    assert block_sizes(16, 16).final(33, is_last=True) == 3


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "one must divide the other"),
        ({"axis_order": "opaque" + HEADS_OUTERMOST}, "cannot be divided by tokens"),
        ({"axis_order": KEYS_BY_DIM}, "cannot be divided by tokens"),
        ({"dtype": "bfloat16", "wire_dtype": FP8_E4M3}, "cannot be divided by tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_values(changes: dict[str, str], word: str) -> None:
    mine = replace(LAYOUT, **changes)  # type: ignore[arg-type]
    theirs = replace(mine, block_size_tokens=24 if not changes else 32)
    for one, other in ((mine, theirs), (theirs, mine)):
        with pytest.raises(FailedPreconditionError, match=word) as raised:
            one.require_fits(other, who="decode worker w")
        assert (raised.value.reason, raised.value.field) == ("LAYOUT_MISMATCH", "block_size_tokens")
        assert str(one.block_size_tokens) in raised.value.message
        assert str(other.block_size_tokens) in raised.value.message
    mine.require_fits(mine, who="itself")


def test_more_parts_than_can_be_numbered_are_refused() -> None:
    large = KvLayout("f" * 64, "bfloat16", 1024, num_layers=64, num_kv_heads=8, head_dim=128)
    mine = KvMemoryRegion(4096, 2**10, large)
    fits = KvMemoryRegion(4096, 8, replace(large, block_size_tokens=1))
    assert in_common(mine, fits)[0].divisions == 1024
    deep = replace(large, num_layers=128)
    pairs = [
        (replace(mine, num_blocks=2**11), fits),
        (replace(mine, layout=deep), replace(fits, layout=replace(deep, block_size_tokens=1))),
    ]
    for here, there in pairs:
        with pytest.raises(FailedPreconditionError, match="1024 here and 1 there") as raised:
            in_common(here, there)
        assert (raised.value.reason, raised.value.field) == ("LAYOUT_MISMATCH", "block_size_tokens")


def test_a_writer_cannot_choose_a_checksum_size_that_does_not_divide() -> None:
    pool = NumpyPool(4)
    verifier = HandoffVerifier(
        9, 1, PlainWire(lambda: pool.memory, lambda ids: [memoryview(pool.data[i]) for i in ids])
    )
    for size in (3, 17, 2**32 - 1):
        verifier.expect(5, [1], 16)
        assert not verifier.matches(WriteCompletion(9, 5, 1, 2, (3,), size))


def test_an_endpoint_keeps_its_own_block_size_on_the_wire() -> None:
    memory = KvMemoryRegion(4096, 8, replace(LAYOUT, block_size_tokens=32))
    endpoint = TransferEndpoint("a", "memory", b"", memory)
    assert TransferEndpoint.from_proto(endpoint.to_proto()) == endpoint
