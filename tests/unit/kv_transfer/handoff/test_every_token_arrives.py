"""A whole handoff over real memory: every token of each layer and head arrives once, in its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff.checksums import HandoffVerifier, KvMemory
from kv_transfer.handoff.messages import KvTicket, WriteCompletion, decode
from kv_transfer.handoff.pusher import KvPusher, PushDone
from splitserve.generation.kv_blocks import blocks_for
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport
from tests.support.transfer.numpy_pool import LAYOUT, NumpyPool


def kv_memory(pool: NumpyPool) -> KvMemory:
    return KvMemory(pool.memory, lambda ids: [memoryview(pool.data[i]) for i in ids])


@pytest.mark.parametrize("size", [1, 3, 16, 64])
@given(data=st.data())
def test_every_token_arrives_once(size: int, data: st.DataObject) -> None:
    """Through the pusher, chunk by chunk, over a transport that copies; checksums of all blocks match on arrival."""
    tokens = data.draw(st.integers(1, 4 * size + 1), label="prompt")
    filled = blocks_for(tokens, size)
    cached = data.draw(st.integers(0, tokens // size), label="cached blocks")
    ends = data.draw(st.lists(st.integers(1, tokens), max_size=4), label="chunks")
    source, target = (NumpyPool(filled + 2, layout=replace(LAYOUT, block_size_tokens=size)) for _ in range(2))
    source.stamp(tokens)
    hub = MemoryHub()
    sender, owner = MemoryTransport(hub), MemoryTransport(hub)
    sender.register_memory(source.memory)
    endpoint = owner.register_memory(target.memory)
    sender.connect(endpoint)
    table = data.draw(st.permutations(range(filled + 2)), label="blocks of the writer")[:filled]
    order = data.draw(st.permutations(range(filled + 2)), label="blocks of the reader")
    reserved = order[: filled - cached]
    total_bytes = len(reserved) * target.memory.layout.block_bytes
    ticket = KvTicket(
        endpoint.agent_id,
        9,
        5,
        tuple(reserved),
        cached * size,
        total_bytes,
        deadline_s=100.0,
        verify_one_in=1,
    )
    verifier = HandoffVerifier(9, 1, kv_memory(target))
    verifier.expect(5, reserved)
    pusher = KvPusher(sender, kv_memory(source))
    pusher.start("r", ticket, endpoint, 0.0)
    events = []
    for end in sorted({*ends, tokens}):
        last = end == tokens
        pusher.on_progress("r", end, table[: blocks_for(end, size)], last, 7 if last else None, 1.0)
        events += pusher.poll(1.0, sender.poll().writes)
    while not events:
        events += pusher.poll(1.0, sender.poll().writes)
    (done,) = events
    assert isinstance(done, PushDone)
    assert done.written_bytes == total_bytes

    expected = np.zeros_like(target.data)
    expected[reserved] = source.data[table[cached:]]
    np.testing.assert_array_equal(target.data, expected)

    ((_, message),) = owner.poll().notifications
    completion = decode(message)
    assert isinstance(completion, WriteCompletion)
    assert completion.written_bytes == ticket.total_bytes
    damaged = replace(completion, checksums=(*completion.checksums[:-1], 1))
    assert verifier.matches(completion)
    verifier.expect(5, reserved)
    assert verifier.matches(damaged) == (not completion.checksums and damaged == completion)
