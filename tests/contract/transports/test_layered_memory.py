"""Blocks that lie layer by layer: a write moves one piece of each row."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.transports.nixl.transport import NixlTransport
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import TransferEndpoint, Transport
from kv_transfer.transports.ucx.transport import UcxTransport
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from tests.support.engine.numpy_pool import LAYOUT, NumpyPool
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport
from tests.support.transfer.ucx import require_ucx
from tests.support.waiting import PATIENCE_S

PIECE = LAYOUT.block_bytes // LAYOUT.num_layers
GAP = 256


class LayeredPool:
    """`data` is `[layers, row bytes]`, uint8, with unused bytes behind each row; `pieces` `[layers, blocks, bytes]`."""

    def __init__(self, num_blocks: int) -> None:
        self.data = np.zeros((LAYOUT.num_layers, num_blocks * PIECE + GAP), dtype=np.uint8)
        self.pieces = self.data[:, : num_blocks * PIECE].reshape(LAYOUT.num_layers, num_blocks, PIECE)
        address, stride = self.data.ctypes.data, self.data.shape[1]
        self.memory = KvMemoryRegion(address, num_blocks, LAYOUT, layer_stride=stride)


def pair(kind: str) -> tuple[Transport, Transport]:
    hub = MemoryHub()
    return (
        (MemoryTransport(hub), MemoryTransport(hub))
        if kind == "memory"
        else (NixlTransport(), NixlTransport())
    )


@pytest.mark.parametrize("kind", ["memory", "nixl"])
def test_bytes_arrive_in_each_row_and_nowhere_else(kind: str) -> None:
    writer, owner = pair(kind)
    source, target = LayeredPool(12), LayeredPool(7)
    source.data[:] = np.random.default_rng(1).integers(1, 256, source.data.shape, dtype=np.uint8)
    expected = target.data.copy()
    rows = expected[:, : 7 * PIECE].reshape(LAYOUT.num_layers, 7, PIECE)
    local, remote = [3, 4, 11, 0], [5, 6, 0, 2]
    rows[:, remote] = source.pieces[:, local]
    writer.register_memory(source.memory)
    endpoint = owner.register_memory(target.memory)
    writer.connect(TransferEndpoint.from_proto(endpoint.to_proto()))
    handle = writer.write(endpoint.agent_id, local, remote, b"done")
    writes, notifications, end = [], [], time.monotonic() + PATIENCE_S
    while not (writes and notifications):
        assert time.monotonic() < end
        writes += writer.poll().writes
        notifications += owner.poll().notifications
    assert [write.handle for write in writes if write.error is None] == [handle]
    np.testing.assert_array_equal(target.data, expected)
    assert writer.descriptors_posted == 3 * LAYOUT.num_layers
    writer.close()
    owner.close()


def test_whole_blocks_and_rows_do_not_meet() -> None:
    hub = MemoryHub()
    for mine, theirs in ((LayeredPool(4), NumpyPool(4)), (NumpyPool(4), LayeredPool(4))):
        writer, owner = MemoryTransport(hub), MemoryTransport(hub)
        writer.register_memory(mine.memory)
        with pytest.raises(FailedPreconditionError, match="layer by layer") as raised:
            writer.connect(owner.register_memory(theirs.memory))
        assert (raised.value.reason, raised.value.field) == ("LAYOUT_MISMATCH", "layer_stride")


def test_rows_must_not_overlap() -> None:
    hub, layered = MemoryHub(), LayeredPool(8)
    with pytest.raises(InvalidArgumentError, match="layer_stride"):
        MemoryTransport(hub).register_memory(replace(layered.memory, layer_stride=8 * PIECE - 1))


def test_ucx_refuses_rows() -> None:
    require_ucx()
    transport = UcxTransport()
    with pytest.raises(FailedPreconditionError, match="one piece only"):
        transport.register_memory(LayeredPool(4).memory)
    whole = NumpyPool(4).memory
    transport.register_memory(whole)
    theirs = TransferEndpoint("a", transport.kind, b"", LayeredPool(4).memory)
    with pytest.raises(FailedPreconditionError, match="layer by layer") as raised:
        transport.connect(theirs)
    assert raised.value.field == "layer_stride"
    transport.close()
