"""The load of one worker: its last report, this coordinator's requests in flight there, and everyone else's share.

A report does not include requests still on their way, and it does include those of other coordinators. Hence two views:

- for choosing a pair: the report plus what was sent since (`queued_tokens`, `free_blocks`, `batch_requests`);
- for forecasts: each request in flight, plus what reports show beyond those (`others`, `other_blocks`).
No clock: `now` is an argument, in seconds on the coordinator's monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from coordinator.workers.snapshot import WorkerKey
from splitserve.v1 import registry_pb2

DEFAULT_PREFILL_TOKENS_PER_S = 2_000.0
"""Assumed until a worker of the pool has reported a measured rate."""
DEFAULT_STEP_S = 0.02
"""The same for the duration of a decode step."""
LEAST_SHARED = 0.05
"""Lower bound of `DecodeLoad.shared`: a sequence always counts for at least this fraction of its own blocks."""
_OUTLIVED_SHARE = 0.5
"""Of the expected output: what a sequence that has outlived its estimate is expected to produce still."""


@dataclass(eq=False, slots=True, kw_only=True)
class Flight:
    """One request in flight, as a load on its workers. Compared by identity."""

    prompt_tokens: int
    uncached_tokens: float
    """Prompt tokens expected to be missing from the prefix cache, or computed sooner than read from below it."""
    read_s: float = 0.0
    """Seconds for which the others are read before, beside what the worker computes."""
    expected_output: float
    max_output: int
    tpot_slo_s: float | None = None
    """The target of its time per output token."""
    due_s: float = float("inf")
    """When its first token is due; infinity: it has no target."""
    sent: int = 0
    """Output tokens so far."""
    computed: bool = False
    """Whether its prompt has been computed, that is, its first token was sent."""
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    """The workers whose load includes it."""

    @property
    def context_tokens(self) -> int:
        """Tokens of KV that it holds on its decode worker."""
        return self.prompt_tokens + self.sent

    @property
    def remaining_output(self) -> float:
        """Output tokens still expected. A request past its estimate is expected to run on for half of the estimate."""
        left = self.expected_output - self.sent
        if left < 1.0:
            left = _OUTLIVED_SHARE * self.expected_output
        return max(0.0, min(left, self.max_output - self.sent))

    def begin_by_s(self, rate: float) -> float:
        """When a worker of so many prompt tokens per second has to begin with it at the latest for it to be in time."""
        return self.due_s - self.uncached_tokens / rate


@dataclass(eq=False, slots=True)
class _Load:
    """What prefill and decode loads have in common."""

    key: WorkerKey
    slots: int
    """Requests that the worker runs concurrently, at most."""
    report: registry_pb2.WorkerLoad = field(default_factory=registry_pb2.WorkerLoad)
    """The last report; empty before the first."""
    sent_requests: int = 0
    sent_tokens: int = 0
    """Requests and prompt tokens that this coordinator sent since the last report, which may not include them."""
    expected_tokens: int = 0
    """Prompt tokens that it is to compute: of a prefill worker those of requests that still wait for a reservation on
    decode, which no report includes; of a decode worker those that it was granted and has not computed yet."""


@dataclass(eq=False, slots=True)
class PrefillLoad(_Load):
    """Load of a prefill worker, with the requests in flight there that have no first token yet. The caller decides
    which prompts are long; see `coordinator.admission.prefill_capacity`."""

    others: float = 0.0
    """Waiting prompt tokens of other coordinators."""
    host_peer: DecodeLoad | None = None
    """The decode worker of its host pair; see `LoadLedger`."""
    own_decode: DecodeLoad | None = None
    """The load of its own streams, if it is neutral."""
    short: dict[Flight, None] = field(default_factory=dict)
    long: dict[Flight, None] = field(default_factory=dict)
    late: dict[Flight, None] = field(default_factory=dict)
    """Those that cannot be in time, where the worker orders prompts: it serves them after all that can."""
    orders_prompts: bool = False
    short_tokens: float = 0.0
    late_tokens: float = 0.0
    prompt_tokens: int = 0
    long_until_s: float = 0.0
    """When the last long prompt is predicted to finish if nothing else runs beside it."""
    late_from_s: float = float("inf")
    """When the first of the others will be late, at the earliest."""
    _others_seen: float = 0.0

    @property
    def measured_rate(self) -> float:
        """Prompt tokens per second as measured by the worker, or else by its host peer; 0 until one has measured."""
        peer = self.host_peer or self
        return self.report.prefill_tokens_per_second or peer.report.prefill_tokens_per_second

    @property
    def rate(self) -> float:
        """Prompt tokens per second, or the default until measured."""
        return self.measured_rate or DEFAULT_PREFILL_TOKENS_PER_S

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens ahead of a new request: reported as waiting, sent since, and expected."""
        return self.report.waiting_tokens + self.sent_tokens + self.expected_tokens

    @property
    def requests(self) -> int:
        """Number of requests in flight that have no first token yet."""
        return len(self.short) + len(self.long) + len(self.late)

    def backlog_s(self, now: float) -> float:
        """Seconds of work ahead of a new request."""
        long_s = max(0.0, self.long_until_s - now) if self.long else 0.0
        return (self.short_tokens + self.others) / self.rate + long_s

    def on_report(self, report: registry_pb2.WorkerLoad) -> None:
        """Takes a report. Tokens beyond this coordinator's own, seen in two reports in a row, are others' work."""
        self.report, self.sent_requests, self.sent_tokens = report, 0, 0
        beyond = max(0.0, float(report.waiting_tokens - self.prompt_tokens))
        self.others, self._others_seen = min(beyond, self._others_seen), beyond

    def add_flight(self, flight: Flight, is_long: bool, now: float, helpers: int = 0) -> None:
        """Counts a request as in flight. So many others (`helpers`) compute long prompts in its place."""
        self.prompt_tokens += flight.prompt_tokens
        if self.will_be_late(flight, now):
            self._add_late(flight)
            return
        if self.orders_prompts:
            self.late_from_s = min(self.late_from_s, self.begin_by_s(flight))
        if is_long:
            begin_s = max(now, self.long_until_s) if self.long else now
            self.long[flight] = None
            self.long_until_s = begin_s + flight.uncached_tokens / self.rate / (1 + helpers)
        else:
            self.short[flight] = None
            self.short_tokens += flight.uncached_tokens

    def will_be_late(self, flight: Flight, now: float) -> bool:
        """Whether a prompt could not be in time if its worker began with it now, and goes last there."""
        return self.orders_prompts and now >= self.begin_by_s(flight)

    def set_late_aside(self, now: float) -> None:
        """Keeps those that cannot be in time any more apart from those that newcomers wait for."""
        if now < self.late_from_s:
            return
        self.late_from_s = float("inf")
        begun = next(iter(self.long or self.short), None)  # what the worker computes, most likely
        for flight in [*self.short, *self.long]:
            late_s = flight.due_s if flight is begun else self.begin_by_s(flight)
            if now >= late_s:
                self._remove_timely(flight)
                self._add_late(flight)
            else:
                self.late_from_s = min(self.late_from_s, late_s)

    def remove_flight(self, flight: Flight) -> None:
        """Removes a request whose prompt has been computed or is no longer wanted. Unknown requests are ignored."""
        if flight in self.late:
            del self.late[flight]
            self.late_tokens = self.late_tokens - flight.uncached_tokens if self.late else 0.0
        elif not self._remove_timely(flight):
            return
        self.prompt_tokens -= flight.prompt_tokens

    def begin_by_s(self, flight: Flight) -> float:
        """When the worker has to begin with a prompt at the latest for it to be in time."""
        return flight.begin_by_s(self.rate)

    def _add_late(self, flight: Flight) -> None:
        self.late[flight] = None
        self.late_tokens += flight.uncached_tokens

    def _remove_timely(self, flight: Flight) -> bool:
        if flight in self.short:
            del self.short[flight]
            self.short_tokens = self.short_tokens - flight.uncached_tokens if self.short else 0.0
        elif flight in self.long:
            del self.long[flight]
        else:
            return False
        return True


