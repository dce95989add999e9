"""Immutable snapshots of the pools, taken from the registry; what routing decides on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from coordinator.workers.catalog import Model
from splitserve.generation.kv_blocks import Adapter
from splitserve.v1 import registry_pb2, scaling_pb2

PoolName = Literal["prefill", "decode"]
WorkerKey = tuple[str, int]
"""(worker id, epoch): one boot of one worker."""
WorkerState: TypeAlias = scaling_pb2.WorkerState.ValueType
CircuitState = Literal["closed", "open", "half-open"]
COUNTED_REQUESTS = 8
"""Where `Worker.total_requests` stops counting."""


@dataclass(frozen=True, slots=True)
class CircuitStatus:
    """Circuit breakers of a worker and its pairs; see `coordinator.health.breaker_registry`."""

    state: CircuitState = "closed"
    tripped: bool = False
    """Whether its breaker ejects it from routing."""
    pairs: tuple[tuple[str, CircuitState], ...] = ()
    """If it sends KV: states of pair breakers that are not closed, by the agent id of the one that decodes."""
    ejected_agents: frozenset[str] = frozenset()
    """If it sends KV: agent ids of workers that it must not be paired with as those that decode."""


CLOSED_CIRCUIT = CircuitStatus()


@dataclass(frozen=True, slots=True)
class Isolation:
    """What is out of rotation because its answers were wrong; see `coordinator.quality`."""

    worker: bool = False
    """Whether the worker gets no requests at all."""
    agents: frozenset[str] = frozenset()
    """If it sends KV: agent ids of workers that it must not be paired with as those that decode."""


NOT_ISOLATED = Isolation()
NO_ADAPTERS: Mapping[str, Adapter] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker at one moment. `load` is its last report and must not be mutated."""

    worker_id: str
    epoch: int
    pool: PoolName
    """Its pool; of a neutral worker the one that it leans to now."""
    address: str
    model: Model
    """The base model."""
    agent_id: str
    transport: str
    block_size_tokens: int
    max_running_requests: int
    load: registry_pb2.WorkerLoad = field(default_factory=registry_pb2.WorkerLoad)
    reported: bool = False
    draining: bool = False
    output_open: bool = False
    """If it takes KV: whether its output stream to this coordinator is open."""
    connected_agents: frozenset[str] = frozenset()
    """If it sends KV: agent ids of the workers that it can write to."""
    lanes: tuple[registry_pb2.LaneReport, ...] = ()
    """If it sends KV: its lanes to those, as measured at first contact."""
    block_bytes: int = 0
    max_step_tokens: int = 0
    host_id: str = ""
    """The machine it runs on; empty if unknown."""
    joined: bool = True
    """False until it is connected to its peers; see `coordinator.workers.rotation`."""
    in_rotation: bool = True
    """False for a standby: connected, but not sent requests."""
    registered_standby: bool = False
    experimental: bool = False
    neutral: bool = False
    """Whether it serves both pools with one engine."""
    trades_prefixes: bool = False
    """Whether, pinned to one pool, it gives prefixes to others and takes them."""
    led_elsewhere: bool = False
    """Whether another coordinator moves its leaning."""
    registered_pool: PoolName | None = None
    """The pool that it registered with; None: `pool`."""
    paces_prompts: bool = False
    """Whether its engine computes prompts only as far as the targets of its streams leave time."""
    replica_class: str = ""
    """The class of replicas that it registered as, for the autoscaler."""
    carries_calls: bool = False
    """Whether its short calls may share a stream."""
    circuit: CircuitStatus = CLOSED_CIRCUIT
    isolation: Isolation = NOT_ISOLATED
    prefix_slot: int = -1
    """Its slot in the prefix index; -1: no cache events yet. See `coordinator.workers.prefix_index.index`."""
    near_slots: tuple[int, int] | None = None
    """With tiers below its KV blocks: slots of what is in host memory or nearer, and of what is among the blocks."""
    certificate: str = ""
    """Fingerprint of the certificate that it registered with; empty without mutual TLS."""
    total_requests: int = 0
    """Requests that this coordinator has sent to this boot, counted up to `COUNTED_REQUESTS`: the first are slow."""
    adapters: Mapping[str, Adapter] = field(default_factory=lambda: NO_ADAPTERS)
    """Adapters of its model that it has, by name."""
    start: registry_pb2.StartPhases | None = None
    """How long its boot took, as it says; must not be mutated. None: unknown."""
    preempted_by_s: float | None = None
    """When its machine is taken away, by a spot notice, on the coordinator's monotonic clock; None: no notice."""
    sleeping: bool = False
    """Whether it has given up the memory of its KV, until it comes back as another boot."""
    gives_weights: bool = False
    """Whether it gives its weights to workers of its model that start."""
    wake_s: float | None = None
    """How long it took to wake up the last time; None: it has not slept."""

    @property
    def key(self) -> WorkerKey:
        """Identity of this boot."""
        return self.worker_id, self.epoch

    def reported_as(
        self, report: registry_pb2.ReportRequest, pool: PoolName, slots: tuple[int, int, int], now: float
    ) -> Worker:
        """The worker after a report that came at `now` and has been checked; `pool` is where it leans by that."""
        preempted_by_s = self.preempted_by_s
        if report.HasField("preemption"):
            # The earliest of all reports: the later ones say the same, some of them late.
            by_s = now + report.preemption.time_left.ToNanoseconds() / 1e9
            preempted_by_s = by_s if preempted_by_s is None else min(by_s, preempted_by_s)
        return replace(
            self,
            pool=pool,
            prefix_slot=slots[0],
            near_slots=slots[1:] if slots[0] != slots[2] else None,
            load=report.load,
            reported=True,
            connected_agents=frozenset(report.connected_agent_ids),
            lanes=tuple(report.lanes),
            draining=self.draining or report.draining or preempted_by_s is not None,
            led_elsewhere=report.led_elsewhere,
            preempted_by_s=preempted_by_s,
            sleeping=report.sleeping,
            wake_s=report.wake_seconds or None,
        )

    def preempted_in_s(self, now: float) -> float | None:
        """Seconds until its machine is taken away, at least 0; None without a notice."""
        return None if self.preempted_by_s is None else max(0.0, self.preempted_by_s - now)

    @property
    def name(self) -> str:
        """What messages call it: "decode worker w1", or "worker w1" for a neutral one."""
        return f"worker {self.worker_id}" if self.neutral else f"{self.pool} worker {self.worker_id}"

    @property
    def computes_prompts(self) -> bool:
        """Whether it serves the prefill pool, whatever it leans to."""
        return self.neutral or self.pool == "prefill"

    @property
    def decodes(self) -> bool:
        """Whether it serves the decode pool, whatever it leans to."""
        return self.neutral or self.pool == "decode"

    @property
    def trades(self) -> bool:
        """Whether it gives prefixes and takes them."""
        return self.neutral or self.trades_prefixes

    @property
    def sends_kv(self) -> bool:
        """Whether it writes KV to others: of prompts that it computes, or of prefixes. Not in its sleep."""
        return not self.sleeping and (self.computes_prompts or self.trades_prefixes)

    @property
    def takes_kv(self) -> bool:
        """Whether others write KV to it, for which it gives tickets and has an output stream."""
        return self.decodes or self.trades_prefixes

    @property
    def takes_prefixes(self) -> bool:
        """Whether prefixes may be brought to it now. A prefill worker without an output stream computes prompts."""
        return self.decodes or (self.trades_prefixes and self.output_open)

    def writes_to(self, other: Worker) -> bool:
        """Whether it is to be connected to another one of its model. One that sleeps has no memory to write to."""
        return not other.sleeping and (
            (self.computes_prompts and other.decodes) or (self.trades and other.trades)
        )

    def serves(self, model: str) -> bool:
        """Whether requests for this name may be sent here: its base model, or one of its adapters."""
        return model == self.model.name or model in self.adapters

    @property
    def usable(self) -> bool:
        """Whether it could take new requests, regardless of peers, rotation and breakers."""
        there = self.reported and not self.draining and not self.sleeping
        return there and (self.output_open or not self.decodes)

    @property
    def accepts(self) -> bool:
        """Whether it takes new requests, regardless of its peers."""
        return self.in_service and not self.circuit.tripped and not self.isolation.worker

    @property
    def in_service(self) -> bool:
        """Whether it takes new requests, unless a circuit breaker or the quality watch keeps them from it."""
        return self.in_rotation and self.joined and self.usable

    @property
    def reached_agents(self) -> frozenset[str]:
        """Agent ids of the workers that it may be paired with as the one that computes the prompt."""
        ejected = self.circuit.ejected_agents | self.isolation.agents
        return self.connected_agents - ejected if ejected else self.connected_agents

    def reaches(self, decode: Worker) -> bool:
        """Whether this worker may compute prompts for that one: it can and may write to it, or is it, and neutral."""
        if decode.agent_id == self.agent_id:
            return self.neutral
        return decode.agent_id in self.reached_agents


