"""UCX tag-matched messages between workers' pools, through UCXX; for hosts where NIXL is no choice.

Unlike NIXL's one-sided writes, the owner of the memory takes part. The writer announces which blocks it
sends; the owner posts receives into exactly these blocks and acknowledges when all bytes are there; only
then does the writer send the write's notification. So an owner can refuse a writer for good, and no byte
moves after the owner has closed the connection. The price: bytes move only while both sides poll, that
is between their steps, and a handoff takes one round trip of polls more.

No thread makes progress in the background, because receives are posted by Python code that belongs to
the transport's thread: a progress thread could not start a transfer, only finish one, and would take a
core from compute. So an idle owner polls now and then, and often for a while after a peer spoke.

A `Drained` or completion that is posted as a notification follows the writes that were acknowledged
before it, as every transport's. Peers are trusted as far as the network is: whoever can reach a worker's
UCX port can announce writes into its pool, but none outside it.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.peer_checks import check_blocks, check_endpoint, check_notification, check_pool
from kv_transfer.runs import Run, merge_runs
from kv_transfer.transport import PollResult, PoolMemory, TransferEndpoint, Transport, WriteResult
from kv_transfer.ucx_binding import Operation, PoolBytes, UcxEndpoint, UcxWorker, to_memory
from kv_transfer.ucx_inbox import UcxInbox
from kv_transfer.ucx_messages import (
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
    decode_card,
    encode,
    encode_card,
)
from kv_transfer.ucx_receiver import UcxReceiver
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, TransferError

IDLE_POLL_S = 0.01
"""How often an owner that waits for nothing polls, so that a first message is answered."""
AWAKE_S = 0.1
"""How long a message of a peer makes its owner poll often."""


@dataclass(slots=True)
class _Flight:
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
    flights: dict[int, _Flight] = field(default_factory=dict)
    sends: list[Operation] = field(default_factory=list)
    """Messages without bytes that UCX has not taken yet."""
    greeted: bool = False
    """It has answered something."""


class UcxTransport(Transport):
    """A UCX worker whose name is a UUID made here. Bytes move while both sides poll."""

    kind = "ucx"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_s = float("-inf")
        self._agent_id = str(uuid.uuid4())
        self._worker: UcxWorker | None = UcxWorker()
        self._inbox = UcxInbox(self._worker)
        self._receiver: UcxReceiver | None = None
        self._endpoint: TransferEndpoint | None = None
        self._pool: PoolBytes | None = None
        self._card = encode_card(self._agent_id, self._worker.address)
        self._peers: dict[str, _Peer] = {}
        self._over: list[WriteResult] = []
        self._next_handle = 1
        self._descriptors = 0

    def register_pool(self, pool: PoolMemory) -> TransferEndpoint:
        """See `Transport`. UCX registers memory with its devices at first use and keeps it so."""
        if self._endpoint is not None:
            raise FailedPreconditionError("the pool is registered already")
        check_pool(pool)
        self._pool = PoolBytes(pool)
        self._receiver = UcxReceiver(self._agent_id, self._require_worker(), self._inbox, self._pool)
        self._endpoint = TransferEndpoint(self._agent_id, self.kind, self._card, pool)
        return self._endpoint

    def connect(self, endpoint: TransferEndpoint) -> None:
        """See `Transport`. The connection comes about while both sides poll; the peer need not run yet."""
        if endpoint.agent_id in self._peers:
            return
        check_endpoint(self._require_endpoint(), endpoint)
        agent_id, address = decode_card(endpoint.metadata)
        if agent_id != endpoint.agent_id:
            raise TransferError(f"the metadata of agent {endpoint.agent_id} is another agent's")
        connection = self._require_worker().connect(address)
        peer = _Peer(agent_id, endpoint.pool.num_blocks, secrets.randbits(32), connection)
        try:
            self._tell(peer, Hello(self._card))
        except TransferError:
            connection.close()
            raise
        if self._receiver is not None:
            self._receiver.unfence(agent_id)
        self._peers[agent_id] = peer

    def disconnect(self, agent_id: str) -> None:
        """See `Transport`. Also closes the peer's own connections to this side."""
        self._drop_peer(agent_id, f"agent {agent_id} was disconnected")
        if self._receiver is not None and self._worker is not None:
            self._receiver.fence(agent_id)

    def connected(self) -> frozenset[str]:
        """See `Transport`. A peer whose connection broke is gone from it."""
        return frozenset(self._peers)

    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
    ) -> int:
        """See `Transport`. Every run of neighbouring blocks is one message."""
        peer, mine = self._require_peer(agent_id), self._require_endpoint()
        check_blocks(local_blocks, mine.pool.num_blocks, remote_blocks, peer.num_blocks)
        _check_notification(notification)
        runs = merge_runs(local_blocks, remote_blocks)
        if len(runs) > MAX_RUNS:
            raise InvalidArgumentError(f"a write has at most {MAX_RUNS} runs", field="local_blocks")
        try:
            sends = self._send_runs(peer, runs)
        except TransferError as error:
            self._drop_peer(agent_id, error.message)
            raise
        handle = self._next_handle
        self._next_handle += 1
        self._descriptors += len(runs)
        peer.flights[peer.next_write] = _Flight(handle, notification, sends)
        peer.next_write = (peer.next_write + 1) % MAX_WRITES
        return handle

    def notify(self, agent_id: str, notification: bytes) -> None:
        """See `Transport`."""
        peer = self._require_peer(agent_id)
        _check_notification(notification)
        try:
            self._tell(peer, Notice(notification))
        except TransferError as error:
            self._drop_peer(agent_id, error.message)
            raise

    def poll(self) -> PollResult:
        """See `Transport`. Everything that moves, on either side of it, moves in here."""
        worker, receiver = self._worker, self._receiver
        if worker is None or receiver is None:
            return PollResult()
        worker.progress()
        for tag, data in self._inbox.collect():
            self._heard_s = self._clock()
            if tag.kind == Kind.CALL:
                receiver.take(tag.session, data)
            else:
                self._on_reply(tag.session, data)
        notifications = receiver.poll()
        for peer in list(self._peers.values()):
            self._advance(peer)
        worker.progress()
        result = PollResult(writes=self._over, notifications=notifications)
        self._over = []
        return result

    def close(self) -> None:
        """See `Transport`."""
        worker = self._worker
        if worker is None:
            return
        worker.progress()
        for agent_id in list(self._peers):
            self._drop_peer(agent_id, "the transport was closed")
        if self._receiver is not None:
            self._receiver.close()
        self._over.clear()
        self._inbox.close()
        self._worker = self._receiver = None
        worker.close()

    @property
    def descriptors_posted(self) -> int:
        """See `Transport`."""
        return self._descriptors

    @property
    def needs_poll(self) -> bool:
        """See `Transport`. True for a while after a peer spoke: it may be waiting for an answer.

        A peer that has not answered its first message yet does not count.
        """
        busy = any(peer.greeted and peer.sends for peer in self._peers.values())
        return busy or self._clock() - self._heard_s < AWAKE_S

    def _send_runs(self, peer: _Peer, runs: list[Run]) -> list[Operation]:
        pool, write = self._pool, peer.next_write
        if pool is None or write in peer.flights:
            raise TransferError(f"{MAX_WRITES} writes to agent {peer.agent_id} are in flight")
        total = sum(run.length for run in runs) * pool.block_bytes
        self._tell(peer, Announce(write, total, tuple((run.remote, run.length) for run in runs)))
        return [
            peer.endpoint.send(
                pool.blocks(run.local, run.length), Tag(Kind.DATA, peer.session, write, number).value
            )
            for number, run in enumerate(runs)
        ]

    def _tell(self, peer: _Peer, message: Message) -> None:
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
        peer.greeted = True
        match message:
            case Ack(write) if write in peer.flights:
                peer.flights[write].acknowledged = True
            case Refused(write, why) if write in peer.flights:
                flight = peer.flights.pop(write)
                peer.sends += flight.sends
                self._over.append(WriteResult(flight.handle, f"agent {peer.agent_id} refused it: {why}"))
            case Gone():
                self._drop_peer(peer.agent_id, f"agent {peer.agent_id} has closed the connection")

    def _advance(self, peer: _Peer) -> None:
        """Ends acknowledged writes, after their notifications were sent; drops a peer that is gone."""
        if not peer.endpoint.alive:
            self._drop_peer(peer.agent_id, f"the connection to agent {peer.agent_id} is broken")
            return
        peer.sends = [operation for operation in peer.sends if not operation.over]
        for write, flight in list(peer.flights.items()):
            if not flight.acknowledged or not all(operation.over for operation in flight.sends):
                continue
            try:
                if flight.notification is not None:
                    self._tell(peer, Notice(flight.notification))
            except TransferError as error:
                self._drop_peer(peer.agent_id, error.message)
                return
            del peer.flights[write]
            self._over.append(WriteResult(flight.handle))

    def _drop_peer(self, agent_id: str, why: str) -> None:
        """Ends a peer's writes and forgets it. What it had sent before is still delivered."""
        peer = self._peers.pop(agent_id, None)
        if peer is None:
            return
        if peer.endpoint.alive and self._worker is not None:
            try:
                self._tell(peer, Gone())
                self._worker.progress()
            except TransferError as error:
                why = f"{why} ({error.message})"
        peer.endpoint.close()
        self._over += [WriteResult(flight.handle, why) for flight in peer.flights.values()]

    def _require_worker(self) -> UcxWorker:
        if self._worker is None:
            raise TransferError("the transport is closed")
        return self._worker

    def _require_endpoint(self) -> TransferEndpoint:
        if self._endpoint is None:
            raise FailedPreconditionError("no pool is registered")
        return self._endpoint

    def _require_peer(self, agent_id: str) -> _Peer:
        try:
            return self._peers[agent_id]
        except KeyError:
            raise TransferError(f"agent {agent_id} is not connected", reason="UNKNOWN_PEER") from None


def _check_notification(notification: bytes | None) -> None:
    check_notification(notification)
    if notification is not None and len(notification) > MAX_NOTIFICATION_BYTES:
        raise InvalidArgumentError(
            f"a notification has at most {MAX_NOTIFICATION_BYTES} bytes", field="notification"
        )
