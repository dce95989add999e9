"""The owner's side of the ucx transport: takes announced writes into the pool.

A write is announced first; then every run of it is received straight into the blocks that the
announcement names, after its length was compared with theirs. Blocks outside the pool, a byte count that
does not fit, or a run that comes twice or in another length end the write as refused: nothing is
acknowledged, so no notification follows. A fenced agent's announcements are refused outright, and its
connection is closed; so a caller that was away longer than its quarantine cannot write any more, once its
owner has disconnected it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.ucx_binding import Operation, PoolBytes, UcxEndpoint, UcxWorker, to_memory
from kv_transfer.ucx_inbox import UcxInbox
from kv_transfer.ucx_messages import (
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
    decode_card,
    encode,
    malformed,
)
from splitserve.errors import TransferError
from splitserve.logs import log_event

MAX_CALLERS = 4096
MAX_FENCED = 4096


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
    endpoint: UcxEndpoint
    incoming: dict[int, _Incoming] = field(default_factory=dict)
    replies: list[Operation] = field(default_factory=list)


class UcxReceiver:
    """All callers of one pool. `poll` is to be called after the worker made progress."""

    def __init__(self, agent_id: str, worker: UcxWorker, inbox: UcxInbox, pool: PoolBytes) -> None:
        self._agent_id = agent_id
        self._worker = worker
        self._inbox = inbox
        self._pool = pool
        self._callers: dict[int, _Caller] = {}
        self._fenced: dict[str, None] = {}
        self._abandoned: list[Operation] = []
        self._notifications: list[tuple[str, bytes]] = []

    def fence(self, agent_id: str) -> None:
        """Ends an agent's sessions and keeps it from opening others."""
        self._fenced[agent_id] = None
        while len(self._fenced) > MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]
        for caller in self._of(agent_id):
            self._end(caller, tell=True)
        self._notifications = [item for item in self._notifications if item[0] != agent_id]

    def unfence(self, agent_id: str) -> None:
        """Lets an agent open sessions again."""
        self._fenced.pop(agent_id, None)

    def take(self, session: int, data: bytes) -> None:
        """Handles one control message of a caller."""
        caller = self._callers.get(session)
        try:
            message = decode(data)
            if caller is None:
                if isinstance(message, Hello):
                    self._greet(session, message)
                return
            self._handle(caller, message)
        except TransferError as error:
            log_event("transport.peer_malformed", session=session, error=error.message)
            if caller is not None:
                self._end(caller, tell=True)

    def poll(self) -> list[tuple[str, bytes]]:
        """Receives what was announced and answers for what is whole; returns arrived notifications."""
        for caller in list(self._callers.values()):
            if not caller.endpoint.alive:
                self._end(caller, tell=False)
                continue
            for write in list(caller.incoming):
                self._advance(caller, write)
            caller.replies = [operation for operation in caller.replies if not operation.over]
        self._sweep()
        self._abandoned = [operation for operation in self._abandoned if not operation.over]
        arrived, self._notifications = self._notifications, []
        return arrived

    def close(self) -> None:
        """Tells all callers that their sessions are over."""
        for caller in list(self._callers.values()):
            self._end(caller, tell=True)
        self._abandoned.clear()

    def _of(self, agent_id: str) -> list[_Caller]:
        return [caller for caller in self._callers.values() if caller.agent_id == agent_id]

    def _greet(self, session: int, hello: Hello) -> None:
        agent_id, address = decode_card(hello.card)
        if agent_id == self._agent_id or len(self._callers) >= MAX_CALLERS:
            raise malformed(f"a session of {agent_id} cannot be opened")
        for older in self._of(agent_id):
            self._end(older, tell=False)
        caller = _Caller(agent_id, session, self._worker.connect(address))
        self._callers[session] = caller
        if agent_id in self._fenced:
            self._end(caller, tell=True)

    def _handle(self, caller: _Caller, message: Message) -> None:
        match message:
            case Announce():
                self._announced(caller, message)
            case Notice(data):
                self._notifications.append((caller.agent_id, data))
            case Gone():
                self._end(caller, tell=False)
            case _:
                raise malformed("a message that callers do not send")

    def _announced(self, caller: _Caller, announce: Announce) -> None:
        if announce.write in caller.incoming:
            raise malformed("two writes of one number")
        why = self._refusal(announce)
        if why is not None:
            self._reply(caller, Refused(announce.write, why))
            return
        caller.incoming[announce.write] = _Incoming(announce.runs, set(range(len(announce.runs))))

    def _refusal(self, announce: Announce) -> str | None:
        limit = self._pool.num_blocks
        if any(count < 1 or first + count > limit for first, count in announce.runs):
            return f"blocks outside the pool of {limit}"
        if announce.total_bytes != sum(count for _, count in announce.runs) * self._pool.block_bytes:
            return "the byte count does not fit the blocks"
        return None

    def _advance(self, caller: _Caller, write: int) -> None:
        """Receives the runs of a write that are here; answers once none is missing or under way."""
        incoming = caller.incoming[write]
        base = Tag(Kind.DATA, caller.session, write).value
        while found := self._worker.probe(base, WRITE_MASK):
            value, length = found
            run = Tag.parse(value).run
            if run not in incoming.missing or length != incoming.runs[run][1] * self._pool.block_bytes:
                incoming.problem = f"run {run} of {length} bytes was not announced"
                self._inbox.discard(value)
                incoming.missing.discard(run)
                continue
            incoming.missing.remove(run)
            incoming.receives.append(self._worker.receive(self._pool.blocks(*incoming.runs[run]), value))
        under_way = []
        for operation in incoming.receives:
            if not operation.over:
                under_way.append(operation)
            elif (problem := operation.problem()) is not None:
                incoming.problem = problem
        incoming.receives = under_way
        if under_way or incoming.missing:
            return
        del caller.incoming[write]
        self._reply(caller, Ack(write) if incoming.problem is None else Refused(write, incoming.problem))

    def _reply(self, caller: _Caller, message: Message) -> None:
        tag = Tag(Kind.REPLY, caller.session).value
        try:
            caller.replies.append(caller.endpoint.send(to_memory(encode(message)), tag))
        except TransferError:
            self._end(caller, tell=False)

    def _end(self, caller: _Caller, *, tell: bool) -> None:
        """Closes a session: what is in flight of it fails, what still comes of it is discarded."""
        if self._callers.pop(caller.session, None) is None:
            return
        for incoming in caller.incoming.values():
            self._abandoned += incoming.receives
        caller.incoming.clear()
        if tell and caller.endpoint.alive:
            try:
                caller.replies.append(
                    caller.endpoint.send(to_memory(encode(Gone())), Tag(Kind.REPLY, caller.session).value)
                )
                self._worker.progress()
            except TransferError as error:
                log_event("transport.peer_not_told", agent_id=caller.agent_id, error=error.message)
        caller.endpoint.close()

    def _sweep(self) -> None:
        """Discards bytes of writes that nobody waits for: refused ones, and those of ended sessions."""
        while found := self._inbox.head():
            tag = Tag.parse(found[0])
            caller = self._callers.get(tag.session)
            known = caller is not None and tag.write in caller.incoming
            if tag.kind in (Kind.CALL, Kind.REPLY) or known or self._inbox.waits_for(tag.session):
                return
            self._inbox.discard(found[0])
