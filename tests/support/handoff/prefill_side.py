"""A prefill worker of the explored system: the production pusher over a transport whose writes the search ends."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from kv_transfer.handoff.checksums import KvMemory
from kv_transfer.handoff.messages import WRITE_GRACE_S, KvTicket
from kv_transfer.handoff.pusher import KvPusher, Push, PushDone, PushEvent, PushFailed
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import PollResult, TransferEndpoint, Transport, WriteResult
from splitserve.errors import SplitserveError, TransferError
from splitserve.v1 import kv_transfer_pb2
from tests.support.handoff.decode_side import TICK_S, first_token
from tests.support.handoff.explorer import Violation
from tests.support.transfer.numpy_pool import LAYOUT

SIZE = LAYOUT.block_size_tokens
Landing = tuple[str, int, float]
"""Bytes that may arrive: the owner's agent id, the reservation, and until when."""


@dataclass(frozen=True, order=True)
class Posted:
    """A write in flight. `landed`: all bytes have arrived; the writer does not know yet."""

    agent_id: str
    remote: tuple[int, ...]
    notification: bytes
    landed: bool = False


class OpenTransport(Transport):
    """Writes stay in flight until the search ends them."""

    kind = "explored"

    def __init__(self) -> None:
        self.peers: set[str] = set()
        self.open: dict[int, Posted] = {}
        self.results: list[WriteResult] = []
        self.sent: list[tuple[str, bytes]] = []
        self.posted: list[int] = []
        """Handles since the last look."""

    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        raise NotImplementedError

    def connect(self, endpoint: TransferEndpoint) -> None:
        self.peers.add(endpoint.agent_id)

    def disconnect(self, agent_id: str) -> None:
        self.peers.discard(agent_id)
        for handle in [handle for handle, write in self.open.items() if write.agent_id == agent_id]:
            self.end(handle, "disconnected", in_doubt=True)

    def refuse(self, agent_id: str) -> None:
        """Nobody writes to this side."""

    def connected(self) -> frozenset[str]:
        return frozenset(self.peers)

    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
        group_blocks: Sequence[int] = (),
    ) -> int:
        if agent_id not in self.peers:
            raise TransferError("not connected")
        handle = 1
        while handle in self.open:
            handle += 1
        self.posted.append(handle)
        self.open[handle] = Posted(agent_id, tuple(remote_blocks), notification or b"")
        return handle

    def notify(self, agent_id: str, notification: bytes) -> None:
        if agent_id not in self.peers:
            raise TransferError("not connected")
        self.sent.append((agent_id, notification))

    def poll(self) -> PollResult:
        results, self.results = self.results, []
        return PollResult(results)

    def close(self) -> None:
        raise NotImplementedError

    def land(self, handle: int) -> None:
        """All bytes of a write arrive, and its notification follows them."""
        write = self.open[handle]
        self.open[handle] = replace(write, landed=True)
        if write.notification:
            self.sent.append((write.agent_id, write.notification))

    def end(self, handle: int, error: str | None = None, *, in_doubt: bool = False) -> None:
        """The writer learns how a write ended."""
        del self.open[handle]
        self.results.append(WriteResult(handle, error, in_doubt))


def unread(_: Sequence[int]) -> list[memoryview]:
    """Checksums are not asked for: no block is read."""
    return []


