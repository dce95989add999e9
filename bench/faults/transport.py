"""Wraps a transport and injects planned faults, for tests.

Never blocks: delayed operations are held and leave in a later `poll`. Time comes from an injected clock.
With no trigger planned (latency and bandwidth may be set) it keeps every rule of `Transport`; each trigger of
`FaultPlan` breaks exactly what its description says. A held write counts as in flight.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import override

from bench.faults.plan import FaultPlan, Trigger
from kv_transfer.transports.regions import KvMemoryRegion, check_blocks, merge_runs
from kv_transfer.transports.transport import (
    PollResult,
    TransferEndpoint,
    Transport,
    WriteResult,
    check_notification,
    unknown_peer,
)
from splitserve.errors import FailedPreconditionError, SplitserveError
from splitserve.logs import log_event


@dataclass(frozen=True, slots=True)
class _Notice:
    agent_id: str
    data: bytes
    delay_s: float = 0.0
    after_next: bool = False


@dataclass(frozen=True, slots=True)
class _Write:
    """A posted write. `follow` are notifications to send after its bytes have arrived, each with its own delay."""

    handle: int
    agent_id: str
    local: tuple[int, ...]
    remote: tuple[int, ...]
    attached: bytes | None
    follow: tuple[_Notice, ...]
    silent: bool
    reported: bool = False
    """It was reported as failed; its bytes arrive nevertheless."""
    groups: tuple[int, ...] = ()


@dataclass(order=True, slots=True)
class _Held:
    due_s: float
    number: int
    what: _Write | _Notice = field(compare=False)


class FaultDice:
    """Decides when each trigger of a plan fires. Each has its own random stream, independent of the others."""

    def __init__(self, plan: FaultPlan) -> None:
        self.injected: Counter[str] = Counter()
        """Number of injected faults by trigger name."""
        self._triggers: dict[str, Trigger] = {
            name: value for name, value in plan if isinstance(value, Trigger) and value.planned
        }
        self._random = {name: random.Random(f"{plan.seed}:{name}") for name in self._triggers}
        self._operations: Counter[str] = Counter()

    def fires(self, name: str, agent_id: str) -> bool:
        """Whether the fault hits the trigger's next operation. Counts and logs it if so."""
        trigger = self._triggers.get(name)
        if trigger is None:
            return False
        self._operations[name] += 1
        number = self._operations[name]
        by_chance = self._random[name].random() < trigger.probability
        planned = number in trigger.at or (trigger.every is not None and number % trigger.every == 0)
        if not (by_chance or planned):
            return False
        self.injected[name] += 1
        log_event("fault.injected", fault=name, operation=number, agent_id=agent_id)
        return True


