"""The account of work: the work under way at every worker, which routing, placement and admission read.

The request flow writes it: `reserve` when admission starts the request, `route` when an attempt goes to a pair,
`prompt_begun`, `output`, `decoded` and `attempt_ended` during the attempt, `ended` at the end. The registry adds and
removes boots and passes on their load reports.

A report lacks requests that are still on their way, and includes those of other coordinators. So a load has two views:

- for choosing a pair: the report, and the work sent since (`queued_tokens`, `free_blocks`, `batch_requests`);
- for forecasts: each request in flight, and the work of other coordinators in reports (`others`, `other_blocks`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.latency_model import DecodeLatency, LatencyModel
from splitserve.v1 import registry_pb2

DEFAULT_PREFILL_TOKENS_PER_S = 2_000.0
"""Rate assumed until a worker of the pool has reported a measured one."""
DEFAULT_STEP_S = 0.02
"""Duration of a decode step assumed until a worker of the pool has reported a measured one."""
LEAST_SHARED = 0.05
"""Lower bound of `DecodeLoad.shared`: a sequence always counts for at least this fraction of its own blocks."""
MAX_CHANGES = 2**16
"""Length at which the list of changed boots is replaced by an empty one."""
_OUTLIVED_SHARE = 0.5
"""Share of the expected output that a sequence beyond its estimate is still expected to produce."""


@dataclass(eq=False, slots=True, kw_only=True)
class Flight:
    """One request in flight, as a load on its workers. Compared by identity."""

    prompt_tokens: int
    uncached_tokens: float
    """Prompt tokens expected to be missing from the prefix cache."""
    expected_output: float
    max_output: int
    tpot_slo_s: float | None = None
    """Target of the time per output token."""
    due_s: float = float("inf")
    """When the first token is due; infinity: no target."""
    horizon_tokens: float = 0.0
    """Prompt tokens that count in the prefill worker's horizon; admission sets it."""
    sent: int = 0
    """Output tokens so far."""
    computed: bool = False
    """Whether the prompt has been computed, that is, the first token was sent."""
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    """The workers whose loads include the request."""
    awaited_tokens: int = 0
    """Prompt tokens that count in `awaited_by.awaited_tokens`."""
    awaited_by: PrefillLoad | DecodeLoad | None = None
    """The load of the worker that will compute the prompt, while no report can include the request."""

    @property
    def context_tokens(self) -> int:
        """KV tokens that the request holds on its decode worker."""
        return self.prompt_tokens + self.sent

    @property
    def remaining_output(self) -> float:
        """Output tokens still expected. A request past its estimate is expected to run on for half of the estimate."""
        left = self.expected_output - self.sent
        if left < 1.0:
            left = _OUTLIVED_SHARE * self.expected_output
        return max(0.0, min(left, self.max_output - self.sent))


@dataclass(eq=False, slots=True)
class _Load:
    """Fields of prefill and decode loads."""

    key: WorkerKey
    slots: int
    """Most requests that the worker runs concurrently."""
    report: registry_pb2.WorkerLoad = field(default_factory=registry_pb2.WorkerLoad)
    """The last report; empty before the first."""
    latency: LatencyModel = field(default_factory=LatencyModel)
    """The worker's latency model from the last report."""
    sent_requests: int = 0
    sent_tokens: int = 0
    """Requests and prompt tokens that this coordinator sent since the last report, which may not include them."""
    awaited_tokens: int = 0
    """Prompt tokens that the worker will compute and no report includes: on a prefill worker, of requests that still
    wait for a reservation on a decode worker; on a decode worker, of prompts that it computes itself."""

    def _take(self, report: registry_pb2.WorkerLoad) -> None:
        self.report, self.sent_requests, self.sent_tokens = report, 0, 0
        self.latency = LatencyModel.from_proto(report.latency)


