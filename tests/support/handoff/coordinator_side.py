"""The coordinator of the explored system: attempts move by `coordinator.attempt`, and end as `Attempt` does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from coordinator.attempt import (
    AWAITS_DECODE,
    AWAITS_FIRST_TOKEN,
    AWAITS_REPORT,
    ENDED,
    IN_FLIGHT,
    PREFILL_NOT_NEEDED,
    AttemptEvent,
    AttemptState,
    DecodeRelease,
    after,
    release_of,
)
from splitserve.errors import SplitserveError
from tests.support.handoff.explorer import Violation
from tests.support.handoff.states import (
    Message,
    Request,
    Setting,
    State,
    Step,
    index_of,
    name_of,
    numbers_of,
    replaced,
    with_net,
)

REVIVED_BY = {"reserve": "abort", "prefill": "cancel", "replay": "cancel"}


class CoordinatorSide:
    """Its steps, and the network, which is a set of numbered messages."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._bits: dict[Message, int] = {}
        self._messages: list[Message] = []
        self._reviving: defaultdict[tuple[object, object], int] = defaultdict(int)
        """The messages that make an abort or a cancellation of an attempt matter again, by its kind and the attempt."""

    def _coordinate(self, state: State, index: int, request: Request) -> Iterator[Step]:
        name = name_of(index, request)
        if request.state is None:
            if request.attempt < self.setting.attempts_of(index):
                yield from self._begin(state, index, request)
            if request.attempt:
                yield (
                    f"{name} is given up",
                    self._with(state, index, Request(done=True, attempt=request.attempt)),
                )
            return
        yield f"the client of {name} leaves", self._close(state, index, done=True)
        if request.state in IN_FLIGHT or request.state is AttemptState.RESERVING:
            yield f"a worker of {name} is lost", self._close(state, index, done=False)
        if request.state in ENDED:
            yield f"{name} is settled", self._close(state, index, done=True)

    def _begin(self, state: State, index: int, request: Request) -> Iterator[Step]:
        fresh = all(other.attempt == 0 for other in state.requests)
        attempt = request.attempt + 1
        for prefill in range(1 if fresh else len(state.prefill)):  # the first choice is the same with either
            writer = f"p{prefill}.{state.prefill_boot[prefill]}"
            began = Request(False, attempt, after(AttemptState.NEW, AttemptEvent.ASK_DECODE), writer)
            name = name_of(index, began)
            asked = ("reserve", name, index, f"c{state.coordinator}", writer, f"d{state.decode_boot}")
            following = self._with(state, index, began)._replace(net=self._sent(state.net, asked))
            yield f"{name} asks decode, to be written by {writer}", following

    def _close(self, state: State, index: int, *, done: bool) -> State:
        return self._end_attempt(state, index, done=done, tell_decode=True)

    def _end_attempt(self, state: State, index: int, *, done: bool, tell_decode: bool) -> State:
        """What `Attempt.close` sends, or the end of the coordinator's calls does."""
        request = state.requests[index]
        net, name = state.net, name_of(index, request)
        if request.state is not None:
            called = bool(request.ticket)
            if called:
                net = self._sent(net, ("cancel", name, request.writer, request.ticket))
            release = release_of(request.state, prefill_called=called, written=request.written)
            if tell_decode and release is not DecodeRelease.NOTHING:
                no_writer = release is DecodeRelease.NO_WRITER
                net = self._sent(
                    net, ("abort", name, f"c{state.coordinator}", no_writer, f"d{state.decode_boot}")
                )
        ended = done or request.attempt >= self.setting.attempts_of(index)
        return self._with(state, index, Request(ended, request.attempt))._replace(net=net)

    def _heard(self, state: State, index: int, kind: str) -> State | None:
        """A worker's message reaches the attempt, as `Attempt` accepts it. None: not yet, streams keep their order."""
        request = state.requests[index]
        assert request.state is not None
        event = {"first": AttemptEvent.FIRST_TOKEN, "written": AttemptEvent.PREFILL_OVER}.get(kind)
        if kind == "kv" and request.state in AWAITS_DECODE:
            event = AttemptEvent.DECODE_HAS_KV
        elif kind == "out":
            if request.state in AWAITS_DECODE | AWAITS_FIRST_TOKEN:
                return None
            event = AttemptEvent.LAST_OUTPUT
        elif kind == "pfail" and request.state in PREFILL_NOT_NEEDED:
            event = AttemptEvent.PREFILL_OVER if request.state in AWAITS_REPORT else None
        elif kind in ("pfail", "dfail"):
            return self._close(state, index, done=False)
        elif kind == "written" and request.state in AWAITS_FIRST_TOKEN:
            return None
        if event is None:
            return state
        try:
            moved = after(request.state, event)
        except SplitserveError as error:
            raise Violation(f"{name_of(index, request)}: {error.message}") from error
        written = request.written or kind == "written"
        return self._with(state, index, request._replace(state=moved, written=written))

    def _told_at_once(self, state: State) -> Step | None:
        """A partial-order reduction: a message to the coordinator that has no bearing on what it tells the workers.

        To hear of a first token or an admission changes nothing but the attempt's state, and closing the attempt before
        or after it gives the same state; so hearing it first loses no behaviour of the workers.
        """
        for number in numbers_of(state.net):
            kind, name = self._messages[number][:2]
            if kind in ("first", "kv"):
                once = with_net(state, state.net ^ (1 << number))
                heard = self._heard(once, index_of(str(name)), str(kind))
                if heard is not None:
                    return f"the coordinator hears {kind} of {name}", heard
        return None

    def _ask_prefill(self, state: State, name: str, ticket: bytes, granted: object) -> State:
        index = index_of(name)
        request = state.requests[index]
        assert request.state is not None
        moved = after(after(request.state, AttemptEvent.TICKET), AttemptEvent.ASK_PREFILL)
        asked = ("prefill", name, request.writer, ticket, granted)
        following = self._with(state, index, request._replace(state=moved, ticket=ticket))
        return following._replace(net=self._sent(state.net, asked))

    def _sent(self, net: int, *messages: Message) -> int:
        for message in messages:
            bit = self._bits.get(message)
            if bit is None:
                bit = self._bits[message] = len(self._messages)
                self._messages.append(message)
                if (kind := REVIVED_BY.get(message[0])) is not None:
                    self._reviving[kind, message[1]] |= 1 << bit
            net |= 1 << bit
        return net

    def _is_current(self, state: State, name: object) -> bool:
        text = str(name)
        request = state.requests[index_of(text)]
        alive = state.coordinator > 0 and not request.done and request.state is not None
        return alive and name_of(index_of(text), request) == text

    def _with(self, state: State, index: int, request: Request) -> State:
        return State(*state[:2], replaced(state.requests, index, request), *state[3:])
