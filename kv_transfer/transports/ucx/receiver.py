"""Owner side of the ucx transport: receives announced writes into the registered memory.

A write is announced first. Each of its runs is then received directly into the announced blocks, after its
length was checked. A write is refused for blocks out of range, a wrong byte count, or a run that arrives
twice or with another length; it is then not acknowledged, so no notification follows. The session of a fenced
agent is closed at once, so a caller that was silent for longer than the quarantine can write no more.

Replies go over a connection of their own, which may break while the caller's connection stands: UCX joins a connection
that is being set up with one of the peer's, even if the peer has closed that one meanwhile. So a connection that breaks
soon and has carried few replies is set up again, and the replies are sent again.
docs/internals/design-notes/ucx-connections.md has the reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_transfer.transports.ucx.binding import (
    Operation,
    Partings,
    RegionBytes,
    UcxEndpoint,
    UcxWorker,
    to_memory,
)
from kv_transfer.transports.ucx.messages import (
    CONTROL_MASK,
    MAX_CONTROL_BYTES,
    MAX_RESENT,
    WRITE_MASK,
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
    malformed,
)
from splitserve.errors import TransferError
from splitserve.logs import log_event

MAX_PENDING = 1024
"""Maximum number of control messages of one session in reception."""


@dataclass(slots=True)
class _Pending:
    buffer: npt.NDArray[np.uint8]
    operation: Operation


class UcxInbox:
    """Receives control messages and discards messages that belong to no known write."""

    def __init__(self, worker: UcxWorker) -> None:
        self._worker = worker
        self._pending: dict[tuple[int, int], deque[_Pending]] = {}
        self._discarding: list[Operation] = []

    def collect(self) -> list[tuple[Tag, bytes]]:
        """(tag, bytes) of completely received control messages. A partial one delays only its own session."""
        while message := self._worker.probe(CONTROL_MASK, CONTROL_MASK):
            value, length = message
            tag = Tag.parse(value)
            queue = self._pending.setdefault((tag.kind, tag.session), deque())
            if (
                length > MAX_CONTROL_BYTES
                or len(queue) >= MAX_PENDING
                or tag.kind not in (Kind.CALL, Kind.REPLY)
            ):
                self.discard(value)
                continue
            buffer = np.zeros(max(1, length), dtype=np.uint8)
            queue.append(_Pending(buffer[:length], self._worker.receive(buffer, value)))
        whole: list[tuple[Tag, bytes]] = []
        for key, queue in list(self._pending.items()):
            while queue and queue[0].operation.done:
                item = queue.popleft()
                if item.operation.problem() is None:
                    whole.append((Tag(*key), item.buffer.tobytes()))
            if not queue:
                del self._pending[key]
        self._discarding = [operation for operation in self._discarding if not operation.done]
        return whole

    def waits_for(self, session: int) -> bool:
        """Whether a control message of this caller is partially received."""
        return (Kind.CALL, session) in self._pending

    def head(self) -> tuple[int, int] | None:
        """(tag, length) of the oldest message without a posted receive, or None."""
        return self._worker.probe(0, 0)

    def discard(self, tag: int) -> None:
        """Drops the oldest message with this tag, of any length; this also completes its send at the sender."""
        self._discarding.append(self._worker.receive(np.zeros(1, dtype=np.uint8), tag))

    def close(self) -> None:
        """Drops all arrived messages, so that closing the worker waits for none."""
        while message := self._worker.probe(0, 0):
            self.discard(message[0])
        self._pending.clear()
        self._discarding.clear()


MAX_CALLERS = 4096
MAX_FENCED = 4096
MAX_RENEWALS = 3
"""Maximum number of times that a session's connection for replies is set up again."""
RENEW_S = 5.0
"""It is set up again only if it broke within this time, in seconds."""


@dataclass(slots=True)
class _Incoming:
    runs: tuple[tuple[int, int], ...]
    missing: set[int]
    receives: list[Operation] = field(default_factory=list)
    problem: str | None = None


