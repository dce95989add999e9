"""The processes of a worker's vLLM, seen from its engine thread: its scheduler, its ranks, where their KV lies.

vLLM starts them. In each it loads the connector (`connector.py`), which connects to the Unix socket that this module
listens at. Bytes travel straight from rank to rank; what passes here are commands and events.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from engine.vllm.links import VllmEndedError, VllmLink
from splitserve.runtime.children_end import keep_at_end, remove_at_end
from splitserve.runtime.process import environment_with
from splitserve.v1 import vllm_pb2 as pb

JOIN_S = 30.0
"""A process of vLLM's that has not connected so long after vLLM says that it is ready is taken for broken."""
SHARED_MEMORY = Path("/dev/shm")
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""The folder of vLLM's own sockets. Connections outlive the names in it."""


class VllmProcesses:
    """The scheduler and the `size` ranks of one vLLM engine. Make it before the engine, then `join` them.

    Events of the processes are passed to `on_event` by reader threads, with the rank's index (-1: the scheduler); their
    end as None.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.folder = Path(tempfile.mkdtemp(prefix="splitserve-vllm-"))
        self.socket_path = str(self.folder / "socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.socket_path)
        self._socket.listen(size + 1)
        self.ranks: Sequence[pb.VllmRank] = ()
        """What the ranks say of themselves, in order."""
        self._links: dict[int, VllmLink] = {}
        remove_at_end(self._remove_files)

    @contextmanager
    def temporary_files(self) -> Iterator[None]:
        """While the context is open, new temporary files lie in the group's folder, those of processes that start in it
        too: vLLM leaves one behind that its ranks meet at, and sockets when they are killed."""
        before, tempfile.tempdir = tempfile.tempdir, str(self.folder)
        try:
            with environment_with({SOCKETS_VARIABLE: str(self.folder), "TMPDIR": str(self.folder)}):
                yield
        finally:
            tempfile.tempdir = before

    def join(self) -> None:
        """Takes the connections of all processes, which have made them while vLLM started. Raises VllmEndedError."""
        ranks: dict[int, pb.VllmRank] = {}
        self._socket.settimeout(JOIN_S)
        while len(self._links) < self._size + 1:
            try:
                end, _ = self._socket.accept()
            except TimeoutError:
                raise VllmEndedError("a process of vLLM did not connect") from None
            end.setblocking(True)
            link = VllmLink(Connection(end.detach()), "a process of vLLM")
            hello = link.receive(pb.VllmHello)
            if hello.WhichOneof("part") == "rank":
                ranks[hello.rank.index], self._links[hello.rank.index] = hello.rank, link
            else:
                self._links[-1] = link
        self.ranks = tuple(ranks[index] for index in range(self._size))

    def listen(self, on_event: Callable[[int, pb.VllmEvent | None], None]) -> None:
        """Starts to pass events on. Call it once, after `join`."""
        for index, link in self._links.items():
            thread = threading.Thread(
                target=self._read, args=(index, link, on_event), name=f"vllm-link-{index}", daemon=True
            )
            thread.start()

    def command(self, command: pb.VllmCommand, *, rank: int | None = None) -> None:
        """Tells one rank, or all, to do something. Raises VllmEndedError."""
        for index in range(self._size) if rank is None else (rank,):
            self._links[index].send(command)

    def close(self) -> None:
        """Closes all connections. Idempotent."""
        for link in self._links.values():
            link.close()
        self._remove_files()

    @staticmethod
    def _read(index: int, link: VllmLink, on_event: Callable[[int, pb.VllmEvent | None], None]) -> None:
        while True:
            try:
                event = link.receive(pb.VllmEvent)
            except VllmEndedError:
                on_event(index, None)
                return
            on_event(index, event)

    def _remove_files(self) -> None:
        self._socket.close()
        # On cpu vLLM names the ranks' shared memory after the file that they meet at, and a killed rank would leave it
        # behind. Without a name it lives as long as it is mapped.
        for meeting in self.folder.glob("vllm_dist_*"):
            for memory in SHARED_MEMORY.glob(f"{meeting.name}*"):
                os.unlink(memory)
        shutil.rmtree(self.folder, ignore_errors=True)
        keep_at_end(self._remove_files)