class PrefillSide:
    """One boot of a prefill worker. Steps return (messages to decode agents, events for the coordinator)."""

    def __init__(self, agent_id: str, blocks: int) -> None:
        self.agent_id = agent_id
        self.transport = OpenTransport()
        self.pusher = KvPusher(self.transport, KvMemory(KvMemoryRegion(4096, blocks, LAYOUT), unread))
        self.blocks = blocks
        self.chunks: dict[str, int] = {}
        """Chunks computed, of the prompts that are computed here."""
        self.over: set[str] = set()
        """Pushes whose client has left."""
        self.doubts: set[Landing] = set()
        """What may still arrive of writes that did not end well."""
        self.landed: dict[str, set[int]] = {}
        """Blocks that arrived completely, by push."""

    def key(self) -> Hashable:
        pusher = self.pusher
        pushes = tuple(
            (name, p.ticket.reservation, p.ticket.decode_agent_id, p.ticket.deadline_s, p.ready_blocks, p.posted_blocks,
             tuple(sorted(p.writes)), p.last_chunk_s is not None, p.completing, p.aborted, p.failure is not None,
             p.in_doubt)
            for name, p in sorted(pusher._pushes.items())
        )  # fmt: skip
        spent = tuple(
            sorted((agent, tuple(sorted(numbers))) for agent, numbers in pusher._spent._spent.items())
        )
        return (
            self.agent_id,
            pushes,
            tuple(sorted(pusher._runnable)),
            tuple(sorted(pusher._doubts.items())),
            tuple(sorted((handle, push.request_id) for handle, push in pusher._push_of_write.items())),
            spent,
            tuple(sorted(self.transport.peers)),
            tuple(sorted(self.transport.open.items())),
            tuple(sorted(self.chunks.items())),
            tuple(sorted(self.over)),
            tuple(sorted(self.doubts)),
            tuple(sorted((name, tuple(sorted(blocks))) for name, blocks in self.landed.items())),
        )

    def facts(
        self,
    ) -> tuple[
        frozenset[Landing],
        bool,
        tuple[tuple[int, bool, bool, float], ...],
        frozenset[str],
        frozenset[str],
        frozenset[tuple[str, int]],
    ]:
        """What may still arrive; whether nothing is left; writes in flight; prompts; peers; used tickets."""
        arriving = set(self.doubts)
        for handle, write in self.transport.open.items():
            if not write.landed:
                arriving.add(self._landing(self._push_of(handle)))
        rest = not (self.pusher.active or self.pusher.in_flight or self.transport.open)
        writes = tuple(
            (handle, bool(write.notification), write.landed, self._landing(self._push_of(handle))[2])
            for handle, write in sorted(self.transport.open.items())
        )
        used = frozenset((a, n) for a, numbers in self.pusher._spent._spent.items() for n in numbers)
        return (
            frozenset(arriving),
            rest,
            writes,
            frozenset(self.chunks),
            frozenset(self.transport.peers),
            used,
        )

    def start(self, name: str, ticket: bytes, heard: bool, now: int):  # type: ignore[no-untyped-def]
        """A Prefill call arrives, as `KvProducer.start` takes it. Nobody hears the answer to a repeated one."""
        taken = self._parsed(ticket, now)
        try:
            taken.require_writer(self.agent_id)
            memory = KvMemoryRegion(4096, self.blocks, LAYOUT)
            endpoint = TransferEndpoint(taken.decode_agent_id, "explored", b"", memory)
            self.pusher.start(name, taken, endpoint, now * TICK_S)
        except SplitserveError:
            return (), (("pfail", name),) if heard else ()
        if not heard:
            self.over.add(name)
        self.chunks[name] = 0
        self.landed[name] = set()
        return self._polled(now)

    def chunk(self, name: str, now: int):  # type: ignore[no-untyped-def]
        """One more block of a prompt is computed; the last one brings the first token."""
        push = self.pusher._pushes[name]
        wanted = len(push.ticket.block_indices)
        self.chunks[name] += 1
        done, last = self.chunks[name], self.chunks[name] == wanted
        table = list(range(10, 10 + done))
        token = first_token(name) if last else None
        self.pusher.on_progress(name, done * SIZE, table, last, token, now * TICK_S)
        if last:
            del self.chunks[name]
        sent, events = self._polled(now)
        return sent, ((("first", name),) if last and name not in self.over else ()) + events

    def end(self, name: str, ticket: bytes, now: int):  # type: ignore[no-untyped-def]
        """The call was cancelled, as `KvProducer.end` takes it."""
        if name in self.pusher._pushes:
            self.chunks.pop(name, None)
            self.over.add(name)
            self.pusher.abort(name)
        else:
            taken = self._parsed(ticket, now)
            if taken.writer_agent_id == self.agent_id:
                self.pusher.decline(taken, now * TICK_S)
        return self._polled(now)

    def poll(self, now: int):  # type: ignore[no-untyped-def]
        """A turn of the engine thread."""
        return self._polled(now)

    def land(self, handle: int, now: int):  # type: ignore[no-untyped-def]
        """The last write's bytes are there, and the completion is under way."""
        self._count_landed(handle)
        push = self._push_of(handle)
        if len(self.landed[push.request_id]) != len(push.ticket.block_indices):
            raise Violation(f"the completion of {push.request_id} went before its bytes")
        self.transport.land(handle)
        return self._polled(now)

    def ended(self, handle: int, now: int):  # type: ignore[no-untyped-def]
        """A write has ended well, and the writer learns of it."""
        if not self.transport.open[handle].landed:
            self._count_landed(handle)
        self.transport.end(handle)
        return self._polled(now)

    def failed(self, handle: int, now: int):  # type: ignore[no-untyped-def]
        """A write has failed, and parts of it are still on their way."""
        self._doubt(handle)
        self.transport.end(handle, "failed half way", in_doubt=True)
        return self._polled(now)

    def peers(self, agent_id: str, now: int):  # type: ignore[no-untyped-def]
        """The coordinator's list names this decode worker alone."""
        for lost in self.transport.peers - {agent_id}:
            for handle, write in self.transport.open.items():
                if write.agent_id == lost:
                    self._doubt(handle)
            self.pusher.peer_lost(lost)
        self.transport.peers.add(agent_id)
        return self._polled(now)

    def _parsed(self, ticket: bytes, now: int) -> KvTicket:
        return KvTicket.from_proto(kv_transfer_pb2.KvTicket.FromString(ticket), now * TICK_S)

    def _push_of(self, handle: int) -> Push:
        push = self.pusher._push_of_write.get(handle)
        if push is None or push.request_id not in self.pusher._pushes:
            raise Violation("a write is in flight whose source may have changed")
        return push

    def _count_landed(self, handle: int) -> None:
        push = self._push_of(handle)
        remote = self.transport.open[handle].remote
        blocks = self.landed[push.request_id]
        if blocks & set(remote):
            raise Violation(f"a block of {push.request_id} was written twice")
        blocks.update(remote)

    def _doubt(self, handle: int) -> None:
        if not self.transport.open[handle].landed:
            self.doubts.add(self._landing(self._push_of(handle)))

    def _landing(self, push: Push) -> Landing:
        ticket = push.ticket
        return ticket.decode_agent_id, ticket.reservation, ticket.deadline_s + WRITE_GRACE_S

    def _polled(self, now: int):  # type: ignore[no-untyped-def]
        """Two turns: what a disconnect ends in the first one is reported in the second."""
        events: list[PushEvent] = []
        for _ in range(2):
            flying = {h: self._push_of(h) for h, write in self.transport.open.items() if not write.landed}
            events += self.pusher.poll(now * TICK_S, self.transport.poll().writes)
            cut_off = flying.keys() - self.transport.open.keys()
            self.doubts |= {self._landing(flying[handle]) for handle in cut_off}
        for handle in self.transport.posted:
            if handle in self.transport.open and self._push_of(handle).ticket.deadline_s <= now * TICK_S:
                raise Violation("a write was posted after its ticket's deadline")
        self.transport.posted.clear()
        self.doubts = {doubt for doubt in self.doubts if doubt[2] > now * TICK_S}
        told = []
        for event in events:
            name = event.request_id
            self.chunks.pop(name, None)
            self.landed.pop(name, None)
            if name in self.over:
                self.over.discard(name)
            elif isinstance(event, PushDone):
                told.append(("written", name))
            elif isinstance(event, PushFailed):
                told.append(("pfail", name))
        sent = tuple(self.transport.sent)
        self.transport.sent.clear()
        return sent, tuple(told)