@dataclass(eq=False, slots=True)
class PrefillLoad(_Load):
    """Load of a prefill worker, with the requests in flight there that have no first token yet."""

    others: float = 0.0
    """Waiting prompt tokens of other coordinators."""
    flights: dict[Flight, None] = field(default_factory=dict)
    uncached_tokens: float = 0.0
    horizon_tokens: float = 0.0
    prompt_tokens: int = 0
    """Sums over the requests in flight."""
    _others_seen: float = 0.0

    @property
    def measured_rate(self) -> float:
        """Prompt tokens per second by the worker's latency model; 0 until it has measured."""
        return self.latency.prefill_tokens_per_s

    @property
    def rate(self) -> float:
        """Prompt tokens per second, or the default until measured."""
        return self.measured_rate or DEFAULT_PREFILL_TOKENS_PER_S

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens ahead of a new request: reported as waiting, sent since, and awaited."""
        return self.report.waiting_tokens + self.sent_tokens + self.awaited_tokens

    @property
    def requests(self) -> int:
        """Number of requests in flight that have no first token yet."""
        return len(self.flights)

    @property
    def has_long(self) -> bool:
        """Whether a prompt in flight is so long that admission counts only a part of its tokens. Prompts that admission
        gave to no prefill worker, such as those for decode workers, have no horizon tokens."""
        return any(0 < flight.horizon_tokens < flight.uncached_tokens for flight in self.flights)

    @property
    def backlog_s(self) -> float:
        """Seconds of work ahead of a new request."""
        return (self.uncached_tokens + self.others) / self.rate

    def on_report(self, report: registry_pb2.WorkerLoad) -> None:
        """Takes a report. Tokens beyond this coordinator's own in two consecutive reports are others' work."""
        self._take(report)
        others = max(0.0, float(report.waiting_tokens - self.prompt_tokens))
        self.others, self._others_seen = min(others, self._others_seen), others

    def add_flight(self, flight: Flight) -> None:
        """Counts a request as in flight."""
        self.flights[flight] = None
        self.prompt_tokens += flight.prompt_tokens
        self.uncached_tokens += flight.uncached_tokens
        self.horizon_tokens += flight.horizon_tokens

    def remove_flight(self, flight: Flight) -> None:
        """Removes a request whose prompt has been computed or will not be. Unknown requests are ignored."""
        if flight not in self.flights:
            return
        del self.flights[flight]
        self.prompt_tokens -= flight.prompt_tokens
        # Reset at empty, so that rounding errors do not accumulate.
        self.uncached_tokens = self.uncached_tokens - flight.uncached_tokens if self.flights else 0.0
        self.horizon_tokens = self.horizon_tokens - flight.horizon_tokens if self.flights else 0.0


@dataclass(eq=False, slots=True)
class DecodeLoad(_Load):
    """Load of a decode worker, with the requests in flight that hold KV there or are about to."""

    block_size: int = 1
    flights: dict[Flight, None] = field(default_factory=dict)
    context_tokens: int = 0
    expected: float = 0.0
    """Sum of the expected output tokens of the requests in flight."""
    targets_s: list[float] = field(default_factory=list)
    """The `tpot_slo_s` of the requests in flight, the least first."""
    computed: int = 0
    """Requests in flight whose KV is on the worker."""
    computed_context: int = 0
    """Sum of the context tokens of the `computed` requests."""
    other_requests: int = 0
    other_blocks: int = 0
    """Requests and blocks of other coordinators."""
    shared: float = 1.0
    """Held blocks over the blocks that the sequences would need without prefix sharing, LEAST_SHARED..1."""
    _seen: tuple[int, int, float] = (0, 0, 1.0)

    @property
    def measured_step_s(self) -> float:
        """Seconds of a step with the worker's present batch, by its latency model; 0 until it has measured."""
        return self.latency.present_step_s(self.report, self.block_size)

    @property
    def model(self) -> DecodeLatency | None:
        """The worker's latency model of a decode step, once it has measured one."""
        return self.latency.decode

    @property
    def total_blocks(self) -> int:
        """KV blocks on the worker."""
        return self.report.total_blocks

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens ahead of a prompt that the worker computes itself: the reported or the awaited ones, whichever
        are more, since a report may include awaited ones."""
        return max(self.report.waiting_tokens, self.awaited_tokens)

    @property
    def prompts_s(self) -> float:
        """Seconds to compute the prompts that wait on the worker."""
        return self.waiting_prompt_tokens / (
            self.latency.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
        )

    @property
    def streams(self) -> int:
        """Sequences in the worker's batch, those of other coordinators included."""
        return self.computed + self.other_requests

    @property
    def free_blocks(self) -> int:
        """KV blocks free for a new request: the reported ones (0 while reservations wait) less those sent since."""
        reported = 0 if self.report.waiting_reservations else self.report.free_blocks
        return reported + (-self.sent_tokens // self.block_size)

    @property
    def held_blocks(self) -> int:
        """KV blocks of running sequences and reservations, as reported."""
        return self.report.referenced_blocks + self.report.reserved_blocks

    @property
    def batch_requests(self) -> int:
        """Requests running or waiting: as reported, plus those sent since."""
        waiting = self.report.waiting_requests + self.report.waiting_reservations
        return self.report.running_requests + waiting + self.sent_requests

    @property
    def requests(self) -> int:
        """Requests in flight, those of other coordinators included."""
        return len(self.flights) + self.other_requests

    @property
    def blocks(self) -> float:
        """KV blocks in use or about to be."""
        return (self.context_tokens / self.block_size + len(self.flights)) * self.shared + self.other_blocks

    def on_report(self, report: registry_pb2.WorkerLoad) -> None:
        """Takes a report. Others' work counts only if two consecutive reports show it, since a report may cross a
        request on its way."""
        self._take(report)
        held = report.referenced_blocks + report.reserved_blocks + report.quarantined_blocks
        computed_blocks = self.computed_context / self.block_size
        own_blocks = self.context_tokens / self.block_size + len(self.flights)
        others = report.running_requests - len(self.flights)
        if report.HasField("streams"):  # running requests include prompts that are decoded on other workers
            others = min(others, report.streams - self.computed)
        requests, blocks = max(0, others), max(0, held - round(own_blocks))
        shared = min(1.0, max(held / computed_blocks, LEAST_SHARED)) if self.computed and held else 1.0
        seen, self._seen = self._seen, (requests, blocks, shared)
        self.other_requests, self.other_blocks = min(requests, seen[0]), min(blocks, seen[1])
        self.shared = max(shared, seen[2])

    def add_flight(self, flight: Flight) -> None:
        """Counts a request as in flight."""
        self.flights[flight] = None
        self.context_tokens += flight.context_tokens
        self.expected += flight.expected_output
        if flight.tpot_slo_s is not None:
            insort(self.targets_s, flight.tpot_slo_s)
        if flight.computed:
            self.computed += 1
            self.computed_context += flight.context_tokens

    def remove_flight(self, flight: Flight) -> None:
        """Removes a request that no longer holds KV. Unknown requests are ignored."""
        if flight not in self.flights:
            return
        del self.flights[flight]
        if flight.tpot_slo_s is not None:
            del self.targets_s[bisect_left(self.targets_s, flight.tpot_slo_s)]
        self.context_tokens -= flight.context_tokens
        self.expected = self.expected - flight.expected_output if self.flights else 0.0
        if flight.computed:
            self.computed -= 1
            self.computed_context -= flight.context_tokens

    def grow_flight(self, flight: Flight, tokens: int, first: bool) -> None:
        """Adds `tokens` output tokens, already in `flight.sent`. `first`: the prompt has just been computed, and
        `flight.computed` is set."""
        if flight not in self.flights:
            return
        self.context_tokens += tokens
        self.computed += first
        self.computed_context += flight.context_tokens if first else tokens

    def blocks_of(self, tokens: float) -> float:
        """Blocks that one sequence of `tokens` tokens needs, a partly filled last one included."""
        return tokens / self.block_size + 1


class WorkerLoads:
    """The load of every registered worker, by boot. A worker of role `both` has one of each kind."""

    def __init__(self) -> None:
        self.prefill: dict[WorkerKey, PrefillLoad] = {}
        self.decode: dict[WorkerKey, DecodeLoad] = {}
        self.changes: list[WorkerKey] = []
        """Boots whose report or sent requests changed, in order. Append-only; replaced by a new list when long."""

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> WorkerLoads:
        """The loads of these workers with their last reports."""
        loads = cls()
        for worker in workers:
            loads.take_role(worker)
            loads.on_report(worker.key, worker.load)
        return loads

    def take_role(self, worker: Worker) -> None:
        """Adds the loads for a boot's present role, when it registers and when its role changes. Requests in flight
        there stay."""
        key, slots = worker.key, worker.max_running_requests
        if worker.computes_prompts and key not in self.prefill:
            self.prefill[key] = PrefillLoad(key, slots)
        if worker.decodes and key not in self.decode:
            self.decode[key] = DecodeLoad(key, slots, block_size=worker.block_size_tokens)
        self._log_change(key)

    def remove(self, key: WorkerKey) -> None:
        """Removes a boot with everything in flight there. Unknown boots are ignored."""
        self.prefill.pop(key, None)
        self.decode.pop(key, None)

    def on_report(self, key: WorkerKey, report: registry_pb2.WorkerLoad) -> None:
        """Takes a worker's report, which must not be mutated later. Unknown boots are ignored."""
        loads = self._of(key)
        for load in loads:
            load.on_report(report)
        if loads:
            self._log_change(key)

    def reserve(
        self, flight: Flight, prefill: WorkerKey | None, decode: WorkerKey | None, *, local_tokens: float = 0
    ) -> None:
        """Keeps these workers' capacity for a request that admission starts, until it is routed. The decode worker is
        expected to compute `local_tokens` of the prompt itself."""
        flight.prefill, flight.decode = prefill, decode
        if (prefill_load := self._prefill_of(flight)) is not None:
            prefill_load.add_flight(flight)
        if (decode_load := self._decode_of(flight)) is not None:
            decode_load.add_flight(flight)
            if local_tokens:
                self._await_prompt(flight, decode_load, math.ceil(local_tokens))

    def route(
        self,
        flight: Flight,
        prefill: WorkerKey,
        decode: WorkerKey | None,
        uncached_tokens: int,
        *,
        local_tokens: int = 0,
    ) -> None:
        """Moves a request to the pair of its attempt. A worker of role `both` may be both `prefill` and `decode`.

        The prefill worker has to compute `uncached_tokens` of the prompt, unless the decode worker is expected to
        compute `local_tokens` of it itself. A further attempt computes the prompt again.
        """
        self.attempt_ended(flight)
        is_local = local_tokens > 0
        computes = prefill if not is_local else None
        if flight.computed or (flight.prefill, flight.decode) != (computes, decode):
            self._remove_flight(flight)
            flight.computed = False
            self.reserve(flight, computes, decode)
        if decode is not None:
            self.count_stream(decode, flight.context_tokens)
        if is_local:
            self._await_prompt(flight, self.decode.get(decode) if decode is not None else None, local_tokens)
        elif decode is None or decode == prefill:
            self.count_prompt(prefill, uncached_tokens)
        else:
            self._await_prompt(flight, self.prefill.get(prefill), uncached_tokens)

    def prompt_begun(self, flight: Flight, prefill: WorkerKey | None, uncached_tokens: int) -> None:
        """Notes that the decode worker has reserved KV, and that the prompt goes to this prefill worker now; None: the
        decode worker computes it itself."""
        load = flight.awaited_by
        if prefill is None:
            if isinstance(load, PrefillLoad):
                self.attempt_ended(flight)
            if flight.prefill != flight.decode:  # unless a worker of role `both` computes it, as reserved
                self._leave_prefill(flight)
        elif load is not None:
            self.attempt_ended(flight)
            if flight.prefill != prefill:
                flight.prefill = prefill
                if (prefill_load := self.prefill.get(prefill)) is not None:
                    prefill_load.add_flight(flight)
            self.count_prompt(prefill, uncached_tokens)

    def output(self, flight: Flight, tokens: int) -> bool:
        """Counts output tokens that were sent. Returns whether they are the first, which frees capacity for prompts."""
        first = not flight.computed
        if first:
            self.attempt_ended(flight)
            self._leave_prefill(flight)
            flight.computed = True
        flight.sent += tokens
        if (load := self._decode_of(flight)) is not None:
            load.grow_flight(flight, tokens, first)
        return first

    def decoded(self, flight: Flight) -> None:
        """Removes the request from its decode worker, which holds nothing for it any more."""
        if (load := self._decode_of(flight)) is not None:
            load.remove_flight(flight)
        flight.decode = None

    def attempt_ended(self, flight: Flight) -> None:
        """Stops counting the prompt as awaited by a worker. Idempotent."""
        if (load := flight.awaited_by) is not None:
            load.awaited_tokens -= flight.awaited_tokens
            flight.awaited_by, flight.awaited_tokens = None, 0
            self._log_change(load.key)

    def ended(self, flight: Flight) -> None:
        """Removes a request that is over from all workers. Idempotent."""
        self.attempt_ended(flight)
        self._remove_flight(flight)

    def count_prompt(self, key: WorkerKey, tokens: int) -> None:
        """Counts a prompt with `tokens` to compute as sent, until the next report. Ignores boots that are unknown or
        compute no prompts."""
        self._count(key, self.prefill.get(key), tokens)

    def count_stream(self, key: WorkerKey, tokens: int) -> None:
        """Counts a request of `tokens` prompt tokens as sent to its decode worker, until the next report. Ignores boots
        that are unknown or do not decode."""
        self._count(key, self.decode.get(key), tokens)

    def _await_prompt(self, flight: Flight, load: PrefillLoad | DecodeLoad | None, tokens: int) -> None:
        self.attempt_ended(flight)
        if load is not None:
            flight.awaited_by, flight.awaited_tokens = load, tokens
            load.awaited_tokens += tokens
            self._log_change(load.key)

    def _remove_flight(self, flight: Flight) -> None:
        self._leave_prefill(flight)
        self.decoded(flight)

    def _leave_prefill(self, flight: Flight) -> None:
        if (load := self._prefill_of(flight)) is not None:
            load.remove_flight(flight)
        flight.prefill = None

    def _prefill_of(self, flight: Flight) -> PrefillLoad | None:
        return None if flight.prefill is None else self.prefill.get(flight.prefill)

    def _decode_of(self, flight: Flight) -> DecodeLoad | None:
        return None if flight.decode is None else self.decode.get(flight.decode)

    def _of(self, key: WorkerKey) -> list[PrefillLoad | DecodeLoad]:
        return [load for load in (self.prefill.get(key), self.decode.get(key)) if load is not None]

    def _count(self, key: WorkerKey, load: PrefillLoad | DecodeLoad | None, tokens: int) -> None:
        if load is not None:
            load.sent_requests += 1
            load.sent_tokens += tokens
            self._log_change(key)

    def _log_change(self, key: WorkerKey) -> None:
        if len(self.changes) >= MAX_CHANGES:
            self.changes = []
        self.changes.append(key)
