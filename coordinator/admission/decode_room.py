"""Whether the decode workers have room for one more request, by their load when its prompt will reach them. Pure.

KV for the prompt must be free now, for it is reserved before the prompt is computed. Beyond that the decision is on the
load that is predicted, not on the present one: admitting by present load lets one pool idle while the other is
flooded, by turns (Qin et al., "Mooncake", section on early rejection based on prediction). Predicted are

- the peak of KV, as all sequences grow and end: with sequences in order of the output they have left, longest first,
  it is the largest sum of the contexts of the first i plus i times what the i-th has left (Gong et al., "Past-Future
  Scheduler", ASPLOS 2025);
- the step time at the moment when the prompt arrives, from the worker's own fit of its steps, against a bound.

Most questions are answered by upper bounds that cost nothing; sequences are walked only near the limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.admission.entry import CLASSES, RANK, Entry
from coordinator.caller import PriorityClass
from coordinator.pools import Worker, WorkerKey
from coordinator.route_scores import DEFAULT_STEP_S
from splitserve.v1 import registry_pb2

SEEN_LATELY_S = 30.0
LEAST_SHARED = 0.05
"""However much of their prompts sequences share, each of them counts for so much of its own."""


@dataclass(eq=False, slots=True)
class DecodeLane:
    """One worker and the requests that hold, or are about to hold, KV there."""

    key: WorkerKey
    slots: int
    block_size: int
    total_blocks: int = 0
    step_s: float = DEFAULT_STEP_S
    measured: bool = False
    fit: registry_pb2.DecodeStepFit | None = None
    entries: dict[Entry, None] = field(default_factory=dict)
    context_tokens: int = 0
    expected: float = 0.0
    """Sum of the whole outputs that are expected of the entries."""
    computed: int = 0
    """Entries whose prompt is there, and their context."""
    computed_context: int = 0
    other_requests: int = 0
    other_blocks: int = 0
    """Load that was not sent from here."""
    shared: float = 1.0
    """Blocks that the worker really holds for each one that its sequences would need alone: prefixes are shared."""
    _seen: tuple[int, int, float] = (0, 0, 1.0)

    @property
    def requests(self) -> int:
        """Requests there, those of other coordinators too."""
        return len(self.entries) + self.other_requests

    @property
    def blocks(self) -> float:
        """KV blocks in use, or about to be."""
        own = self.context_tokens / self.block_size + len(self.entries)
        return own * self.shared + self.other_blocks

    def hear(self, worker: Worker) -> None:
        """Takes a load report. What two in a row show is believed: one may cross with what is on its way."""
        load = worker.load
        self.total_blocks = load.total_blocks
        self.measured = load.decode_step_ms > 0
        self.step_s = load.decode_step_ms / 1e3 or DEFAULT_STEP_S
        self.fit = load.step_fit if load.HasField("step_fit") else None
        held = load.referenced_blocks + load.reserved_blocks + load.quarantined_blocks
        there = self.computed_context / self.block_size
        whole = self.context_tokens / self.block_size + len(self.entries)
        requests, blocks, shared = (
            max(0, load.running_requests - len(self.entries)),
            max(0, held - round(whole)),
            min(1.0, max(held / there, LEAST_SHARED)) if self.computed and held else 1.0,
        )
        self.other_requests = min(requests, self._seen[0])
        self.other_blocks = min(blocks, self._seen[1])
        self.shared = max(shared, self._seen[2])
        self._seen = requests, blocks, shared

    def take(self, entry: Entry) -> None:
        """Counts an entry as sent there."""
        self.entries[entry] = None
        self.context_tokens += entry.context_tokens
        self.expected += entry.expected_output
        if entry.computed:
            self.computed += 1
            self.computed_context += entry.context_tokens

    def give_back(self, entry: Entry) -> None:
        """It holds nothing there any more."""
        if entry not in self.entries:
            return
        del self.entries[entry]
        self.context_tokens -= entry.context_tokens
        self.expected = self.expected - entry.expected_output if self.entries else 0.0
        if entry.computed:
            self.computed -= 1
            self.computed_context -= entry.context_tokens

    def grown(self, entry: Entry, tokens: int, first: bool) -> None:
        """So many tokens were sent, `entry.sent` says it already; `first`: `entry.computed` has just become true."""
        if entry not in self.entries:
            return
        self.context_tokens += tokens
        self.computed += first
        self.computed_context += entry.context_tokens if first else tokens

    def blocks_of(self, tokens: float) -> float:
        """Blocks for so many tokens of one sequence, the last one partly filled."""
        return tokens / self.block_size + 1


@dataclass(frozen=True, slots=True)
class NoDecodeRoom:
    """Why no worker has room. `smaller_may_fit`: a shorter prompt might."""

    smaller_may_fit: bool


class DecodeRoom:
    """The lanes of one model."""

    def __init__(self, tpot_slo_s: float | None, headroom: float) -> None:
        self.lanes: dict[WorkerKey, DecodeLane] = {}
        self._tpot_slo_s = tpot_slo_s
        self._headroom = headroom
        self._seen_s: dict[PriorityClass, float] = {}

    def renew(self, workers: Iterable[Worker]) -> None:
        """Sets which workers there are; known ones keep what they have."""
        before, self.lanes = self.lanes, {}
        for worker in workers:
            lane = before.get(worker.key)
            if lane is None:
                lane = DecodeLane(worker.key, worker.max_running_requests, worker.block_size_tokens)
            if not lane.total_blocks:
                lane.hear(worker)
            self.lanes[worker.key] = lane

    def saw(self, priority_class: PriorityClass, now: float) -> None:
        """A request of this class has come."""
        self._seen_s[priority_class] = now

    def fit(self, entry: Entry, prefill_s: float, now: float) -> DecodeLane | NoDecodeRoom:
        """The least busy worker with room for an entry whose prompt reaches it `prefill_s` from now."""
        kept = self._kept_from(entry.priority_class, now)
        smaller_may_fit = False
        for lane in sorted(self.lanes.values(), key=_busy) if len(self.lanes) > 1 else self.lanes.values():
            if not lane.requests or lane.blocks_of(entry.prompt_tokens) > lane.total_blocks:
                return lane  # alone it has the best place there is; what never fits is the worker's to refuse
            if lane.requests + 1 > max(1.0, lane.slots * (1 - kept)):
                continue
            if not self._keeps_pace(lane, entry, prefill_s):
                continue
            if self._has_blocks(lane, entry, kept):
                return lane
            smaller_may_fit = True
        return NoDecodeRoom(smaller_may_fit)

    def batch_limit(self, lane: DecodeLane, context: float, output: float) -> float:
        """How many sequences of so much context, and so many tokens to come, the worker takes at most."""
        limit = min(lane.slots, lane.total_blocks / lane.blocks_of(context + output / 2) / lane.shared)
        if self._tpot_slo_s is not None and lane.fit is not None:
            each_ms = lane.fit.sequence_ms + lane.fit.context_token_ms * context
            if each_ms > 0:
                limit = min(limit, (self._tpot_slo_s * 1e3 - lane.fit.base_ms) / each_ms)
        return max(1.0, limit)

    def _kept_from(self, priority_class: PriorityClass, now: float) -> float:
        higher = CLASSES[: RANK[priority_class]]
        lately = any(now - self._seen_s.get(name, -SEEN_LATELY_S) < SEEN_LATELY_S for name in higher)
        return self._headroom if lately else 0.0

    def _has_blocks(self, lane: DecodeLane, entry: Entry, kept: float) -> bool:
        # As the engine: newcomers leave a block for each sequence, or one in a hundred.
        spare = max(lane.requests + 1, lane.total_blocks // 100)
        room = lane.total_blocks * (1 - kept) - spare - lane.other_blocks
        if lane.blocks - lane.other_blocks + lane.blocks_of(entry.prompt_tokens) > room:
            return False
        # What is left of an output is at most its expected length.
        most = lane.context_tokens + entry.prompt_tokens + lane.expected + entry.expected_output
        if most / lane.block_size * lane.shared <= room:
            return True
        return _peak_tokens([*lane.entries, entry]) / lane.block_size * lane.shared <= room

    def _keeps_pace(self, lane: DecodeLane, entry: Entry, prefill_s: float) -> bool:
        """Whether steps stay below the bound when the prompt arrives."""
        bound_s = self._tpot_slo_s
        if bound_s is None or lane.fit is None:
            return True
        fit = lane.fit

        def step_s(requests: int, context: float) -> float:
            return (fit.base_ms + fit.sequence_ms * requests + fit.context_token_ms * context) / 1e3

        count, context = lane.requests + 1, lane.context_tokens + entry.prompt_tokens
        if step_s(count, context) <= bound_s:
            return True
        steps = prefill_s / max(lane.step_s, 1e-4)
        ended = [other for other in lane.entries if other.computed and other.remaining_output <= steps]
        count -= len(ended)
        context -= sum(other.context_tokens for other in ended)
        return count == 1 or step_s(count, context) <= bound_s


def _busy(lane: DecodeLane) -> float:
    return lane.requests / lane.slots


def _peak_tokens(entries: list[Entry]) -> float:
    """The most KV tokens that the sequences hold together until all have ended, each growing by one a step."""
    peak = held = 0.0
    for count, entry in enumerate(sorted(entries, key=_remaining, reverse=True), start=1):
        held += entry.context_tokens
        peak = max(peak, held + count * entry.remaining_output)
    return peak


def _remaining(entry: Entry) -> float:
    return entry.remaining_output
