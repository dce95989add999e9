"""In a rank's process: a thread that owns its transport and does what the worker's engine thread tells it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from engine.vllm.kv_memory import head_digests
from engine.vllm.ranks.rank_link import RankEndedError, RankLink
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import TransferEndpoint, Transport, WriteResult
from splitserve.errors import SplitserveError
from splitserve.v1 import ranks_pb2 as pb

BUSY_POLL_S = 2e-4
"""Between two looks at writes in flight."""
IDLE_POLL_S = 1.0


class RankTransport:
    """Carries out a worker's commands. `make` makes the transport, on the thread that uses it."""

    def __init__(self, link: RankLink, make: Callable[[], Transport], memory: KvMemoryRegion) -> None:
        self._link = link
        self._make = make
        self._memory = memory
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._handles: dict[int, int] = {}
        """The worker's handles of the writes in flight, by the transport's."""
        self._peers: frozenset[str] = frozenset()

    def start(self) -> None:
        """Starts the thread, and waits until the memory is registered. Raises what registering it raised."""
        threading.Thread(target=self._run, name="rank-transport", daemon=True).start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._transport = self._make()
            endpoint = self._transport.register_memory(self._memory)
            self._link.send(pb.RankStarted(endpoint=endpoint.to_proto()))
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        try:
            while True:
                self._turn()
        except RankEndedError:
            return  # the worker is gone, and takes this process with it
        finally:
            self._transport.close()
            self._link.close()  # after any other error the worker ends, too

    def _turn(self) -> None:
        """Carries out what has come, and reports what has ended."""
        if self._link.poll(BUSY_POLL_S if self._handles else IDLE_POLL_S):
            self._carry_out(self._link.receive(pb.RankCommand))
        for ended in self._transport.poll().writes:
            self._report(self._handles.pop(ended.handle), ended)
        self._report_peers()

    def _carry_out(self, command: pb.RankCommand) -> None:
        match command.WhichOneof("kind"):
            case "connect":
                self._link.send(pb.RankEvent(reply=self._connect(command.connect)))
            case "disconnect":
                self._transport.disconnect(command.disconnect)
            case "write":
                self._write(command.write)
            case "read_digests":
                blocks = head_digests(self._memory, command.read_digests.blocks)
                reply = pb.RankReply(digests=[digest for heads in blocks for digest in heads])
                self._link.send(pb.RankEvent(reply=reply))

    def _connect(self, command: pb.RankConnect) -> pb.RankReply:
        endpoint = TransferEndpoint.from_proto(command.endpoint)
        theirs = replace(endpoint.memory, piece_stride=command.piece_stride)
        own = replace(
            self._memory,
            base_address=command.own_base_address,
            layout=theirs.layout,  # the worker has compared the layouts
            piece_stride=self._memory.stride,
        )
        try:
            self._transport.connect_part(replace(endpoint, memory=theirs), own)
        except SplitserveError as error:
            return pb.RankReply(error=error.message, reason=error.reason)
        self._report_peers()
        return pb.RankReply()

    def _write(self, command: pb.RankWrite) -> None:
        problem = "the rank was late"
        if time.monotonic_ns() < command.post_before_ns:
            try:
                handle = self._transport.write(command.agent_id, command.local_blocks, command.remote_blocks)
            except SplitserveError as error:
                problem = error.message
            else:
                self._handles[handle] = command.handle
                return
        self._report(command.handle, WriteResult(0, problem))

    def _report(self, handle: int, ended: WriteResult) -> None:
        event = pb.RankWriteEnded(handle=handle, error=ended.error or "", in_doubt=ended.in_doubt)
        self._link.send(pb.RankEvent(write_ended=event))

    def _report_peers(self) -> None:
        """Tells of a change of the connected peers, before the reply to the command that caused it."""
        peers = self._transport.connected()
        if peers != self._peers:
            self._peers = peers
            self._link.send(pb.RankEvent(peers=pb.RankPeers(agent_ids=sorted(peers))))
