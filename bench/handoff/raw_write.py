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
def raw_lane(pool_bytes: int, cores: Sequence[int]) -> Iterator[RawLane]:
    """Starts writer and receiver, on the first and the second of `cores`, in turn."""
    context = multiprocessing.get_context("spawn")
    to_writer, writer_end = context.Pipe()
    between, receiver_end = context.Pipe()
    places = (cores[0], cores[1 % len(cores)])
    processes = [
        context.Process(target=_write, args=(writer_end, between, pool_bytes, places[0]), daemon=True),
        context.Process(target=_receive, args=(receiver_end, pool_bytes, places[1]), daemon=True),
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

    def __init__(self, pool_bytes: int, core: int) -> None:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)  # idle ones would spin on the core that writes
        layout = KvLayout("raw", "bfloat16", 1, 1, 1, PAGE_BYTES // 4)
        self.pool = KvCacheMemory(layout, pool_bytes // PAGE_BYTES, torch.device("cpu"))
        self.address, self.size = self.pool.memory().base_address, pool_bytes
        self.name = str(uuid.uuid4())
        self.agent = NixlAgent(self.name)
        self.regions = self.agent.register(self.address, self.size, 0, "DRAM")


def _write(orders: Connection, peer: Connection, pool_bytes: int, core: int) -> None:
    side = _Side(pool_bytes, core)
    metadata, name, address = peer.recv()
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
        start = here // 2, (here + size) // 2
        side.pool.tensor.view(-1)[start[0] : start[1]].add_(1)  # as fresh as KV that was just computed
        mine = agent.prepare_blocks(None, [side.address + here], size, size, 1, 0, "DRAM")
        theirs = agent.prepare_blocks(name, [address + there], size, size, 1, 0, "DRAM")
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


def _receive(peer: Connection, pool_bytes: int, core: int) -> None:
    side = _Side(pool_bytes, core)
    peer.send((side.agent.metadata(), side.name, side.address))
    while not peer.poll(STEP_S):
        side.agent.notifications()
    while peer.recv() is not None:
        peer.send("polling")
        while not side.agent.notifications():
            pass
        peer.send("arrived")