@dataclass(slots=True)
class _Caller:
    agent_id: str
    session: int
    address: bytes
    endpoint: UcxEndpoint
    incoming: dict[int, _Incoming] = field(default_factory=dict)
    replies: list[Operation] = field(default_factory=list)
    """Replies that UCX has not sent yet."""
    resent: list[Message] | None = field(default_factory=list)
    """All replies, to send them again over a new connection; None once there are too many."""
    connected_s: float = 0.0
    renewals: int = 0


class UcxReceiver:
    """All callers that write to one memory. Call `poll` after the UCX worker made progress."""

    def __init__(
        self,
        agent_id: str,
        worker: UcxWorker,
        inbox: UcxInbox,
        memory: RegionBytes,
        partings: Partings,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._agent_id = agent_id
        self._worker = worker
        self._inbox = inbox
        self._memory = memory
        self._callers: dict[int, _Caller] = {}
        self._fenced: dict[str, None] = {}
        self._notifications: list[tuple[str, bytes]] = []
        self._partings = partings

    def fence(self, agent_id: str) -> None:
        """Closes an agent's sessions and refuses new ones."""
        self._fenced[agent_id] = None
        while len(self._fenced) > MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]
        for caller in self._callers_of(agent_id):
            self._end(caller, for_peer=True)
        self._notifications = [item for item in self._notifications if item[0] != agent_id]

    def unfence(self, agent_id: str) -> None:
        """Permits an agent to open sessions again."""
        self._fenced.pop(agent_id, None)

    def on_message(self, session: int, data: bytes) -> None:
        """Handles one control message of a caller."""
        caller = self._callers.get(session)
        try:
            message = decode(data)
            if caller is None:
                if isinstance(message, Hello):
                    self._open_session(session, message)
                return
            self._handle(caller, message)
        except TransferError as error:
            log_event("transport.peer_malformed", session=session, error=error.message)
            if caller is not None:
                self._end(caller)

    def poll(self) -> list[tuple[str, bytes]]:
        """Receives announced runs, acknowledges complete writes and returns arrived notifications."""
        for caller in list(self._callers.values()):
            if not caller.endpoint.alive:
                self._renew(caller)
                continue
            for write in list(caller.incoming):
                if write in caller.incoming:  # an answer that fails may end the session
                    self._advance(caller, write)
            caller.replies = [operation for operation in caller.replies if not operation.done]
        self._discard_orphans()
        arrived, self._notifications = self._notifications, []
        return arrived

    def close(self) -> None:
        """Closes all sessions and notifies their callers."""
        for caller in list(self._callers.values()):
            self._end(caller)

    def _callers_of(self, agent_id: str) -> list[_Caller]:
        return [caller for caller in self._callers.values() if caller.agent_id == agent_id]

    def _open_session(self, session: int, hello: Hello) -> None:
        agent_id, address = decode_metadata(hello.metadata)
        if agent_id == self._agent_id or len(self._callers) >= MAX_CALLERS:
            raise malformed(f"a session of {agent_id} cannot be opened")
        for older in self._callers_of(agent_id):
            self._end(older)
        endpoint = self._worker.connect(address)
        caller = _Caller(agent_id, session, address, endpoint, connected_s=self._clock())
        self._callers[session] = caller
        if agent_id in self._fenced:
            self._end(caller, for_peer=True)

    def _handle(self, caller: _Caller, message: Message) -> None:
        match message:
            case Announce():
                self._on_announce(caller, message)
            case Notice(data):
                self._notifications.append((caller.agent_id, data))
            case Gone():
                self._end(caller)
            case _:
                raise malformed("a message that callers do not send")

    def _on_announce(self, caller: _Caller, announce: Announce) -> None:
        if announce.write in caller.incoming:
            raise malformed("two writes of one number")
        why = self._refusal(announce)
        if why is not None:
            self._reply(caller, Refused(announce.write, why))
            return
        caller.incoming[announce.write] = _Incoming(announce.runs, set(range(len(announce.runs))))

    def _refusal(self, announce: Announce) -> str | None:
        limit = self._memory.num_blocks
        if any(count < 1 or first + count > limit for first, count in announce.runs):
            return f"blocks must be 0..{limit - 1}"
        if announce.total_bytes != sum(count for _, count in announce.runs) * self._memory.block_bytes:
            return "the byte count does not match the blocks"
        return None

    def _advance(self, caller: _Caller, write: int) -> None:
        """Posts receives for arrived runs of a write; replies once all have been received."""
        incoming = caller.incoming[write]
        base = Tag(Kind.DATA, caller.session, write).value
        while message := self._worker.probe(base, WRITE_MASK):
            value, length = message
            run = Tag.parse(value).run
            if run not in incoming.missing or length != incoming.runs[run][1] * self._memory.block_bytes:
                incoming.problem = f"run {run} of {length} bytes was not announced"
                self._inbox.discard(value)
                incoming.missing.discard(run)
                continue
            incoming.missing.remove(run)
            incoming.receives.append(self._worker.receive(self._memory.blocks(*incoming.runs[run]), value))
        under_way = []
        for operation in incoming.receives:
            if not operation.done:
                under_way.append(operation)
            elif (problem := operation.problem()) is not None:
                incoming.problem = problem
        incoming.receives = under_way
        if under_way or incoming.missing:
            return
        del caller.incoming[write]
        self._reply(caller, Ack(write) if incoming.problem is None else Refused(write, incoming.problem))

    def _reply(self, caller: _Caller, message: Message) -> None:
        if caller.resent is not None:
            caller.resent.append(message)
            if len(caller.resent) > MAX_RESENT:
                caller.resent = None
        try:
            self._send(caller, message)
        except TransferError:
            self._renew(caller)

    def _send(self, caller: _Caller, message: Message) -> None:
        tag = Tag(Kind.REPLY, caller.session).value
        caller.replies.append(caller.endpoint.send(to_memory(encode(message)), tag))

    def _renew(self, caller: _Caller) -> None:
        """Sets a connection up again that broke soon after it was set up, by another connection of the same handshake.

        Ends the session instead after MAX_RENEWALS, or if replies may be lost, or if the connection broke later. Then
        the peer's host may have vanished, and connecting would wait for it as long as the system tries.
        """
        now = self._clock()
        if caller.resent is None or caller.renewals == MAX_RENEWALS or now - caller.connected_s > RENEW_S:
            self._end(caller)
            return
        caller.renewals += 1
        caller.connected_s = now
        log_event("transport.replies_renewed", agent_id=caller.agent_id, renewals=caller.renewals)
        self._partings.cut(caller.endpoint, caller.replies)
        caller.replies = []
        try:
            caller.endpoint = self._worker.connect(caller.address)
            for message in caller.resent:
                self._send(caller, message)
        except TransferError as error:
            log_event("transport.peer_not_told", agent_id=caller.agent_id, error=error.message)
            self._end(caller)

    def _end(self, caller: _Caller, *, for_peer: bool = False) -> None:
        """Ends a session: its writes in flight fail, and data that still arrives is discarded.

        The connection is closed once `Gone` has left, or with `for_peer` once the peer has closed it.
        """
        if self._callers.pop(caller.session, None) is None:
            return
        for incoming in caller.incoming.values():
            self._partings.keep(incoming.receives)
        caller.incoming.clear()
        if caller.endpoint.alive:
            try:
                self._send(caller, Gone())
                self._worker.progress()
            except TransferError as error:
                log_event("transport.peer_not_told", agent_id=caller.agent_id, error=error.message)
        self._partings.part(caller.endpoint, caller.replies, for_peer=for_peer)

    def _discard_orphans(self) -> None:
        """Discards data of refused writes and of closed sessions."""
        while message := self._inbox.head():
            tag = Tag.parse(message[0])
            caller = self._callers.get(tag.session)
            known = caller is not None and tag.write in caller.incoming
            if tag.kind in (Kind.CALL, Kind.REPLY) or known or self._inbox.waits_for(tag.session):
                return
            self._inbox.discard(message[0])
