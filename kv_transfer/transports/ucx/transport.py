"""UCX tag-matched messages between workers, through UCXX; for hosts where NIXL is not available.

Unlike with NIXL's one-sided writes, the owner of the memory participates. The writer announces the blocks it
sends, the owner posts receives into exactly these blocks and acknowledges when all bytes have arrived, and
only then does the writer send the write's notification. An owner can thus refuse a writer permanently, and
no byte moves after it has closed the connection. The cost: bytes move only while both sides poll, that is
between their steps, and a handoff takes one more round trip of polls.

There is no background progress thread: receives are posted by Python code on the transport's thread, so
such a thread could only finish transfers, not start them, and would take a core from compute. An idle
owner therefore polls from time to time, and frequently for a while after a message of a peer.

A notification sent on its own follows all writes acknowledged before it, as with every transport. Peers are
trusted as far as the network is: any process that reaches a worker's UCX port can announce writes into its
registered memory, though not outside it.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from kv_transfer.transports.regions import KvMemoryRegion, Run, check_blocks, check_memory, merge_runs
from kv_transfer.transports.transport import (
    PollResult,
    TransferEndpoint,
    Transport,
    WriteResult,
    check_endpoint,
    check_notification,
    connected_peer,
    registered,
)
from kv_transfer.transports.ucx.binding import (
    Operation,
    Partings,
    RegionBytes,
    UcxEndpoint,
    UcxWorker,
    to_memory,
)
from kv_transfer.transports.ucx.messages import (
    MAX_FLIGHTS,
    MAX_NOTIFICATION_BYTES,
    MAX_RUNS,
    MAX_WRITES,
    Ack,
    Announce,
    Gone,
    Hello,
    Kind,
    Message,
    Notice,
    Refused,
    Tag,
    decode,
    decode_metadata,
    encode,
    encode_metadata,
)
from kv_transfer.transports.ucx.receiver import UcxInbox, UcxReceiver
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, TransferError

BUSY_POLL_S = 0.1
"""How long an owner keeps polling after a peer's message."""
ANSWER_S = 60.0
"""Writes to an owner have failed once it has answered nothing for this time. A step is shorter."""


@dataclass(slots=True)
class _WriteInFlight:
    handle: int
    notification: bytes | None
    sends: list[Operation]
    acknowledged: bool = False


@dataclass(slots=True)
class _Peer:
    agent_id: str
    num_blocks: int
    session: int
    endpoint: UcxEndpoint
    next_write: int = 0
    flights: dict[int, _WriteInFlight] = field(default_factory=dict)
    sends: list[Operation] = field(default_factory=list)
    """Control messages that UCX has not sent yet."""
    answered: bool = False
    """The peer has replied at least once."""
    waits_since_s: float = 0.0
    """Time of the last reply, or of the first write in flight, by the transport's clock."""


