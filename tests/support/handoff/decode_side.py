"""The decode worker of the explored system: the production table and block pool, joined as `KvConsumer` does."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from engine.kv_cache.block_pool import BlockPool, KvEventLog
from kv_transfer.handoff.messages import WRITE_GRACE_S, KvTicket, WriteCompletion
from kv_transfer.handoff.reservation_table import (
    Abort,
    Action,
    Admit,
    IllegalTransitionError,
    ReleaseWriter,
    ReservationTable,
    Silence,
    WriterDone,
)
from tests.support.handoff.explorer import Violation

TICK_S = WRITE_GRACE_S
BLOCK_BYTES = 1024
Event = tuple[str, str]
"""What the coordinator is sent: ("kv" | "out" | "dfail", name of the attempt)."""


class NoEvents(KvEventLog):
    """Nothing is cached here."""

    def __reduce__(self) -> tuple[type[NoEvents], tuple[()]]:
        return NoEvents, ()


def trusted(_: WriteCompletion) -> bool:
    """Checksums are not asked for: the handoff is right without them."""
    return True


def first_token(attempt: str) -> int:
    """The token that prefill samples for an attempt; it tells whose KV was admitted."""
    return sum(ord(letter) << 8 * place for place, letter in enumerate(attempt))


class DecodeSide:
    """One boot. Methods are steps; they return what is sent to the coordinator."""

    def __init__(self, boot: int, blocks: int, *, ticket_ticks: int) -> None:
        self.agent_id = f"d{boot}"
        self.boot = boot
        self.ticket_s = ticket_ticks * TICK_S
        self.table = ReservationTable(boot, quarantine_s=TICK_S, content_matches=trusted)
        self.pool = BlockPool(blocks, NoEvents())
        self.tables: dict[str, list[int]] = {}
        """Blocks of each live request."""
        self.writers: dict[int, list[int]] = {}
        """Blocks that a writer may write, by reservation."""
        self.running: set[str] = set()
        self.leases: dict[str, float] = {}
        """When coordinators count as lost whose output stream broke; see `OutputStreams`."""

    def key(self) -> Hashable:
        table = self.table
        entries = tuple(
            (e.number, e.request_id, e.coordinator_id, e.state.value, e.writer_alive, e.writer_agent_id,
             e.writer_lost, e.deadline_s, e.writer_end_s, e.quarantine_end_s)
            for e in table._open.values()
        )  # fmt: skip
        due = min((e.due_s for e in table._open.values()), default=float("inf"))
        return (
            self.boot,
            max(table._next_due_s, due) - due if due < float("inf") else 0.0,  # an early look has no effect
            entries,
            table._last_number,
            tuple(sorted(table._live.items())),
            tuple(sorted(self.leases.items())),
            tuple(sorted(table._lost_writers.items())),
            tuple(sorted((name, tuple(blocks)) for name, blocks in self.tables.items())),
            tuple(sorted((number, tuple(blocks)) for number, blocks in self.writers.items())),
            tuple(sorted(self.running)),
            tuple(sorted(self.pool._unused._end_of.items())),
        )

    def facts(self) -> tuple[frozenset[int], bool, tuple[str, ...]]:
        """Reservations that may be written; whether all is free and nothing is due; the attempts that decode."""
        books = self.tables or self.writers or self.running or self.table._open or self.table._live
        rest = self.pool.free == self.pool.total and not books
        return frozenset(self.writers), rest, tuple(sorted(self.running))

    def reserve(
        self, name: str, coordinator: str, writer: str, count: int, deadline: int, now: int
    ) -> bytes | None:
        """Grants a ticket, in its wire form, if blocks are free."""
        if count > self.pool.free:
            return None
        at = now * TICK_S
        blocks = self.pool.allocate(count, writer=True)
        end = at + self.ticket_s
        number = self.table.open(
            name, coordinator, count, BLOCK_BYTES, deadline * TICK_S, at, ticket_deadline_s=end
        )
        self.table.bind_writer(number, writer)
        self.tables[name], self.writers[number] = blocks, list(blocks)
        ticket = KvTicket(
            self.agent_id,
            self.boot,
            number,
            tuple(blocks),
            0,
            count * BLOCK_BYTES,
            min(end, deadline * TICK_S),
            writer,
        )
        return ticket.to_proto(at).SerializeToString(deterministic=True)

    def notify(self, sender: str, message: bytes, now: int) -> tuple[Event, ...]:
        """A writer's notification arrives."""
        verdict = self._guarded(lambda: self.table.on_notification(sender, message, now * TICK_S))
        if isinstance(verdict, Admit):
            name = verdict.request_id
            if verdict.first_token != first_token(name):
                raise Violation(f"{name} was admitted with another request's KV")
            self._release_writer(verdict.number)
            self.running.add(name)
            return (("kv", name),)
        if isinstance(verdict, WriterDone):
            self._release_writer(verdict.number)
        return self._apply(verdict.actions)

    def abort(self, name: str, coordinator: str, no_writer: bool, now: int) -> tuple[Event, ...]:
        """The coordinator aborts; it is sent nothing more about this attempt."""
        self._apply(self._guarded(lambda: self.table.abort(name, coordinator, no_writer, now * TICK_S)))
        return ()

    def writer_ended(self, agent: str, now: int) -> tuple[Event, ...]:
        """There is proof that a writer's process has ended."""
        self.table.writer_lost(agent, now * TICK_S)
        return self.expire(now)

    def coordinator_lost(self, coordinator: str, now: int) -> tuple[Event, ...]:
        """The output stream of a coordinator broke."""
        self.leases.setdefault(coordinator, (now + 1) * TICK_S)
        return ()

    def coordinator_back(self, coordinator: str) -> tuple[Event, ...]:
        """It is open again."""
        self.leases.pop(coordinator, None)
        return ()

    def expire(self, now: int) -> tuple[Event, ...]:
        """Time has passed. A coordinator whose lease is over is told of its lost requests when it comes back."""
        at = now * TICK_S
        over = {coordinator for coordinator, end in self.leases.items() if end <= at}
        for coordinator in over:
            del self.leases[coordinator]
        events: tuple[Event, ...] = ()
        for entry in list(self.table._open.values()):
            if entry.coordinator_id in over:
                request = entry.request_id, entry.coordinator_id
                events += self._apply(self._guarded(lambda of=request: self.table.abort(*of, False, at)))
        return events + self._apply(self._guarded(lambda: self.table.expire(at)))

    def finish(self, name: str) -> tuple[Event, ...]:
        """The engine ends a request that decodes."""
        self.table.started(name)
        self._guarded(lambda: self.table.finished(name))
        self._release_request(name)
        return (("out", name),)

    def _apply(self, actions: Iterable[Action]) -> tuple[Event, ...]:
        events = []
        for action in actions:
            match action:
                case Abort(number, name, _, _, writer_alive):
                    self._release_request(name)
                    if not writer_alive:
                        self._release_writer(number)
                    events.append(("dfail", name))
                case ReleaseWriter(number):
                    self._release_writer(number)
                case Silence():
                    pass
        return tuple(events)

    def _release_request(self, name: str) -> None:
        self.running.discard(name)
        self._guarded(lambda: self.pool.release(self.tables.pop(name)))

    def _release_writer(self, number: int) -> None:
        if (blocks := self.writers.pop(number, None)) is not None:
            self._guarded(lambda: self.pool.release_writer(blocks))

    def _guarded(self, call):  # type: ignore[no-untyped-def]
        try:
            return call()
        except (AssertionError, IllegalTransitionError, KeyError) as error:
            raise Violation(f"the decode worker's books are wrong: {error!r}") from error
