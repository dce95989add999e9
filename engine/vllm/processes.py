"""The worker's connections to the processes of its vLLM: the scheduler, and the ranks that hold KV.

vLLM starts these processes. In each one it loads the connector (`connector.py`), which connects to a Unix socket of the
worker. Commands and events pass through this socket; KV goes from rank to rank.
"""

from __future__ import annotations

import queue
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
"""How long after vLLM says that it is ready a process of vLLM may take to connect."""
SHARED_MEMORY = Path("/dev/shm")
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""The folder of vLLM's own sockets. Its connections stay when the folder is removed."""


class VllmProcesses:
    """The scheduler and the `size` ranks of one vLLM engine. Make it before the engine, then call `join`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.folder = Path(tempfile.mkdtemp(prefix="splitserve-vllm-"))
        self.socket_path = str(self.folder / "socket")
        self.events_address = f"ipc://{self.folder / 'prefix-cache'}"
        """The ZeroMQ address at which vLLM's scheduler publishes the changes of its prefix cache."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.socket_path)
        self._socket.listen(size + 1)
        self.ranks: Sequence[pb.VllmRank] = ()
        """The ranks' descriptions of themselves, by index; empty before `join`."""
        self.events: queue.SimpleQueue[tuple[int, pb.VllmEvent | None]] = queue.SimpleQueue()
        """The processes' events, each with its rank's index (the scheduler: -1). None: the process has ended."""
        self._links: dict[int, VllmLink] = {}
        remove_at_end(self._remove_files)

    @contextmanager
    def temporary_files(self) -> Iterator[None]:
        """Makes this process, and those that it starts, put temporary files into `folder` while the context is open.

        vLLM never removes the file at which its ranks meet, and leaves its sockets behind when it is killed.
        """
        before, tempfile.tempdir = tempfile.tempdir, str(self.folder)
        try:
            with environment_with({SOCKETS_VARIABLE: str(self.folder), "TMPDIR": str(self.folder)}):
                yield
        finally:
            tempfile.tempdir = before

    def join(self) -> None:
        """Accepts the connections of all processes, which they made while vLLM started. Raises VllmEndedError."""
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
            assert hello is not None
            index = hello.rank.index if hello.WhichOneof("part") == "rank" else -1
            self._links[index], ranks[index] = link, hello.rank
        self.ranks = tuple(ranks[index] for index in range(self._size))
        self._unlink_shared_memory()

    def listen(self, wake: Callable[[], None]) -> None:
        """Starts threads that fill `events`, and call `wake` after each event. Call it once, after `join`."""
        for index, link in self._links.items():
            threading.Thread(
                target=self._read, args=(index, link, wake), name=f"vllm-link-{index}", daemon=True
            ).start()

    def command(self, command: pb.VllmCommand, *, rank: int | None = None) -> None:
        """Sends a command to one rank, or to all if `rank` is None. Raises VllmEndedError."""
        for index in range(self._size) if rank is None else (rank,):
            self._links[index].send(command)

    def close(self) -> None:
        """Closes all connections. Idempotent."""
        for link in self._links.values():
            link.close()
        self._remove_files()

    def _read(self, index: int, link: VllmLink, wake: Callable[[], None]) -> None:
        event: pb.VllmEvent | None = pb.VllmEvent()
        while event is not None:
            try:
                event = link.receive(pb.VllmEvent)
            except VllmEndedError:
                event = None
            self.events.put((index, event))
            wake()

    def _remove_files(self) -> None:
        self._socket.close()
        self._unlink_shared_memory()
        shutil.rmtree(self.folder, ignore_errors=True)
        keep_at_end(self._remove_files)

    def _unlink_shared_memory(self) -> None:
        """Removes the names of the ranks' shared memory, which killed ranks leave behind. Without a name the memory is
        freed with the last process that maps it. On CPU, vLLM names it after the file at which the ranks meet."""
        for meeting_file in self.folder.glob("vllm_dist_*"):
            for memory in SHARED_MEMORY.glob(f"{meeting_file.name}*"):
                memory.unlink()