class UcxTransport(Transport):
    """A UCX worker named by a fresh UUID. Bytes move while both sides poll."""

    kind = "ucx"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_message_s = float("-inf")
        self._agent_id = str(uuid.uuid4())
        self._worker: UcxWorker | None = UcxWorker()
        self._inbox = UcxInbox(self._worker)
        self._receiver: UcxReceiver | None = None
        self._endpoint: TransferEndpoint | None = None
        self._memory: RegionBytes | None = None
        self._metadata = encode_metadata(self._agent_id, self._worker.address)
        self._peers: dict[str, _Peer] = {}
        self._completed: list[WriteResult] = []
        self._partings = Partings(clock)
        self._next_handle = 1

    @override
    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        """UCX registers the memory with its devices at first use and keeps the registration."""
        if self._endpoint is not None:
            raise FailedPreconditionError("the memory is registered already")
        check_memory(memory)
        self._memory = RegionBytes(memory)
        self._receiver = UcxReceiver(
            self._agent_id, self._require_worker(), self._inbox, self._memory, self._partings, self._clock
        )
        self._endpoint = TransferEndpoint(self._agent_id, self.kind, self._metadata, memory)
        return self._endpoint

    @override
    def connect(self, endpoint: TransferEndpoint) -> None:
        """The connection is set up while both sides poll; the peer need not be running yet."""
        if self._receiver is not None:
            self._receiver.unfence(endpoint.agent_id)
        if endpoint.agent_id in self._peers:
            return
        check_endpoint(registered(self._endpoint), endpoint)
        agent_id, address = decode_metadata(endpoint.metadata)
        if agent_id != endpoint.agent_id:
            raise TransferError(f"the metadata of agent {endpoint.agent_id} is another agent's")
        connection = self._require_worker().connect(address)
        peer = _Peer(agent_id, endpoint.memory.num_blocks, secrets.randbits(32), connection)
        try:
            self._send(peer, Hello(self._metadata))
        except TransferError:
            connection.close()
            raise
        self._peers[agent_id] = peer

    @override
    def disconnect(self, agent_id: str) -> None:
        """Leaves the peer's own sessions with this side open."""
        self._drop_peer(agent_id, f"agent {agent_id} was disconnected")

    @override
    def refuse(self, agent_id: str) -> None:
        """Closes the peer's sessions with this side and refuses new ones: no byte arrives either."""
        if self._receiver is not None and self._worker is not None:
            self._receiver.fence(agent_id)

    @override
    def connected(self) -> frozenset[str]:
        """Excludes peers whose connection broke."""
        return frozenset(self._peers)

    @override
    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
        group_blocks: Sequence[int] = (),
    ) -> int:
        """Each contiguous run of blocks is one message."""
        peer, mine = connected_peer(self._peers, agent_id), registered(self._endpoint)
        check_blocks(local_blocks, mine.memory.num_blocks, remote_blocks, peer.num_blocks)
        _check_notification(notification)
        runs = merge_runs(local_blocks, remote_blocks)
        if len(runs) > MAX_RUNS:
            raise InvalidArgumentError(f"a write has at most {MAX_RUNS} runs", field="local_blocks")
        handle = self._next_handle
        self._next_handle += 1
        try:
            sends = self._send_runs(peer, runs)
        except TransferError as error:
            self._drop_peer(agent_id, error.message)
            self._completed.append(WriteResult(handle, error.message, in_doubt=True))
            return handle
        self.descriptors_posted += len(runs)
        if not peer.flights:
            peer.waits_since_s = self._clock()
        peer.flights[peer.next_write] = _WriteInFlight(handle, notification, sends)
        peer.next_write = (peer.next_write + 1) % MAX_WRITES
        return handle

    @override
    def notify(self, agent_id: str, notification: bytes) -> None:
        peer = connected_peer(self._peers, agent_id)
        _check_notification(notification)
        try:
            self._send(peer, Notice(notification))
        except TransferError as error:
            self._drop_peer(agent_id, error.message)
            raise

    @override
    def poll(self) -> PollResult:
        """All progress, as a writer and as an owner, happens here."""
        worker, receiver = self._worker, self._receiver
        if worker is None or receiver is None:
            return PollResult()
        worker.progress()
        for tag, data in self._inbox.collect():
            self._last_message_s = self._clock()
            if tag.kind == Kind.CALL:
                receiver.on_message(tag.session, data)
            else:
                self._on_reply(tag.session, data)
        notifications = receiver.poll()
        for peer in list(self._peers.values()):
            self._advance(peer)
        worker.progress()
        self._partings.poll()
        result = PollResult(writes=self._completed, notifications=notifications)
        self._completed = []
        return result

    @override
    def close(self) -> None:
        worker = self._worker
        if worker is None:
            return
        worker.progress()
        for agent_id in list(self._peers):
            self._drop_peer(agent_id, "the transport was closed")
        if self._receiver is not None:
            self._receiver.close()
        self._partings.close()
        self._completed.clear()
        self._inbox.close()
        self._worker = self._receiver = None
        worker.close()

    @property
    @override
    def needs_poll(self) -> bool:
        """True for `BUSY_POLL_S` after a peer's message, as it may be waiting for a reply.

        Pending sends to a peer that has never replied do not count.
        """
        busy = any(peer.answered and peer.sends for peer in self._peers.values())
        return busy or self._clock() - self._last_message_s < BUSY_POLL_S

    def _send_runs(self, peer: _Peer, runs: list[Run]) -> list[Operation]:
        memory, write = self._memory, peer.next_write
        if memory is None or write in peer.flights or len(peer.flights) >= MAX_FLIGHTS:
            raise TransferError(f"{len(peer.flights)} writes to agent {peer.agent_id} are in flight")
        total = sum(run.length for run in runs) * memory.block_bytes
        self._send(peer, Announce(write, total, tuple((run.remote, run.length) for run in runs)))
        return [
            peer.endpoint.send(
                memory.blocks(run.local, run.length), Tag(Kind.DATA, peer.session, write, number).value
            )
            for number, run in enumerate(runs)
        ]

    def _send(self, peer: _Peer, message: Message) -> None:
        tag = Tag(Kind.CALL, peer.session).value
        peer.sends.append(peer.endpoint.send(to_memory(encode(message)), tag))

    def _on_reply(self, session: int, data: bytes) -> None:
        peer = next((peer for peer in self._peers.values() if peer.session == session), None)
        if peer is None:
            return
        try:
            message = decode(data)
        except TransferError as error:
            self._drop_peer(peer.agent_id, error.message)
            return
        peer.answered, peer.waits_since_s = True, self._clock()
        match message:
            case Ack(write) if write in peer.flights:
                peer.flights[write].acknowledged = True
            case Refused(write, why) if write in peer.flights:
                flight = peer.flights.pop(write)  # not in doubt: the owner receives nothing of it any more
                peer.sends += flight.sends
                self._completed.append(WriteResult(flight.handle, f"agent {peer.agent_id} refused it: {why}"))
            case Gone():
                self._drop_peer(peer.agent_id, f"agent {peer.agent_id} has closed the connection")

    def _advance(self, peer: _Peer) -> None:
        """Completes acknowledged writes after posting their notifications; drops a peer that is gone."""
        if not peer.endpoint.alive:
            self._drop_peer(peer.agent_id, f"the connection to agent {peer.agent_id} is broken")
            return
        if peer.flights and self._clock() - peer.waits_since_s >= ANSWER_S:
            self._drop_peer(peer.agent_id, f"agent {peer.agent_id} has answered nothing for {ANSWER_S:g} s")
            return
        peer.sends = [operation for operation in peer.sends if not operation.done]
        for write, flight in list(peer.flights.items()):
            if not flight.acknowledged or not all(operation.done for operation in flight.sends):
                continue
            try:
                if flight.notification is not None:
                    self._send(peer, Notice(flight.notification))
            except TransferError as error:
                self._drop_peer(peer.agent_id, error.message)
                return
            del peer.flights[write]
            self._completed.append(WriteResult(flight.handle))

    def _drop_peer(self, agent_id: str, why: str) -> None:
        """Fails a peer's writes and forgets it. Notifications that it sent before are still delivered."""
        peer = self._peers.pop(agent_id, None)
        if peer is None:
            return
        if peer.endpoint.alive and self._worker is not None:
            try:
                self._send(peer, Gone())
                self._worker.progress()
            except TransferError as error:
                why = f"{why} ({error.message})"
        data = [send for flight in peer.flights.values() for send in flight.sends]
        if all(send.done for send in data):
            self._partings.part(peer.endpoint, peer.sends)
        else:  # once this returns, nobody may read these blocks
            self._partings.cut(peer.endpoint, [*peer.sends, *data])
        # The owner may be in the middle of receiving.
        self._completed += [
            WriteResult(flight.handle, why, in_doubt=True) for flight in peer.flights.values()
        ]

    def _require_worker(self) -> UcxWorker:
        if self._worker is None:
            raise TransferError("the transport is closed")
        return self._worker


def _check_notification(notification: bytes | None) -> None:
    check_notification(notification)
    if notification is not None and len(notification) > MAX_NOTIFICATION_BYTES:
        raise InvalidArgumentError(
            f"a notification has at most {MAX_NOTIFICATION_BYTES} bytes", field="notification"
        )
