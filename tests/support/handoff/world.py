"""Two requests, three blocks, two prefill workers, a decode worker and a coordinator: every order of everything.

What is real: `ReservationTable` and `BlockPool` (`decode_side.py`), `KvPusher`, `SpentTickets` and `KvTicket`
(`prefill_side.py`), `coordinator.attempt`. What is played: the network, the processes, the clock and the engines.

* A message may be lost, delayed and overtaken without bound; notifications, Prefill calls, cancellations and aborts may
  also arrive again and again. Exception: a ticket travels for `WRITE_GRACE_S` at most, which the quarantine relies on.
* A write in flight may arrive at any time, or fail and arrive all the same, until `WRITE_GRACE_S` after its ticket's
  deadline, or after the end of its process; then the connection is closed. So says docs/internals/handoff.md.
* Every process may crash at every point, and start again at every later one, `faults` times in all. A prefill worker
  may stand still for any time. A decode worker and a coordinator may be cut off from all others for any time.
* Clients leave and calls fail at every point. After a failed attempt both is explored, a further one and an error.
* Time moves in steps of `WRITE_GRACE_S`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.handoff.coordinator_side import CoordinatorSide
from tests.support.handoff.decode_side import TICK_S, DecodeSide
from tests.support.handoff.explorer import Explored, Steps, Violation, explore
from tests.support.handoff.prefill_side import PrefillSide
from tests.support.handoff.states import (
    DOWN,
    Message,
    Request,
    Setting,
    State,
    Step,
    decode_agent,
    index_of,
    numbers_of,
    replaced,
    ticket_of,
    with_net,
)


class World(CoordinatorSide):
    """The system's steps. `explore` visits all of its states."""

    def __init__(self, setting: Setting | None = None) -> None:
        super().__init__(setting or Setting())
        self.decodes: Steps[DecodeSide] = Steps()
        self.prefills: Steps[PrefillSide] = Steps()
        self._fresh: set[int] = set()
        self._checked: set[tuple[object, ...]] = set()
        self._spent: dict[tuple[object, ...], bool] = {}

    def explore(self) -> Explored:
        """Raises Counterexample for the first violation."""
        setting = self.setting
        prefill = tuple(self._new_prefill(index, 1, "d1") for index in range(2))
        requests = tuple(Request() for _ in setting.needs)
        start = State(0, 1, requests, self._new_decode(1), 1, prefill, (1, 1), 0, frozenset(), setting.faults)
        return explore(start, self.successors, self.check_rest)

    def successors(self, state: State) -> Iterator[Step]:
        """All that may happen next. Raises Violation."""
        self._check_writes(state)
        if self.setting.eager and (heard := self._told_at_once(state)) is not None:
            yield heard[0], self._forget(heard[1])
            return
        for label, following in self._raw(state):
            yield label, self._forget(following)

    def check_rest(self, state: State) -> None:
        """Nothing can happen any more: nothing may be left."""
        if state.tick != self.setting.end:
            raise Violation("time stands still")
        if state.decode != DOWN and not self.decodes.facts(state.decode)[1]:
            raise Violation("blocks or reservations are left on the decode worker")
        if any(part != DOWN and not self.prefills.facts(part)[1] for part in state.prefill):
            raise Violation("a push is left on a prefill worker")
        if not all(request.done or request.attempt == 0 for request in state.requests):
            raise Violation("a request has not ended")

    def _raw(self, state: State) -> Iterator[Step]:
        yield from self._time(state)
        if state.coordinator > 0:
            for index, request in enumerate(state.requests):
                if not request.done:
                    yield from self._coordinate(state, index, request)
        for number in numbers_of(state.net):
            yield from self._deliver(state, number, self._messages[number])
        if state.decode != DOWN:
            for name in self.decodes.facts(state.decode)[2]:
                yield f"{name} is decoded", self._decoded(state, "finish", name)
        for index, part in enumerate(state.prefill):
            if part != DOWN:
                yield from self._prefill(state, index, part)
        yield from self._restarts(state)
        if state.faults:
            yield from self._crashes(state._replace(faults=state.faults - 1))

    def _time(self, state: State) -> Iterator[Step]:
        now = state.tick + 1
        if now > self.setting.end or all(request.attempt == 0 for request in state.requests):
            return  # time begins with the first request
        # What may arrive after this was checked in this state; the new one is checked by itself.
        later = frozenset(landing for landing in state.orphans if landing[2] > now * TICK_S)
        passed = state._replace(tick=now, orphans=later)
        if passed.decode != DOWN:
            passed = self._decoded(passed, "expire", now)
        if now >= self.setting.deadline and passed.coordinator > 0:
            for index, request in enumerate(passed.requests):
                if not request.done:
                    passed = self._close(passed, index, done=True)
        yield "time passes", passed

    def _restarts(self, state: State) -> Iterator[Step]:
        begins = any(
            not request.done and request.attempt < self.setting.attempts_of(index)
            for index, request in enumerate(state.requests)
        )
        if state.tick >= self.setting.deadline or not begins:
            return  # nothing new begins any more: one that nobody will use is like one that is down
        if state.coordinator < 0:
            yield "the coordinator starts", state._replace(coordinator=1 - state.coordinator)
        if state.decode == DOWN:
            boot = state.decode_boot + 1
            yield "the decode worker starts", state._replace(decode=self._new_decode(boot), decode_boot=boot)
        for index, part in enumerate(state.prefill):
            if part == DOWN:
                boots = replaced(state.prefill_boot, index, state.prefill_boot[index] + 1)
                fresh = self._new_prefill(index, boots[index], f"d{state.decode_boot}")
                parts = replaced(state.prefill, index, fresh)
                yield f"prefill worker {index} starts", state._replace(prefill=parts, prefill_boot=boots)

    def _crashes(self, state: State) -> Iterator[Step]:
        """Processes that nobody has called yet do not crash: their next boot would be like this one."""
        named = {request.writer for request in state.requests}
        if all(request.attempt == 0 for request in state.requests):
            return
        if state.coordinator > 0:
            crashed = state
            for index, request in enumerate(state.requests):
                if request.attempt and not request.done:
                    crashed = self._end_attempt(crashed, index, done=True, tell_decode=False)
            sent = self._sent(crashed.net, ("lost", f"c{state.coordinator}", f"d{state.decode_boot}"))
            yield "the coordinator crashes", crashed._replace(coordinator=-state.coordinator, net=sent)
            lost = self._sent(state.net, ("lost", f"c{state.coordinator}", f"d{state.decode_boot}"))
            yield "the output stream breaks", state._replace(net=lost)
        if state.decode != DOWN:
            yield "the decode worker crashes", state._replace(decode=DOWN)
        end_s = (state.tick + 1) * TICK_S
        for index, part in enumerate(state.prefill):
            if part == DOWN or (f"p{index}.{state.prefill_boot[index]}" not in named and part in self._fresh):
                continue
            arriving = self.prefills.facts(part)[0]
            orphans = {(agent, number, min(until, end_s)) for agent, number, until in arriving}
            proof = ("proof", f"p{index}.{state.prefill_boot[index]}")
            yield (
                f"prefill worker {index} crashes",
                state._replace(
                    prefill=replaced(state.prefill, index, DOWN),
                    orphans=state.orphans | orphans,
                    net=self._sent(state.net, proof) if state.coordinator > 0 else state.net,
                ),
            )
            for handle, _, landed, _ in self.prefills.facts(part)[2]:
                if not landed:
                    yield (
                        f"write {handle} of prefill worker {index} fails",
                        self._pushed(state, index, "failed", handle),
                    )

    def _deliver(self, state: State, number: int, message: Message) -> Iterator[Step]:
        kind, name = message[0], str(message[1])
        once = with_net(state, state.net ^ (1 << number))
        match message:
            case ("reserve", _, int(index), coordinator, writer, _):
                following = self._reserved(state, once, index, name, str(coordinator), str(writer))
                if following is not None:
                    yield f"the decode worker grants {name}", following
            case ("ticket", _, bytes(ticket), granted):
                writer = state.requests[index_of(name)].writer
                yield f"{name} asks {writer}", self._ask_prefill(once, name, ticket, granted)
            case ("prefill" | "replay", _, agent, ticket, granted):
                again = self._sent(once.net, ("replay", name, agent, ticket, granted))
                label = f"the prompt of {name} reaches {agent}{' again' if kind == 'replay' else ''}"
                heard = with_net(once, again)
                yield from self._call(heard, str(agent), label, "start", name, ticket, kind == "prefill")
            case ("cancel", _, agent, ticket):
                yield from self._call(
                    state, str(agent), f"{agent} hears the end of {name}", "end", name, ticket
                )
            case ("abort", _, coordinator, no_writer, _):
                label = f"the decode worker hears the end of {name}{', no writer' if no_writer else ''}"
                yield label, self._decoded(state, "abort", name, coordinator, no_writer, state.tick)
            case ("note", sender, _, bytes(data)):
                label = f"the decode worker hears {data.hex()} of {sender}"
                yield label, self._decoded(state, "notify", sender, data, state.tick)
            case ("proof", agent) if state.decode != DOWN and state.coordinator > 0:
                yield (
                    f"{agent} has ended for certain",
                    self._decoded(state, "writer_ended", agent, state.tick),
                )
            case ("lost", coordinator, _):
                yield (
                    f"the decode worker loses {coordinator}",
                    self._decoded(once, "coordinator_lost", coordinator, state.tick),
                )
                if coordinator == f"c{state.coordinator}":
                    yield f"{coordinator} is back", self._decoded(once, "coordinator_back", coordinator)
            case (_, _) if kind != "proof":
                following = self._heard(once, index_of(name), str(kind))
                if following is not None:
                    yield f"the coordinator hears {kind} of {name}", following

    def _reserved(
        self, state: State, once: State, index: int, name: str, coordinator: str, writer: str
    ) -> State | None:
        setting = self.setting
        need, now = setting.needs[index], state.tick
        part, ticket = self.decodes.step(
            state.decode, "reserve", name, coordinator, writer, need, setting.deadline, now
        )
        if ticket is None:
            return None
        return once._replace(decode=part, net=self._sent(once.net, ("ticket", name, ticket, now)))

    def _call(self, state: State, agent: str, label: str, step: str, *arguments: object) -> Iterator[Step]:
        index = int(agent[1])
        if state.prefill[index] != DOWN:
            yield label, self._pushed(state, index, step, *arguments)

    def _forget(self, state: State) -> State:
        """Drops messages that cannot have an effect any more, each after a look at what it would do now."""
        net = state.net
        for number in numbers_of(net):
            if self._is_spent(state, number):
                net ^= 1 << number
        return state if net == state.net else with_net(state, net)

    def _is_spent(self, state: State, number: int) -> bool:
        message = self._messages[number]
        kind, name = message[0], message[1]
        if kind == "note":
            key = (number, state.decode, state.tick)
        elif kind in ("abort", "cancel"):
            if kind == "abort" and message[-1] != decode_agent(state):
                return True
            if self._reviving[kind, name] & state.net:
                return False
            parts = state.decode if kind == "abort" else state.prefill
            key = (number, parts, state.tick, state.prefill_boot)
        elif kind == "prefill" or kind == "replay":
            key = (number, state.prefill, state.tick)
        elif kind == "ticket":
            return state.tick > message[3] + 1 or not self._is_current(state, name)  # type: ignore[operator]
        elif kind == "reserve" or kind == "lost":
            return message[-1] != decode_agent(state) or state.tick >= self.setting.deadline
        elif kind == "proof":
            return state.coordinator < 0
        else:
            return not self._is_current(state, name)
        spent = self._spent.get(key)
        if spent is None:
            spent = self._spent[key] = self._would_change_nothing(state, message)
        return spent

    def _would_change_nothing(self, state: State, message: Message) -> bool:
        match message:
            case ("prefill" | "replay", _, agent, ticket, granted):
                if state.tick > int(str(granted)) + 1:
                    return True  # see the limit of a ticket's travel above
                part = state.prefill[int(str(agent)[1])]
                return part != DOWN and ticket_of(ticket) in self.prefills.facts(part)[5]
            case ("cancel", name, agent, ticket):
                index = int(str(agent)[1])
                if f"p{index}.{state.prefill_boot[index]}" != agent or state.prefill[index] == DOWN:
                    return True
                part, (sent, _) = self.prefills.step(state.prefill[index], "end", name, ticket, state.tick)
                return part == state.prefill[index] and not sent
            case ("abort", name, coordinator, no_writer, agent):
                step = ("abort", name, coordinator, no_writer, state.tick)
            case (_, sender, agent, data):
                step = ("notify", sender, data, state.tick)
        if agent != decode_agent(state):
            return True
        part, events = self.decodes.step(state.decode, *step)
        return part == state.decode and not events

    def _prefill(self, state: State, index: int, part: int) -> Iterator[Step]:
        _, _, writes, prompts, peers, _ = self.prefills.facts(part)
        who = f"prefill worker {index}"
        for name in prompts:
            yield f"{who} computes a block of {name}", self._pushed(state, index, "chunk", name)
        for handle, completes, landed, until_s in writes:
            if not landed and until_s <= state.tick * TICK_S:
                continue
            if completes and not landed:
                yield f"write {handle} of {who} arrives", self._pushed(state, index, "land", handle)
            else:
                yield f"write {handle} of {who} ends", self._pushed(state, index, "ended", handle)
        yield f"{who} looks at the clock", self._pushed(state, index, "poll")
        if state.coordinator > 0 and peers != {f"d{state.decode_boot}"}:
            yield (
                f"{who} learns of the decode worker",
                self._pushed(state, index, "peers", f"d{state.decode_boot}"),
            )

    def _pushed(self, state: State, index: int, name: str, *arguments: object) -> State:
        part, (sent, events) = self.prefills.step(state.prefill[index], name, *arguments, state.tick)
        net = state.net
        agent = f"p{index}.{state.prefill_boot[index]}"
        for to, data in sent:
            net = self._sent(net, ("note", agent, to, data))
        net = self._sent(net, *(event for event in events if self._is_current(state, event[1])))
        if part == state.prefill[index]:
            return state if net == state.net else with_net(state, net)
        parts = replaced(state.prefill, index, part)
        return State(*state[:5], parts, state.prefill_boot, net, *state[8:])

    def _decoded(self, state: State, name: str, *arguments: object) -> State:
        part, events = self.decodes.step(state.decode, name, *arguments)
        net = self._sent(state.net, *(event for event in events if self._is_current(state, event[1])))
        return State(*state[:3], part, *state[4:7], net, *state[8:])

    def _check_writes(self, state: State) -> None:
        """Whatever may arrive now must be meant for blocks that still belong to its writer."""
        parts = (state.tick, state.decode, state.prefill, state.orphans)
        if parts in self._checked or state.decode == DOWN:
            return
        self._checked.add(parts)
        owned, agent = self.decodes.facts(state.decode)[0], decode_agent(state)
        arriving = set(state.orphans)
        for part in state.prefill:
            if part != DOWN:
                arriving |= self.prefills.facts(part)[0]
        for to, number, until_s in arriving:
            if to == agent and until_s > state.tick * TICK_S and number not in owned:
                raise Violation(
                    f"a write under ticket {number} may arrive in blocks that are not its own any more"
                )

    def _new_decode(self, boot: int) -> int:
        return self.decodes.add(DecodeSide(boot, self.setting.blocks, ticket_ticks=self.setting.ticket_ticks))

    def _new_prefill(self, index: int, boot: int, decode: str) -> int:
        part = PrefillSide(f"p{index}.{boot}", self.setting.blocks)
        part.transport.peers.add(decode)
        number = self.prefills.add(part)
        self._fresh.add(number)
        return number
