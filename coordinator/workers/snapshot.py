"""Immutable snapshots of the workers and their models, taken from the registry; what routing decides on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from splitserve.generation.kv_blocks import Adapter
from splitserve.roles import POOLS_OF, PoolName, RoleName
from splitserve.v1 import generation_pb2, registry_pb2, scaling_pb2


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its workers serve it; see `ServedModel` in the protos."""

    name: str
    tokenizer_source: str
    context_tokens: int
    vocabulary_size: int
    block_size_tokens: int = 0
    """Tokens per KV block of its workers; 0: unknown."""
    adapter: Adapter | None = None
    """The adapter that this name stands for; None: a base model."""
    base: str = ""
    """Name of an adapter's base model."""
    pooling: generation_pb2.Pooling.ValueType = generation_pb2.POOLING_UNSPECIFIED
    """What a pooling model computes; 0: it generates."""

    @property
    def base_name(self) -> str:
        """The model whose workers serve it: an adapter's base model, else the model itself."""
        return self.base or self.name

    @property
    def prompt_tokens(self) -> int:
        """The most tokens of a prompt. An answer needs room for one token."""
        return self.context_tokens if self.pooling else self.context_tokens - 1


class ModelCatalog:
    """The models and adapters that have had a worker since the start. Names stay known when their workers are gone."""

    def __init__(self) -> None:
        self.models: Mapping[str, Model] = {}
        """By name, adapters included. Replaced when it changes."""
        self._bases: dict[str, Model] = {}
        self._adapters: dict[str, tuple[str, Adapter]] = {}
        """By adapter: the name of its base model, and the content that was registered last."""
        self._changed = False

    def add(self, base: str, adapters: Mapping[str, Adapter]) -> None:
        """Learns a worker's adapters of the model `base`; the next `update` shows them."""
        for name, adapter in adapters.items():
            if self._adapters.get(name) != (base, adapter):
                self._adapters[name] = base, adapter
                self._changed = True

    def know(self, model: Model, adapters: Mapping[str, Adapter]) -> None:
        """Learns a base model and adapters that no worker has registered here; the next `update` shows them. A name
        that is known already keeps its meaning."""
        if model.name not in self._bases and model.name not in self._adapters:
            self._bases[model.name] = model
            self._changed = True
        if model.name in self._bases:
            known = self._bases.keys() | self._adapters.keys()
            self.add(model.name, {name: adapter for name, adapter in adapters.items() if name not in known})

    def update(self, models: Mapping[str, Model]) -> None:
        """Learns the base models of all workers."""
        bases = {**self._bases, **models}
        if bases == self._bases and not self._changed:
            return
        self._bases, self._changed = bases, False
        adapters = {
            name: replace(bases[base], name=name, adapter=adapter, base=base)
            for name, (base, adapter) in self._adapters.items()
        }
        self.models = {**adapters, **bases}


WorkerKey = tuple[str, int]
"""(worker id, epoch): one boot of one worker."""
WorkerState: TypeAlias = scaling_pb2.WorkerState.ValueType
CircuitState = Literal["closed", "open", "half-open"]
COUNTED_REQUESTS = 8
"""Where `Worker.total_requests` stops counting."""


@dataclass(frozen=True, slots=True)
class CircuitStatus:
    """Circuit breakers of a worker and its pairs; see `coordinator.health.circuit_breakers`."""

    state: CircuitState = "closed"
    tripped: bool = False
    """Whether its breaker ejects it from routing."""
    pairs: tuple[tuple[str, CircuitState], ...] = ()
    """If it sends KV: states of pair breakers that are not closed, by the agent id of the decode worker."""
    ejected_agents: frozenset[str] = frozenset()
    """If it sends KV: agent ids of the decode workers that it must not be paired with."""