def has_pair(workers: Sequence[Worker]) -> bool:
    """Whether any of these workers may compute prompts for one of them, itself included. Their states do not count."""
    decodes = [worker for worker in workers if worker.decodes]
    return any(p.reaches(d) for p in workers if p.computes_prompts for d in decodes)


@dataclass(frozen=True, slots=True)
class ChangeLog:
    """Ids of workers that changed: the first `length` of `worker_ids`, an append-only list shared by snapshots.

    Two snapshots with the same list differ at most in the workers listed between their lengths.
    """

    worker_ids: Sequence[str]
    length: int


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """All registered workers, in order of their ids."""

    workers: tuple[Worker, ...] = ()
    changes: ChangeLog | None = field(default=None, compare=False)
    """Lets readers that compare snapshots skip unchanged workers."""

    @property
    def preempted(self) -> list[Worker]:
        """The workers whose machines are being taken away."""
        return [worker for worker in self.workers if worker.preempted_by_s is not None]

    def accepting(self, model: str, pool: PoolName) -> list[Worker]:
        """The workers of one pool, those that lean to it among them, that take new requests."""
        return [w for w in self.workers if w.pool == pool and w.serves(model) and w.accepts]

    def serving(self, model: str, pool: PoolName) -> list[Worker]:
        """The same; where there is none, the neutral workers that lean to the other pool and stand in."""
        return self.accepting(model, pool) or self.stand_ins(model, pool)

    def stand_ins(self, model: str, pool: PoolName) -> list[Worker]:
        """The neutral workers that take new requests and lean to the other pool."""
        return [w for w in self.workers if w.neutral and w.pool != pool and w.serves(model) and w.accepts]

    def lacks_workers(self, model: str) -> bool:
        """Whether a pool of the model has no worker in service, of whichever leaning: there is none, or all of them
        start, rest or drain. One that a breaker or the quality watch has put aside is there."""
        there = [w for w in self.workers if w.serves(model) and w.in_service]
        return not (any(w.computes_prompts for w in there) and any(w.decodes for w in there))

    def is_ready(self, worker: Worker) -> bool:
        """Whether the worker can serve now: alone if it is neutral, else with at least one of the other pool."""
        if not worker.accepts or worker.neutral:
            return worker.accepts
        if worker.pool == "prefill":
            return any(worker.reaches(peer) for peer in self._taking(worker.model.name) if peer.decodes)
        return any(peer.reaches(worker) for peer in self._taking(worker.model.name) if peer.computes_prompts)

    def _taking(self, model: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.serves(model) and worker.accepts]

    def state_of(self, worker: Worker) -> WorkerState:
        """The worker's lifecycle state. Peers count as connected even if they are out of rotation, and none is missed
        while all that there are sleep."""
        if worker.draining:
            return scaling_pb2.WORKER_STATE_DRAINING
        if worker.sleeping:
            return scaling_pb2.WORKER_STATE_SLEEPING
        if not worker.joined or not worker.usable or not self._is_connected(worker):
            return scaling_pb2.WORKER_STATE_STARTING
        return scaling_pb2.WORKER_STATE_READY if worker.in_rotation else scaling_pb2.WORKER_STATE_STANDBY

    def _is_connected(self, worker: Worker) -> bool:
        if worker.neutral:
            return True
        peers = (w for w in self.workers if w.usable and w.model.name == worker.model.name)
        if worker.pool == "prefill":
            connected = any(peer.agent_id in worker.connected_agents for peer in peers if peer.decodes)
        else:
            connected = any(
                worker.agent_id in peer.connected_agents for peer in peers if peer.computes_prompts
            )
        return connected or self._peers_sleep(worker)

    def _peers_sleep(self, worker: Worker) -> bool:
        there = [w for w in self.workers if w.model.name == worker.model.name and w.pool != worker.pool]
        return any(peer.sleeping for peer in there) and not any(peer.usable for peer in there)

    def ready_models(self) -> frozenset[str]:
        """Models and adapters with at least one complete pair that takes requests."""
        return frozenset(
            name
            for name in {name for worker in self.workers for name in (worker.model.name, *worker.adapters)}
            if has_pair(self._taking(name))
        )

    def handoff_lanes_of(self, worker: Worker) -> list[tuple[Worker, registry_pb2.LaneReport]]:
        """Its lanes to workers that decode, if it computes prompts; where prefixes are traded it has others, too."""
        return [each for each in self.lanes_of(worker) if worker.computes_prompts and each[0].decodes]

    def lanes_of(self, worker: Worker) -> list[tuple[Worker, registry_pb2.LaneReport]]:
        """A worker's lanes to the registered ones that it writes to, in order of the peers' ids."""
        if not worker.lanes:
            return []  # a thousand workers look for theirs at each scrape
        lanes = {lane.agent_id: lane for lane in worker.lanes}
        return [(peer, lanes[peer.agent_id]) for peer in self.workers if peer.agent_id in lanes]

    def models(self) -> dict[str, Model]:
        """Base models by name, each with the smallest context and all block sizes among its workers."""
        found: dict[str, Model] = {}
        for worker in self.workers:
            known = found.get(worker.model.name)
            if known is None or worker.model.context_tokens < known.context_tokens:
                found[worker.model.name] = worker.model
        sizes: dict[str, set[int]] = {name: set() for name in found}
        for worker in self.workers:
            sizes[worker.model.name].add(worker.block_size_tokens)
        return {
            name: replace(model, block_sizes=tuple(sorted(sizes[name])))
            for name, model in sorted(found.items())
        }
