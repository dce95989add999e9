"""The states of the explored system, and small functions over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from coordinator.attempt import AttemptState
from splitserve.v1 import kv_transfer_pb2
from tests.support.handoff.prefill_side import Landing

DOWN = -1
Message = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """How large the system is. `needs`: blocks of each request."""

    blocks: int = 3
    needs: tuple[int, ...] = (2, 1)
    attempts: int | tuple[int, ...] = 2
    faults: int = 1
    ticket_ticks: int = 1
    deadline: int = 2
    eager: bool = True
    """Leave out orders that give the same states; see `World._told_at_once`."""

    def attempts_of(self, index: int) -> int:
        """How often a request is tried."""
        return self.attempts if isinstance(self.attempts, int) else self.attempts[index]

    @property
    def end(self) -> int:
        """The tick at which everything must be over: the last ticket's, the grace twice, and the quarantine."""
        return self.deadline + 3


class Request(NamedTuple):
    """A request at its coordinator. `attempt` counts; the other fields are those of the attempt in progress."""

    done: bool = False
    attempt: int = 0
    state: AttemptState | None = None
    writer: str = ""
    ticket: bytes = b""
    written: bool = False


class State(NamedTuple):
    """Numbers of the parts' states; see `Steps`. `net` is a set of numbered messages."""

    tick: int
    coordinator: int
    """Its boot; negative while it is down."""
    requests: tuple[Request, ...]
    decode: int
    decode_boot: int
    prefill: tuple[int, ...]
    prefill_boot: tuple[int, ...]
    net: int
    orphans: frozenset[Landing]
    """What may still arrive of processes that have ended."""
    faults: int


Step = tuple[str, State]


def replaced(parts, index, part):  # type: ignore[no-untyped-def]
    return (*parts[:index], part, *parts[index + 1 :])


def with_net(state: State, net: int) -> State:
    return State(*state[:7], net, *state[8:])


@cache
def ticket_of(ticket: bytes) -> tuple[str, int]:
    parsed = kv_transfer_pb2.KvTicket.FromString(ticket)
    return parsed.decode_agent_id, parsed.reservation


def name_of(index: int, request: Request) -> str:
    return f"{'ABC'[index]}{request.attempt}"


def index_of(name: str) -> int:
    return "ABC".index(name[0])


def numbers_of(net: int) -> Iterator[int]:
    while net:
        low = net & -net
        yield low.bit_length() - 1
        net ^= low


def decode_agent(state: State) -> str:
    """The agent id of the decode worker, empty while it is down."""
    return "" if state.decode == DOWN else f"d{state.decode_boot}"