CLOSED_CIRCUIT = CircuitStatus()
NO_ADAPTERS: Mapping[str, Adapter] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker at one moment. `load` is its last report and must not be mutated."""

    worker_id: str
    epoch: int
    role: RoleName
    """Its role now."""
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
    """If it sends KV: its lanes to the connected workers, as measured at first contact."""
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
    changes_role: bool = False
    """Whether it takes another role when it is asked to."""
    earlier_pools: frozenset[PoolName] = frozenset()
    """The pools of the roles that it had before: requests there may still be under way."""
    circuit: CircuitStatus = CLOSED_CIRCUIT
    prefix_slot: int = -1
    """Its slot in the prefix index; -1: no cache events yet. See `coordinator.workers.prefix_index`."""
    certificate: str = ""
    """Fingerprint of the certificate that it registered with; empty without mutual TLS."""
    total_requests: int = 0
    """Requests that this coordinator has sent to this boot, counted up to `COUNTED_REQUESTS`: the first are slow."""
    adapters: Mapping[str, Adapter] = field(default_factory=lambda: NO_ADAPTERS)
    """Adapters of its model that it has, by name."""
    start: registry_pb2.StartPhases | None = None
    """How long its boot took, as the worker reports; must not be mutated. None: unknown."""
    preempted_by_s: float | None = None
    """When its machine is taken away, by a spot notice, on the coordinator's monotonic clock; None: no notice."""

    @property
    def key(self) -> WorkerKey:
        """Identity of this boot."""
        return self.worker_id, self.epoch

    def reported_as(
        self, report: registry_pb2.ReportRequest, role: RoleName, prefix_slot: int, now: float
    ) -> Worker:
        """The worker after a checked report that came at `now` on the monotonic clock; `role` is its role by this
        report."""
        preempted_by_s = self.preempted_by_s
        if report.HasField("preemption"):
            # The earliest of all reports: later reports repeat the notice, and some of them arrive late.
            by_s = now + report.preemption.time_left.ToNanoseconds() / 1e9
            preempted_by_s = by_s if preempted_by_s is None else min(by_s, preempted_by_s)
        return replace(
            self,
            role=role,
            earlier_pools=self.earlier_pools | self.pools if role != self.role else self.earlier_pools,
            prefix_slot=prefix_slot,
            load=report.load,
            reported=True,
            connected_agents=frozenset(report.connected_agent_ids),
            lanes=tuple(report.lanes),
            draining=self.draining or report.draining or preempted_by_s is not None,
            preempted_by_s=preempted_by_s,
        )

    def preempted_in_s(self, now: float) -> float | None:
        """Seconds until its machine is taken away, at least 0; None without a notice."""
        return None if self.preempted_by_s is None else max(0.0, self.preempted_by_s - now)

    @property
    def name(self) -> str:
        """What messages call it: "decode worker w1", or "worker w1" for one of role both."""
        return f"worker {self.worker_id}" if self.role == "both" else f"{self.role} worker {self.worker_id}"

    @property
    def pools(self) -> frozenset[PoolName]:
        """The pools that it is in."""
        return POOLS_OF[self.role]

    @property
    def computes_prompts(self) -> bool:
        """Whether it is in the prefill pool."""
        return self.role != "decode"

    @property
    def decodes(self) -> bool:
        """Whether it is in the decode pool."""
        return self.role != "prefill"

    @property
    def sends_kv(self) -> bool:
        """Whether it writes KV to others, for prompts of an earlier role, too."""
        if self.model.pooling:
            return False
        return self.computes_prompts or "prefill" in self.earlier_pools

    @property
    def takes_kv(self) -> bool:
        """Whether others write KV to it and it has an output stream, for requests of an earlier role, too."""
        return self.decodes or "decode" in self.earlier_pools

    def writes_to(self, other: Worker) -> bool:
        """Whether it is to be connected to another one of its model."""
        return self.sends_kv and other.takes_kv

    def serves(self, model: str) -> bool:
        """Whether requests for this name may be sent here: its base model, or one of its adapters."""
        return model == self.model.name or model in self.adapters

    @property
    def usable(self) -> bool:
        """Whether it could take new requests, regardless of peers, rotation and breakers."""
        return self.reported and not self.draining and (self.output_open or not self.decodes)

    @property
    def accepts(self) -> bool:
        """Whether it takes new requests, regardless of its peers."""
        return self.in_service and not self.circuit.tripped

    @property
    def in_service(self) -> bool:
        """Whether it takes new requests, unless a circuit breaker keeps them from it."""
        return self.in_rotation and self.joined and self.usable

    @property
    def reached_agents(self) -> frozenset[str]:
        """Agent ids of the workers that it may be paired with as the one that computes the prompt."""
        ejected = self.circuit.ejected_agents
        return self.connected_agents - ejected if ejected else self.connected_agents

    def reaches(self, decode: Worker) -> bool:
        """Whether this worker may compute prompts for `decode`: it is connected to it and no breaker parts them, or
        both are the same worker of role both."""
        if decode.agent_id == self.agent_id:
            return self.role == "both"
        return decode.agent_id in self.reached_agents


