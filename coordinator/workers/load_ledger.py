"""The load of every registered worker: the one account that routing and admission read.

The registry reports boots, removals and load reports; the pair selector, what it sends; admission adds and removes
requests in flight. No clock.

A *host pair* is a prefill and a decode worker of one model, pinned or leaning there, that have their host to
themselves. Its loads know of each other: where they lend each other cores, they compute as one (decision 92).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from coordinator.workers.load import DecodeLoad, PrefillLoad
from coordinator.workers.snapshot import PoolName, Worker, WorkerKey
from splitserve.v1 import registry_pb2

MAX_CHANGES = 2**16
"""Length at which the list of changes is replaced by an empty one."""


class ExpectedPrompt:
    """A prompt that a worker is to compute: on a prefill worker it waits for its reservation on decode."""

    __slots__ = ("_counts", "_ledger", "_load", "_tokens")

    def __init__(self, ledger: LoadLedger, load: PrefillLoad | DecodeLoad, tokens: int) -> None:
        self._ledger, self._load, self._tokens, self._counts = ledger, load, tokens, True

    def grow(self, tokens: int) -> None:
        """So many tokens more are to be computed there."""
        self._tokens += tokens
        if self._counts:
            self._ledger.release_expected(self._load, -tokens)

    def suspend(self) -> None:
        """Another worker is thought to compute it: it does not count, unless it begins here after all."""
        if self._counts:
            self._ledger.release_expected(self._load, self._tokens)
        self._counts = False

    def begin(self) -> None:
        """The prefill worker is called now: counts the prompt as sent, until the next report."""
        if tokens := self._tokens:
            self.withdraw()
            self._ledger.count_prompt(self._load.key, tokens)

    def withdraw(self) -> None:
        """The prompt will not be sent, or has been. Idempotent."""
        tokens, self._tokens = self._tokens, 0
        if self._counts:
            self._ledger.release_expected(self._load, tokens)


class LoadLedger:
    """Loads by worker boot. Derived data follows `changes`; see `coordinator.routing.worker_columns`."""

    def __init__(self) -> None:
        self.prefill: dict[WorkerKey, PrefillLoad] = {}
        self.decode: dict[WorkerKey, DecodeLoad] = {}
        self._hosts: defaultdict[str, dict[WorkerKey, Worker]] = defaultdict(dict)
        """Boots by `Worker.host_id`, as they registered, with the pool that they lean to now."""
        self._host_of: dict[WorkerKey, str] = {}
        self.changes: list[WorkerKey] = []
        """Boots whose report or sent requests changed, in order. Append-only; replaced by a new list when long."""

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> LoadLedger:
        """A ledger of these workers with their last reports."""
        ledger = cls()
        for worker in workers:
            ledger.add(worker)
            ledger.on_report(worker.key, worker.load)
        return ledger

    def add(self, worker: Worker) -> None:
        """Adds a boot that has registered, with nothing in flight."""
        key, slots = worker.key, worker.max_running_requests
        if worker.computes_prompts:
            self.prefill[key] = PrefillLoad(key, slots, orders_prompts=worker.paces_prompts)
        if worker.decodes:
            self.decode[key] = DecodeLoad(key, slots, block_size=worker.block_size_tokens)
        if worker.neutral:
            self.prefill[key].own_decode = self.decode[key]
        if host := worker.host_id:
            self._hosts[host][key], self._host_of[key] = worker, host
            self._pair_up(host)
        self._log_change(key)

    def remove(self, key: WorkerKey) -> None:
        """Removes a boot with everything in flight there. Unknown boots are ignored."""
        self.prefill.pop(key, None)
        self.decode.pop(key, None)
        if (host := self._host_of.pop(key, None)) is not None:
            del self._hosts[host][key]
            self._pair_up(host)

    def lean(self, key: WorkerKey, pool: PoolName) -> None:
        """A neutral worker leans there from now on. Unknown boots are ignored."""
        if (host := self._host_of.get(key)) is not None:
            self._hosts[host][key] = replace(self._hosts[host][key], pool=pool)
            self._pair_up(host)

    def on_report(self, key: WorkerKey, report: registry_pb2.WorkerLoad) -> None:
        """Takes a worker's report, which must not be mutated later. Unknown boots are ignored."""
        loads = self._of(key)
        for load in loads:
            load.on_report(report)
        if loads:
            self._log_change(key)

    def count_prompt(self, key: WorkerKey, tokens: int) -> None:
        """Counts a prompt of which `tokens` are to be computed as sent, until the next report. Boots that are unknown
        or compute none are ignored."""
        self._count(key, self.prefill.get(key), tokens)

    def grow_prompt(self, key: WorkerKey, tokens: int) -> None:
        """So many tokens more of a prompt that was counted as sent are to be computed. Unknown boots are ignored."""
        if (load := self.prefill.get(key)) is not None:
            load.sent_tokens += tokens
            self._log_change(key)

    def count_stream(self, key: WorkerKey, tokens: int) -> None:
        """Counts a request of `tokens` prompt tokens as sent to where it is decoded, until the next report. Boots that
        are unknown or do not decode are ignored."""
        self._count(key, self.decode.get(key), tokens)

    def expect(self, key: WorkerKey, tokens: int) -> ExpectedPrompt | None:
        """Counts a prompt that goes to a prefill worker once decode has room. None for an unknown boot."""
        return self._expect(self.prefill.get(key), tokens)

    def expect_locally(self, key: WorkerKey, tokens: int) -> ExpectedPrompt | None:
        """Counts a prompt that a decode worker was granted to compute itself. None for an unknown boot."""
        return self._expect(self.decode.get(key), tokens)

    def expects(self, key: WorkerKey) -> bool:
        """Whether prompts go there once decode has room."""
        return any(load.expected_tokens > 0 for load in self._of(key))

    def release_expected(self, load: PrefillLoad | DecodeLoad, tokens: int) -> None:
        """Takes `tokens` off a worker's expected tokens."""
        load.expected_tokens -= tokens
        self._log_change(load.key)

    def in_host_pair(self, decode: WorkerKey | None) -> bool:
        """Whether this decode worker is one of a host pair."""
        load = None if decode is None else self.decode.get(decode)
        return load is not None and load.host_peer is not None

    def _pair_up(self, host: str) -> None:
        """Tells the loads of a host whether they are those of a host pair."""
        there = self._hosts[host]
        if not there:
            del self._hosts[host]
        sides = {worker.pool: key for key, worker in there.items()}
        models = {worker.model.name for worker in there.values()}
        is_pair = len(there) == len(sides) == 2 and len(models) == 1
        for key in there:
            if (prefill := self.prefill.get(key)) is not None:
                is_side = is_pair and key == sides["prefill"]
                prefill.host_peer = self.decode[sides["decode"]] if is_side else None
            if (decode := self.decode.get(key)) is not None:
                is_side = is_pair and key == sides["decode"]
                decode.host_peer = self.prefill[sides["prefill"]] if is_side else None

    def _expect(self, load: PrefillLoad | DecodeLoad | None, tokens: int) -> ExpectedPrompt | None:
        if load is None:
            return None
        load.expected_tokens += tokens
        self._log_change(load.key)
        return ExpectedPrompt(self, load, tokens)

    def _of(self, key: WorkerKey) -> list[PrefillLoad | DecodeLoad]:
        """Both loads of a neutral worker, which has one report for both."""
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
