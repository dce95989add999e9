"""The pools as routing sees them: immutable values, copied out of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal, TypeAlias

from splitserve.v1 import registry_pb2, scaling_pb2

PoolName = Literal["prefill", "decode"]
WorkerKey = tuple[str, int]
"""(worker id, epoch): one boot of one worker."""
WorkerState: TypeAlias = scaling_pb2.WorkerState.ValueType
CircuitState = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its workers serve it; see `ServedModel` in the protos."""

    name: str
    tokenizer_source: str
    context_tokens: int
    vocabulary_size: int
    block_size_tokens: int = 0
    """Tokens of one KV block, the same on all workers; 0: not known."""


@dataclass(frozen=True, slots=True)
class Circuit:
    """What circuit breakers say of a worker; see `coordinator.circuits`."""

    state: CircuitState = "closed"
    tripped: bool = False
    """Whether it takes no requests because of its breaker."""
    pairs: tuple[tuple[str, CircuitState], ...] = ()
    """Prefill only: breakers of pairs that are not closed, by the decode worker's agent id."""
    cut_agents: frozenset[str] = frozenset()
    """Prefill only: agent ids of the decode workers that it is not paired with because of them."""


CLOSED_CIRCUIT = Circuit()


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker at one moment. `load` is its last report and must not be changed."""

    worker_id: str
    epoch: int
    pool: PoolName
    address: str
    model: Model
    agent_id: str
    transport: str
    block_size_tokens: int
    max_running_requests: int
    load: registry_pb2.WorkerLoad = field(default_factory=registry_pb2.WorkerLoad)
    reported: bool = False
    draining: bool = False
    output_open: bool = False
    """Decode only: whether its output stream to this coordinator is open."""
    connected_agents: frozenset[str] = frozenset()
    """Prefill only: agent ids of the decode workers it can write to."""
    lanes: tuple[registry_pb2.LaneReport, ...] = ()
    """Prefill only: its lanes to decode workers, as measured at first contact."""
    block_bytes: int = 0
    joined: bool = True
    """False until it was connected with its peers; see `coordinator.joining`."""
    in_rotation: bool = True
    """False for a warm standby: connected, but sent no requests."""
    registered_standby: bool = False
    circuit: Circuit = CLOSED_CIRCUIT
    prefix_slot: int = -1
    """Its number in the prefix index; -1: it has told nothing of its cache. See `coordinator.prefix_index`."""
    total_requests: int = 0
    """What this coordinator has sent to this boot."""
    sent_requests: int = 0
    sent_tokens: int = 0
    """What this coordinator sent here since the last report, which cannot know of it yet."""

    @property
    def key(self) -> WorkerKey:
        """Identity of this boot."""
        return self.worker_id, self.epoch

    @property
    def usable(self) -> bool:
        """Whether it could take new requests, its peers and the rotation aside."""
        return self.reported and not self.draining and (self.output_open or self.pool == "prefill")

    @property
    def accepts(self) -> bool:
        """Whether it takes new requests, its peers aside."""
        return self.in_rotation and self.joined and self.usable and not self.circuit.tripped

    @property
    def reached_agents(self) -> frozenset[str]:
        """Prefill only: agent ids of the decode workers that it may be paired with."""
        cut = self.circuit.cut_agents
        return self.connected_agents - cut if cut else self.connected_agents

    def with_sent(self, tokens: int) -> Worker:
        """The worker after one more request of so many prompt tokens went to it."""
        # Several times faster than `dataclasses.replace`, and part of every request's time.
        values = list(_VALUES(self))
        values[_TOTAL_REQUESTS] += 1
        values[_SENT_REQUESTS] += 1
        values[_SENT_TOKENS] += tokens
        return Worker(*values)

    def reaches(self, decode: Worker) -> bool:
        """Whether this prefill worker can write into that decode worker's pool, and may."""
        return decode.agent_id in self.reached_agents


_FIELDS = [one.name for one in fields(Worker)]
_VALUES = attrgetter(*_FIELDS)
_TOTAL_REQUESTS, _SENT_REQUESTS, _SENT_TOKENS = map(
    _FIELDS.index, ("total_requests", "sent_requests", "sent_tokens")
)


@dataclass(frozen=True, slots=True)
class ChangeLog:
    """Which workers have changed since some moment: the first `length` of `worker_ids`, to which more may be added.

    Of two snapshots with the same list, the later one differs from the other at most in the workers in between.
    """

    worker_ids: Sequence[str]
    length: int


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """All registered workers, in order of their ids."""

    workers: tuple[Worker, ...] = ()
    changes: ChangeLog | None = field(default=None, compare=False)
    """Saves those who compare snapshots a look at each worker."""

    def accepting(self, model: str, pool: PoolName) -> list[Worker]:
        """The workers of one pool that take new requests."""
        return [w for w in self.workers if w.model.name == model and w.pool == pool and w.accepts]

    def is_ready(self, worker: Worker) -> bool:
        """Whether the worker can serve now, together with at least one of the other pool."""
        if not worker.accepts:
            return False
        if worker.pool == "prefill":
            return any(worker.reaches(peer) for peer in self.accepting(worker.model.name, "decode"))
        return any(peer.reaches(worker) for peer in self.accepting(worker.model.name, "prefill"))

    def state_of(self, worker: Worker) -> WorkerState:
        """How far the worker is. Its peers need not be in rotation for it to count as connected."""
        if worker.draining:
            return scaling_pb2.WORKER_STATE_DRAINING
        if not worker.joined or not worker.usable or not self._is_connected(worker):
            return scaling_pb2.WORKER_STATE_STARTING
        return scaling_pb2.WORKER_STATE_READY if worker.in_rotation else scaling_pb2.WORKER_STATE_STANDBY

    def _is_connected(self, worker: Worker) -> bool:
        peers = (w for w in self.workers if w.usable and w.model.name == worker.model.name)
        if worker.pool == "prefill":
            return any(peer.agent_id in worker.connected_agents for peer in peers if peer.pool == "decode")
        return any(worker.agent_id in peer.connected_agents for peer in peers if peer.pool == "prefill")

    def ready_models(self) -> frozenset[str]:
        """Models of which at least one complete pair takes requests."""
        return frozenset(
            name
            for name in {worker.model.name for worker in self.workers}
            if any(
                prefill.reaches(decode)
                for prefill in self.accepting(name, "prefill")
                for decode in self.accepting(name, "decode")
            )
        )

    def lanes_of(self, worker: Worker) -> list[tuple[Worker, registry_pb2.LaneReport]]:
        """A prefill worker's lanes to the decode workers that are still registered, in order of their ids."""
        lanes = {lane.agent_id: lane for lane in worker.lanes}
        return [(peer, lanes[peer.agent_id]) for peer in self.workers if peer.agent_id in lanes]

    def models(self) -> dict[str, Model]:
        """Models by name, each with the smallest context that any of its workers has."""
        found: dict[str, Model] = {}
        for worker in self.workers:
            known = found.get(worker.model.name)
            if known is None or worker.model.context_tokens < known.context_tokens:
                found[worker.model.name] = worker.model
        return dict(sorted(found.items()))