def has_pair(workers: Sequence[Worker]) -> bool:
    """Whether any of these workers may compute prompts for one of them, itself included. Their states do not count."""
    decodes = [worker for worker in workers if worker.decodes]
    prefills = [worker for worker in workers if worker.computes_prompts]
    return any(prefill.reaches(decode) for prefill in prefills for decode in decodes)


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """All registered workers, in order of their ids."""

    workers: tuple[Worker, ...] = ()

    @property
    def preempted(self) -> list[Worker]:
        """The workers whose machines are being taken away."""
        return [worker for worker in self.workers if worker.preempted_by_s is not None]

    def accepting(self, model: str, pool: PoolName) -> list[Worker]:
        """The workers of one pool, those of role both among them, that take new requests."""
        return [
            worker
            for worker in self.workers
            if pool in worker.pools and worker.serves(model) and worker.accepts
        ]

    def lacks_workers(self, model: str) -> bool:
        """Whether a pool of the model has no worker in service: it is empty, or all its workers start, are on standby
        or drain. A worker that a breaker ejects counts as in service."""
        pools = [worker.pools for worker in self.workers if worker.serves(model) and worker.in_service]
        return len(frozenset[PoolName]().union(*pools)) < 2

    def is_ready(self, worker: Worker) -> bool:
        """Whether the worker can serve now: alone if its role is both, else with at least one of the other pool."""
        if not worker.accepts or worker.role == "both":
            return worker.accepts
        if worker.role == "prefill":
            return any(worker.reaches(decode) for decode in self.accepting(worker.model.name, "decode"))
        return any(prefill.reaches(worker) for prefill in self.accepting(worker.model.name, "prefill"))

    def state_of(self, worker: Worker) -> WorkerState:
        """The worker's lifecycle state. Peers count as connected even if they are out of rotation."""
        if worker.draining:
            return scaling_pb2.WORKER_STATE_DRAINING
        if not worker.joined or not worker.usable or not self._is_connected(worker):
            return scaling_pb2.WORKER_STATE_STARTING
        return scaling_pb2.WORKER_STATE_READY if worker.in_rotation else scaling_pb2.WORKER_STATE_STANDBY

    def _is_connected(self, worker: Worker) -> bool:
        if worker.role == "both":
            return True
        peers = (peer for peer in self.workers if peer.usable and peer.model.name == worker.model.name)
        if worker.role == "prefill":
            return any(peer.agent_id in worker.connected_agents for peer in peers if peer.decodes)
        return any(worker.agent_id in peer.connected_agents for peer in peers if peer.computes_prompts)

    def ready_models(self) -> frozenset[str]:
        """Models and adapters with at least one complete pair that takes requests."""
        accepting = [worker for worker in self.workers if worker.accepts]
        names = {name for worker in accepting for name in (worker.model.name, *worker.adapters)}
        return frozenset(
            name for name in names if has_pair([worker for worker in accepting if worker.serves(name)])
        )

    def handoff_lanes_of(self, worker: Worker) -> list[tuple[Worker, registry_pb2.LaneReport]]:
        """Its lanes to workers that decode, if it computes prompts."""
        return [pair for pair in self.lanes_of(worker) if worker.computes_prompts and pair[0].decodes]

    def lanes_of(self, worker: Worker) -> list[tuple[Worker, registry_pb2.LaneReport]]:
        """A worker's lanes to the registered ones that it writes to, in order of the peers' ids."""
        if not worker.lanes:
            return []  # each scrape calls this for every worker, and there may be a thousand
        lanes = {lane.agent_id: lane for lane in worker.lanes}
        return [(peer, lanes[peer.agent_id]) for peer in self.workers if peer.agent_id in lanes]

    def models(self) -> dict[str, Model]:
        """Base models by name, each with the smallest context among its workers."""
        by_name: dict[str, Model] = {}
        for worker in self.workers:
            known = by_name.get(worker.model.name)
            if known is None or worker.model.context_tokens < known.context_tokens:
                by_name[worker.model.name] = worker.model
        return dict(sorted(by_name.items()))
