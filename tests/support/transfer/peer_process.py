"""A process with a transport, for tests that need a second one to write to, stop and kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from kv_transfer.transports import make_transport
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.v1 import kv_transfer_pb2 as pb
from tests.support.transfer.numpy_pool import NumpyPool
from tests.support.waiting import PATIENCE_S

NUM_BLOCKS = 32


def _serve(pipe: Connection, kind: str) -> None:
    """Polls; answers each notification on the pipe with (sender, message, bytes of the pool)."""
    pool, transport = NumpyPool(NUM_BLOCKS), make_transport(kind)
    pipe.send(transport.register_memory(pool.memory).to_proto().SerializeToString())
    while not pipe.poll(0.001):
        for sender, message in transport.poll().notifications:
            pipe.send((sender, message, pool.data.tobytes()))
    transport.close()


class PeerProcess:
    """Context manager around the process; `kind` is the transport's."""

    def __init__(self, kind: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind), daemon=True)
        self._process.start()
        theirs.close()
        self.endpoint = TransferEndpoint.from_proto(pb.TransferEndpoint.FromString(self._receive()))

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._pipe.close()

    def _receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the peer process says nothing"
        return self._pipe.recv()

    def answered(self) -> bool:
        """Whether a notification has come in over there."""
        return self._pipe.poll(0)

    def next_notification(self) -> tuple[str, bytes, bytes]:
        """(sender, message, bytes of the whole pool when it came in)."""
        sender, message, data = self._receive()
        return sender, message, data

    def freeze(self) -> None:
        """Stops the process and waits until it stands."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def kill(self) -> None:
        """Ends the process at once, as a crash would, and waits for its end."""
        self._process.kill()
        self._process.join(PATIENCE_S)