class FaultyTransport(Transport):
    """`inner` with the faults of `plan`. `clock` returns monotonic seconds."""

    def __init__(
        self, inner: Transport, plan: FaultPlan, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.kind = inner.kind
        self.dice = FaultDice(plan)
        self._inner = inner
        self._plan = plan
        self._clock = clock
        self._memory: KvMemoryRegion | None = None
        self._peers: dict[str, KvMemoryRegion] = {}
        self._held: list[_Held] = []
        self._arrivals: list[_Held] = []
        self._open: dict[int, _Write] = {}
        self._stuck: dict[int, str] = {}
        self._completed: list[WriteResult] = []
        self._line_free_s = 0.0
        self._last_number = 0

    @override
    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        endpoint = self._inner.register_memory(memory)
        self._memory = memory
        return endpoint

    @override
    def connect(self, endpoint: TransferEndpoint) -> None:
        self._inner.connect(endpoint)
        self._peers[endpoint.agent_id] = endpoint.memory

    @override
    def disconnect(self, agent_id: str) -> None:
        """Ends what is held or stuck."""
        self._inner.disconnect(agent_id)
        self._drop(agent_id, f"agent {agent_id} was disconnected")

    @override
    def refuse(self, agent_id: str) -> None:
        """Forgets what is held back of the peer's."""
        self._inner.refuse(agent_id)
        self._arrivals = [held for held in self._arrivals if held.what.agent_id != agent_id]

    @override
    def connected(self) -> frozenset[str]:
        return self._inner.connected()

    @override
    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
        group_blocks: Sequence[int] = (),
    ) -> int:
        memory, theirs = self._require(agent_id)
        check_blocks(local_blocks, memory.num_blocks, remote_blocks, theirs.num_blocks)
        check_notification(notification)
        probes = min(local_blocks) >= memory.request_blocks
        write = (self._plan_probe if probes else self._plan_write)(
            agent_id, tuple(local_blocks), tuple(remote_blocks), notification
        )
        write = replace(write, groups=tuple(group_blocks))
        due_s = self._departure_s(len(write.local) * memory.layout.block_bytes)
        if probes:
            self._hold_or_run(write, due_s)
        elif self.dice.fires("break_connection", agent_id):
            self._stuck[write.handle] = agent_id
            self.disconnect(agent_id)
        elif self.dice.fires("stall_write", agent_id):
            self._stuck[write.handle] = agent_id
        elif self.dice.fires("unclean_write", agent_id):
            self._completed.append(WriteResult(write.handle, "the post failed half way", in_doubt=True))
            unclean = replace(write, attached=None, follow=(), reported=True)
            self._hold_or_run(unclean, due_s + self._plan.hold_s)
        else:
            late = self.dice.fires("late_write", agent_id)
            self._hold_or_run(write, due_s + (self._plan.hold_s if late else 0.0))
        self.descriptors_posted += len(merge_runs(local_blocks, remote_blocks))
        return write.handle

    @override
    def notify(self, agent_id: str, notification: bytes) -> None:
        self._require(agent_id)
        check_notification(notification)
        now = self._clock()
        for notice in self._plan_notices(agent_id, notification):
            self._hold_or_run(notice, now + self._plan.latency_s + notice.delay_s)

    @override
    def poll(self) -> PollResult:
        now = self._clock()
        while self._held and self._held[0].due_s <= now:
            self._run_held(heapq.heappop(self._held).what)
        polled = self._inner.poll()
        for write in polled.writes:
            self._on_write_done(write)
        for agent_id in self._lost_peers():
            self._drop(agent_id, f"the connection to agent {agent_id} is broken")
        result = PollResult(
            writes=self._completed, notifications=self._filter_arrivals(polled.notifications, now)
        )
        self._completed = []
        return result

    @override
    def close(self) -> None:
        for waiting in (self._held, self._arrivals, self._open, self._stuck, self._completed):
            waiting.clear()
        self._inner.close()

    @property
    @override
    def needs_poll(self) -> bool:
        return bool(self._held or self._arrivals) or self._inner.needs_poll

    def _plan_write(
        self, agent_id: str, local: tuple[int, ...], remote: tuple[int, ...], notification: bytes | None
    ) -> _Write:
        attached, follow = None, list[_Notice]()
        if notification is not None:
            for notice in self._plan_notices(agent_id, notification):
                if attached is None and notice.delay_s == 0 and not notice.after_next:
                    attached = notice.data
                else:
                    follow.append(notice)
        if self.dice.fires("wrong_bytes", agent_id):
            count = self._require(agent_id)[0].num_blocks
            local = (*local[1:], (local[0] + 1) % count)
        silent = self.dice.fires("unreported_write", agent_id)
        self._last_number += 1
        return _Write(self._last_number, agent_id, local, remote, attached, tuple(follow), silent)

    def _plan_probe(
        self, agent_id: str, local: tuple[int, ...], remote: tuple[int, ...], notification: bytes | None
    ) -> _Write:
        """Lane probes are not handoffs: triggers do not apply to them."""
        self._last_number += 1
        return _Write(self._last_number, agent_id, local, remote, notification, (), False)

    def _plan_notices(self, agent_id: str, data: bytes) -> list[_Notice]:
        """Decides at posting time what happens to a notification: the copies to send, none if it is dropped."""
        fires = {
            fault: self.dice.fires(f"{fault}_notification", agent_id)
            for fault in ("drop", "duplicate", "delay", "reorder")
        }
        if fires["drop"]:
            return []
        delay_s = self._plan.hold_s if fires["delay"] or fires["reorder"] else 0.0
        notice = _Notice(agent_id, data, delay_s, after_next=fires["reorder"] and not fires["delay"])
        return [notice] * (2 if fires["duplicate"] else 1)

    def _departure_s(self, size: int) -> float:
        """When a write of `size` bytes leaves, after bandwidth and latency."""
        now, rate = self._clock(), self._plan.bandwidth_bytes_per_s
        if rate is not None:
            self._line_free_s = max(now, self._line_free_s) + size / rate
        return max(now, self._line_free_s) + self._plan.latency_s

    def _hold_or_run(self, what: _Write | _Notice, due_s: float) -> None:
        if due_s <= self._clock():
            self._run(what)
            return
        self._last_number += 1
        heapq.heappush(self._held, _Held(due_s, self._last_number, what))

    def _run(self, what: _Write | _Notice) -> None:
        if isinstance(what, _Write):
            inner = self._inner.write(what.agent_id, what.local, what.remote, what.attached, what.groups)
            self._open[inner] = what
            return
        self._inner.notify(what.agent_id, what.data)
        if not what.after_next:
            self._release_reordered(what.agent_id)

    def _run_held(self, what: _Write | _Notice) -> None:
        """As `_run`, for an operation whose caller has returned: an error becomes the write's result."""
        try:
            self._run(what)
        except SplitserveError as error:
            if isinstance(what, _Write):
                self._fail(what, WriteResult(what.handle, error.message))
            else:
                log_event("fault.notification_lost", agent_id=what.agent_id, error=error.message)

    def _release_reordered(self, agent_id: str) -> None:
        """Sends the notifications that were held until after the next one to this agent."""
        waiting = [held for held in self._held if isinstance(held.what, _Notice) and held.what.after_next]
        for held in waiting:
            if held.what.agent_id == agent_id:
                self._held.remove(held)
                heapq.heapify(self._held)
                self._run_held(held.what)

    def _on_write_done(self, result: WriteResult) -> None:
        write = self._open.pop(result.handle)
        if write.reported:
            return
        if result.error is not None:
            self._fail(write, WriteResult(write.handle, result.error, result.in_doubt))
            return
        if write.attached is not None:
            self._release_reordered(write.agent_id)
        now = self._clock()
        for notice in write.follow:
            due_s = now + notice.delay_s
            if due_s <= now:
                self._run_held(notice)
            else:
                self._hold_or_run(notice, due_s)
        if write.silent:
            self._stuck[write.handle] = write.agent_id
        else:
            self._completed.append(WriteResult(write.handle))

    def _fail(self, write: _Write, result: WriteResult) -> None:
        if not write.reported:
            self._completed.append(result)

    def _filter_arrivals(self, notifications: list[tuple[str, bytes]], now: float) -> list[tuple[str, bytes]]:
        arrived: list[tuple[str, bytes]] = []
        for agent_id, data in notifications:
            if self.dice.fires("drop_arrival", agent_id):
                continue
            copies = 2 if self.dice.fires("duplicate_arrival", agent_id) else 1
            if self.dice.fires("delay_arrival", agent_id):
                self._last_number += 1
                late = _Held(now + self._plan.hold_s, self._last_number, _Notice(agent_id, data))
                self._arrivals += [late] * copies
            else:
                arrived += [(agent_id, data)] * copies
        due = [held for held in self._arrivals if held.due_s <= now]
        self._arrivals = [held for held in self._arrivals if held.due_s > now]
        return arrived + [(h.what.agent_id, h.what.data) for h in due if isinstance(h.what, _Notice)]

    def _lost_peers(self) -> set[str]:
        """Peers with operations held here that the inner transport is no longer connected to."""
        held = {item.what.agent_id for item in self._held} | set(self._stuck.values())
        return held - self._inner.connected() if held else held

    def _drop(self, agent_id: str, why: str) -> None:
        for held in [held for held in self._held if held.what.agent_id == agent_id]:
            self._held.remove(held)
            if isinstance(held.what, _Write):
                self._fail(held.what, WriteResult(held.what.handle, why))
        heapq.heapify(self._held)
        for handle in [handle for handle, agent in self._stuck.items() if agent == agent_id]:
            del self._stuck[handle]
            self._completed.append(WriteResult(handle, why))

    def _require(self, agent_id: str) -> tuple[KvMemoryRegion, KvMemoryRegion]:
        """The own memory and that of a connected peer."""
        if self._memory is None:
            raise FailedPreconditionError("no memory is registered")
        if agent_id not in self._inner.connected() or agent_id not in self._peers:
            raise unknown_peer(agent_id)
        return self._memory, self._peers[agent_id]
