"""A write of this process to itself through its transport, from and to the memory of a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from engine.kv_cache.memory import BlockMemory
from engine.runner.self_test.verdict import WrongResultError
from kv_transfer.layout import KvLayout
from kv_transfer.transports.transport import Transport
from splitserve.errors import TransferError

BLOCKS = 16
FROM, TO = (3, 4, 5, 9, 1), (10, 11, 2, 7, 0)
"""Blocks in no order, two of them next to each other on both sides."""
LAYOUT = KvLayout("self-test", "bfloat16", block_size_tokens=16, num_layers=2, num_kv_heads=2, head_dim=64)
DONE = b"self-test"
TIMEOUT_S = 20.0
POLL_S = 5e-4


def check_transfer(
    make: Callable[[], Transport],
    device: torch.device,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """One transport writes blocks with a notification to another of this process; both register memory of `device`.

    The bytes must lie in these blocks and nowhere else when the notification is there. Raises WrongResultError,
    TransferError, or what the transport raises.
    """
    writer, owner = make(), make()
    try:
        ours, theirs = (BlockMemory(LAYOUT, BLOCKS, device) for _ in range(2))
        numbers = torch.Generator().manual_seed(5)
        for memory in (ours, theirs):
            random = torch.randint(256, memory.bytes.shape, generator=numbers, dtype=torch.uint8)
            memory.bytes.copy_(random)
        expected = theirs.bytes.clone()
        expected[list(TO)] = ours.bytes[list(FROM)]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # transports do not wait for the device's queue
        writer.register_memory(ours.memory())
        endpoint = owner.register_memory(theirs.memory())
        writer.connect(endpoint)
        handle = writer.write(endpoint.agent_id, FROM, TO, DONE)
        _wait(writer, owner, handle, clock, sleep)
        if not torch.equal(theirs.bytes, expected):
            raise WrongResultError("other bytes arrived than were sent")
    finally:
        for transport in (writer, owner):
            with suppress(TransferError):
                transport.close()


def _wait(
    writer: Transport,
    owner: Transport,
    handle: int,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    written, told, deadline = False, False, clock() + TIMEOUT_S
    while not (written and told):
        for write in writer.poll().writes:
            if write.handle == handle:
                if write.error is not None:
                    raise TransferError(write.error)
                written = True
        told = told or any(message == DONE for _, message in owner.poll().notifications)
        if clock() > deadline:
            missing = "its notification did not arrive" if written else "it did not end"
            raise TransferError(f"{missing} in {TIMEOUT_S:g} s")
        sleep(POLL_S)
