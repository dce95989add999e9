"""A worker's ranks, seen from its engine thread: who they are, where their KV lies, and how they are reached.

vLLM starts the ranks as child processes; scheduler and sampler stay here. In each rank vLLM loads the connector and the
logits processor of this folder, and both connect to the Unix socket that the group listens at. KV travels straight from
and to the ranks (`remote_transport.py`). Logits come up and tokens go down (`sampling_service.py`).
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from engine.vllm.bridge import VllmBridge
from engine.vllm.kv_memory import packed_digests
from engine.vllm.ranks.rank_link import RankEndedError, RankLink
from engine.vllm.ranks.remote_transport import ANSWER_S, RemoteTransport
from engine.vllm.ranks.sampling_service import SamplingService
from kv_transfer.lanes import probe_blocks
from kv_transfer.layout import held_heads
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.errors import UnsupportedModelError
from splitserve.runtime.children_end import keep_at_end, remove_at_end
from splitserve.runtime.process import environment_with
from splitserve.v1 import ranks_pb2 as pb

SOCKET_FIELD = "splitserve_socket"
"""Where the socket's path stands in the extra configuration of vLLM's KV connector."""
WORKER_FIELD = "splitserve_worker_pid"
TRANSPORT_FIELD = "splitserve_transport"
SHARED_MEMORY = Path("/dev/shm")
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""The folder of vLLM's own sockets. Connections outlive the names in it."""


class RankGroup:
    """The `size` ranks of one vLLM engine. Make it before the engine, then `join` the ranks."""

    def __init__(self, size: int, transport: str) -> None:
        self._size = size
        self._folder = Path(tempfile.mkdtemp(prefix="splitserve-ranks-"))
        self._path = str(self._folder / "socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._path)
        self._socket.listen(2 * size)
        self.connector_config = {
            SOCKET_FIELD: self._path,
            WORKER_FIELD: os.getpid(),
            TRANSPORT_FIELD: transport,
        }
        """What the ranks are told."""
        self.transports: Sequence[RemoteTransport] = ()
        self._sampling: SamplingService | None = None
        self._held: list[range] = []
        remove_at_end(self._remove_files)

    @contextmanager
    def temporary_files(self) -> Iterator[None]:
        """While the context is open, new temporary files lie in the group's folder, those of ranks that start in it
        too: vLLM leaves one behind that its ranks meet at, and sockets when they are killed."""
        before, tempfile.tempdir = tempfile.tempdir, str(self._folder)
        try:
            with environment_with({SOCKETS_VARIABLE: str(self._folder)}):
                yield
        finally:
            tempfile.tempdir = before

    def join(self, bridge: VllmBridge, vocabulary_size: int) -> None:
        """Takes the connections of all ranks, which have made them while vLLM started. Removes the folder."""
        links: dict[tuple[int, int], RankLink] = {}
        self._socket.settimeout(ANSWER_S)
        while len(links) < 2 * self._size:
            try:
                end, _ = self._socket.accept()
            except TimeoutError:
                raise RankEndedError("a rank of vLLM did not connect") from None
            end.setblocking(True)
            link = RankLink(Connection(end.detach()), "a rank")
            hello = link.receive(pb.RankHello)
            links[hello.rank, hello.channel] = link
        self._remove_files()
        ranks = range(self._size)
        self.transports = tuple(_started(links[rank, pb.RANK_CHANNEL_KV]) for rank in ranks)
        sampling = [links[rank, pb.RANK_CHANNEL_SAMPLING] for rank in ranks]
        self._sampling = SamplingService(sampling, bridge, vocabulary_size)

    @property
    def endpoints(self) -> tuple[TransferEndpoint, ...]:
        """Where the KV of each rank lies."""
        return tuple(transport.endpoint for transport in self.transports)

    def memory(self, fingerprint: str, kv_heads: int) -> KvMemoryRegion:
        """The pool of all ranks together, for a model with so many KV heads; its last blocks are for lane probes.

        Raises UnsupportedModelError for heads that are shared out in another way than `held_heads` says.
        """
        first = self.transports[0].endpoint.memory
        self._held = [held_heads(self._size, rank, kv_heads) for rank in range(self._size)]
        for transport, held in zip(self.transports, self._held, strict=True):
            memory = transport.endpoint.memory
            if memory.layout.num_kv_heads != len(held) or memory.num_blocks != first.num_blocks:
                raise UnsupportedModelError("engine vllm: the ranks' KV is not alike")
        layout = replace(
            first.layout,
            model_fingerprint=fingerprint,
            num_kv_heads=kv_heads,
            tensor_parallel_size=self._size,
        )
        return replace(
            first,
            base_address=0,
            layer_stride=0,
            device_index=0,
            layout=layout,
            probe_blocks=probe_blocks(layout.block_bytes),
        )

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """What the checksums of blocks are made from, as of a worker of one rank."""
        by_rank = [transport.read_digests(block_ids) for transport in self.transports]
        return packed_digests(
            [block_digests(by_rank, self._held, place) for place in range(len(block_ids))]
            if block_ids
            else ()
        )

    def close(self) -> None:
        """Closes all connections, after vLLM has ended its ranks. Idempotent."""
        self._remove_files()
        if self._sampling is not None:
            self._sampling.close()
        for transport in self.transports:
            transport.close()

    def _remove_files(self) -> None:
        self._socket.close()
        # On cpu vLLM names the ranks' shared memory after the file that they meet at, and a killed rank would leave it
        # behind. Without a name it lives as long as it is mapped.
        for meeting in self._folder.glob("vllm_dist_*"):
            for memory in SHARED_MEMORY.glob(f"{meeting.name}*"):
                memory.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        keep_at_end(self._remove_files)


def block_digests(by_rank: Sequence[Sequence[int]], held: Sequence[range], place: int) -> list[int]:
    """The digests of a block's heads, of all ranks. Replicas of a head that differ make 0, which matches nothing."""
    of_head: dict[int, set[int]] = {}
    for digests, heads in zip(by_rank, held, strict=True):
        for index, head in enumerate(heads):
            of_head.setdefault(head, set()).add(digests[place * len(heads) + index])
    return [next(iter(values)) if len(values) == 1 else 0 for _, values in sorted(of_head.items())]


def _started(link: RankLink) -> RemoteTransport:
    return RemoteTransport(link, TransferEndpoint.from_proto(link.receive(pb.RankStarted).endpoint))