@dataclass(eq=False, slots=True)
class DecodeLoad(_Load):
    """Load of a decode worker, with the requests in flight that hold KV there or are about to."""

    block_size: int = 1
    flights: dict[Flight, None] = field(default_factory=dict)
    context_tokens: int = 0
    expected: float = 0.0
    """Sum of the expected output tokens of the requests in flight."""
    host_peer: PrefillLoad | None = None
    """The prefill worker of its host pair; see `LoadLedger`."""
    targets_s: list[float] = field(default_factory=list)
    """Their `tpot_slo_s`, the least first."""
    computed: int = 0
    """Requests in flight whose KV is on the worker."""
    computed_context: int = 0
    """Sum of their context tokens."""
    other_requests: int = 0
    other_blocks: int = 0
    """Load from other coordinators."""
    shared: float = 1.0
    """Blocks held per block that the sequences would need without prefix sharing, LEAST_SHARED..1."""
    _seen: tuple[int, int, float] = (0, 0, 1.0)

    @property
    def measured_step_s(self) -> float:
        """Seconds per step as measured by the worker; 0 until it has measured."""
        return self.report.decode_step_ms / 1e3

    @property
    def step_s(self) -> float:
        """Seconds per step, or the default until measured."""
        return self.report.decode_step_ms / 1e3 or DEFAULT_STEP_S

    @property
    def fit(self) -> registry_pb2.DecodeStepFit | None:
        """The worker's model of step time by batch, once it has fitted one."""
        return self.report.step_fit if self.report.HasField("step_fit") else None

    @property
    def total_blocks(self) -> int:
        """KV blocks on the worker."""
        return self.report.total_blocks

    @property
    def prompts_s(self) -> float:
        """Seconds of prompts ahead of one that is computed here, where all are: as reported, and sent since."""
        rate = self.report.prefill_tokens_per_second or DEFAULT_PREFILL_TOKENS_PER_S
        return (self.report.waiting_tokens + self.sent_tokens) / rate

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens ahead of one that is computed here: as reported, or granted, which a report may include."""
        return max(self.report.waiting_tokens, self.expected_tokens)

    @property
    def streams(self) -> int:
        """Sequences in its batch: its own are known at once; without admission all count as others'."""
        return self.computed + self.other_requests

    @property
    def has_host(self) -> bool:
        """Whether it has all cores of its host: its peer lends its own, and has neither prompts nor streams."""
        peer = self.host_peer
        if peer is None or peer.queued_tokens or (peer.own_decode and peer.own_decode.batch_requests):
            return False
        return min(self.report.lent_speedup, peer.report.lent_speedup) > 0

    @property
    def free_blocks(self) -> int:
        """KV blocks free for a newcomer: the reported ones, unless reservations wait; less what was sent since."""
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
        """Takes a report. Only what two reports in a row show is believed: one may cross a request on its way."""
        self.report, self.sent_requests, self.sent_tokens = report, 0, 0
        held = report.referenced_blocks + report.reserved_blocks + report.quarantined_blocks
        computed_blocks = self.computed_context / self.block_size
        own_blocks = self.context_tokens / self.block_size + len(self.flights)
        others = report.running_requests - len(self.flights)
        if report.HasField("streams"):  # the others may have prompts in the batch that they decode elsewhere
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
        """Removes a request that holds no KV any more. Unknown requests are ignored."""
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
        """Accounts for `tokens` more output tokens, already in `flight.sent`. `first`: the prompt has just been
        computed, and `flight.computed` is set."""
        if flight not in self.flights:
            return
        self.context_tokens += tokens
        self.computed += first
        self.computed_context += flight.context_tokens if first else tokens

    def blocks_of(self, tokens: float) -> float:
        """Blocks that one sequence of `tokens` tokens needs, a partly filled last one included."""
        return tokens / self.block_size + 1
