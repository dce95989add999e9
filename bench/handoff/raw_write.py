"""Raw lane speed: one NIXL WRITE of one descriptor between two processes, without an engine around it.

Both processes hold a KV pool as workers do (same pages, same registration) and sit on the same cores as the
workers. The receiver only polls. Time runs from making the request to the moment at which the writer sees it done.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import numpy as np
import torch

from engine.kv_cache.memory import KvCacheMemory
from kv_transfer.layout import KvLayout
from kv_transfer.transports.nixl.binding import NixlAgent

PAGE_BYTES = 4096
WIRE_UP_POLLS = 200
STEP_S = 0.001


class RawLane:
    """Handle of the writer process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def write_s(self, size: int) -> float:
        """Writes `size` bytes once between random offsets; returns seconds."""
        self._pipe.send(size)
        seconds: float = self._pipe.recv()
        return seconds


@contextmanager
def raw_lane(
    pool_bytes: int, cores: Sequence[int], devices: tuple[str, str] = ("cpu", "cpu")
) -> Iterator[RawLane]:
    """Starts writer and receiver, on the first and the second of `cores` and of `devices`, in turn."""
    context = multiprocessing.get_context("spawn")
    to_writer, writer_end = context.Pipe()
    between, receiver_end = context.Pipe()
    places = (cores[0], cores[1 % len(cores)])
    processes = [
        context.Process(
            target=_write, args=(writer_end, between, pool_bytes, places[0], devices[0]), daemon=True
        ),
        context.Process(target=_receive, args=(receiver_end, pool_bytes, places[1], devices[1]), daemon=True),
    ]
    for process in processes:
        process.start()
    for end in (writer_end, between, receiver_end):
        end.close()  # so that a child that dies is an end of file here, not silence
    try:
        to_writer.recv()
        yield RawLane(to_writer)
    finally:
        with suppress(OSError):
            to_writer.send(None)
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


class _Side:
    """One process's NIXL agent and registered memory."""

    def __init__(self, pool_bytes: int, core: int, device: str) -> None:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)  # idle ones would spin on the core that writes
        layout = KvLayout("raw", "bfloat16", 1, 1, 1, PAGE_BYTES // 4)
        self.pool = KvCacheMemory(layout, pool_bytes // PAGE_BYTES, torch.device(device))
        self.memory = self.pool.memory()
        self.address, self.size = self.memory.base_address, pool_bytes
        self.name = str(uuid.uuid4())
        self.agent = NixlAgent(self.name)
        self.regions = self.agent.register(
            self.address, self.size, self.memory.device_index, self.memory.memory_kind
        )

    def prepared(self, peer: str | None, address: int, size: int, device_id: int) -> int:
        """`size` bytes of the peer's memory, or of its own for None, as one descriptor."""
        return self.agent.prepare_blocks(peer, address, size, 1, device_id, self.memory.memory_kind)

    def refresh(self, start: int, size: int) -> None:
        """Changes the bytes, so that they are as fresh as KV that was just computed."""
        self.pool.tensor.view(-1)[start // 2 : (start + size) // 2].add_(1)
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)


def _write(orders: Connection, peer: Connection, pool_bytes: int, core: int, device: str) -> None:
    side = _Side(pool_bytes, core, device)
    metadata, name, address, device_id = peer.recv()
    agent = side.agent
    agent.add_peer(metadata)
    agent.send(name, b"hello")
    for _ in range(WIRE_UP_POLLS):
        agent.notifications()
        time.sleep(STEP_S)
    orders.send("ready")
    places = random.Random(0)
    index = np.zeros(1, dtype=np.int32)
    while (size := orders.recv()) is not None:
        peer.send("poll")
        peer.recv()
        here, there = (places.randrange((pool_bytes - size) // PAGE_BYTES + 1) * PAGE_BYTES for _ in range(2))
        side.refresh(here, size)
        mine = side.prepared(None, side.address + here, size, side.memory.device_index)
        theirs = side.prepared(name, address + there, size, device_id)
        began = time.monotonic()
        request = agent.make_write(mine, index, theirs, index, b"done")
        over = agent.post(request)
        while not over:
            over = agent.check(request)
        took_s = time.monotonic() - began
        peer.recv()
        agent.release(request)
        agent.release_blocks(mine)
        agent.release_blocks(theirs)
        orders.send(took_s)
    peer.send(None)


def _receive(peer: Connection, pool_bytes: int, core: int, device: str) -> None:
    side = _Side(pool_bytes, core, device)
    peer.send((side.agent.metadata(), side.name, side.address, side.memory.device_index))
    while not peer.poll(STEP_S):
        side.agent.notifications()
    while peer.recv() is not None:
        peer.send("polling")
        while not side.agent.notifications():
            pass
        peer.send("arrived")
