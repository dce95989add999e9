"""The order of one tenant's queued prompts where first tokens have targets: triage, as in the engine. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from coordinator.admission.entry import Entry
from coordinator.admission.prefill_capacity import PrefillPace
from engine.pacing.triage import Job, OldestTurn, triage

TRIAGED = 128
"""Prompts of a priority that may still be in time and are told apart; likewise late ones, the smallest."""
RENEWED_S = 0.01
"""An order holds for this long, unless a prompt comes."""
_EACH_S = 20e-6
"""It holds for this long for each prompt beyond `TRIAGED` in any case: an order costs time in proportion to them."""
_KEPT = 2.0
"""Prompts that have this multiple of the least target to spare let late ones go first."""


class PromptOrder:
    """Orders the entries of one tenant and class: streams that go on, then by priority, then by triage.

    Triage (`engine.pacing.triage`) decides by due time and by what prompts take at the tenant's share of the prefill
    pool. Those that are late whatever comes first are set aside, so that they keep no place among the `TRIAGED`. They
    and those without a due time are served by size; the oldest of them is owed a tenth of the prompt tokens, and
    goes first when it is owed all of its own. So a prompt of n tokens waits behind those in time for 10 n of the
    tenant's tokens, and then for the older ones.
    """

    def __init__(self) -> None:
        self._turn: OldestTurn[Entry] = OldestTurn(math.inf)
        self._oldest: Entry | None = None
        self._order: list[Entry] = []
        self._late: frozenset[Entry] = frozenset()
        self._made_s = -math.inf
        self._changed = True

    def of(self, entries: Sequence[Entry], pace: PrefillPace) -> Iterator[Entry]:
        """The first `TRIAGED` entries or more in order of service; `entries` are sorted by `Entry.order`."""
        if self._is_due(len(entries), pace.now):
            self._make(entries, pace)
        waiting = [entry for entry in self._order if entry.waits]
        if not waiting:
            self._make(entries, pace)
            waiting = self._order
        yield from waiting

    def before(self, newcomer: Entry, entries: Sequence[Entry], pace: PrefillPace) -> list[Entry]:
        """The entries that go before a newcomer that is to be added to them: all, unless its place is known.

        Where those that would be late are refused, whoever was let in was promised to be in time. If one of them is
        late now, a newcomer that can be refused counts as coming after all.
        """
        ranked = sorted((*entries, newcomer), key=lambda entry: entry.order)
        self._make(ranked, pace)
        broken = newcomer.ttft_slo_s is not None and any(each.ttft_slo_s is not None for each in self._late)
        if broken or newcomer not in self._order:
            return list(entries)
        return self._order[: self._order.index(newcomer)]

    def is_late(self, entry: Entry) -> bool:
        """Whether an entry misses its target in the latest order."""
        return entry in self._late

    def added(self, entry: Entry) -> None:
        """An entry came."""
        self._changed = entry not in self._order

    def started(self, entry: Entry) -> None:
        """The prompt of an entry was sent to a worker."""
        self._turn.computed({entry: math.ceil(entry.uncached_tokens)})
        self._changed |= entry is self._oldest

    def _is_due(self, entries: int, now: float) -> bool:
        age_s = now - self._made_s
        return (self._changed or age_s >= RENEWED_S) and age_s >= _EACH_S * (entries - TRIAGED)

    def _make(self, entries: Sequence[Entry], pace: PrefillPace) -> None:
        self._made_s, self._changed, self._order, self._oldest = pace.now, False, [], None
        self._late = frozenset()
        ahead_s = pace.ahead_s
        for _, group in groupby(entries, key=lambda entry: entry.order[:-1]):
            members = list(group)
            if all(entry.due_s == math.inf for entry in members):
                self._order += members
            else:
                self._order += self._triaged(members, pace, ahead_s)
            if len(self._order) >= TRIAGED:
                break
            ahead_s += sum(entry.uncached_tokens for entry in members) * pace.pool_token_s
        if self._oldest is None:
            self._turn.of(None)

    def _triaged(self, members: Sequence[Entry], pace: PrefillPace, ahead_s: float) -> list[Entry]:
        possible: list[Entry] = []
        aside: list[Entry] = []
        for entry in members:
            end_s = pace.now + entry.read_s + entry.uncached_tokens * pace.worker_token_s
            (possible if end_s < entry.due_s < math.inf else aside).append(entry)
        shown = possible[:TRIAGED]
        if aside:
            smallest = heapq.nsmallest(
                TRIAGED, aside, key=lambda entry: (entry.uncached_tokens, entry.number)
            )
            shown += smallest if aside[0] in smallest else [*smallest, aside[0]]
        found = triage((_job(entry, pace) for entry in shown), ahead_s, _KEPT * _least_target_s(shown, pace))
        order, oldest = list(found.order), found.oldest_behind
        self._late |= found.late
        if self._oldest is None and oldest is not None:
            self._oldest = oldest
            if self._turn.of(oldest, math.ceil(oldest.uncached_tokens)):
                order.remove(oldest)
                order.insert(0, oldest)
        return order


def _least_target_s(entries: Sequence[Entry], pace: PrefillPace) -> float:
    """The least target among those that their prompt could keep, were it alone; infinity: there is none."""
    kept = (
        entry.due_s - entry.arrived_s
        for entry in entries
        if entry.read_s + entry.uncached_tokens * pace.worker_token_s
        <= entry.due_s - entry.arrived_s
        < math.inf
    )
    return min(kept, default=math.inf)


def _job(entry: Entry, pace: PrefillPace) -> Job[Entry]:
    """The pool computes one prompt after the other; with several workers each ends later than its part of the work, and
    one that is read for begins later. Where answers wait for places, each takes one, whatever its prompt's length."""
    work_s = entry.uncached_tokens * pace.pool_token_s
    alone_s = entry.read_s + max(0.0, entry.uncached_tokens * pace.worker_token_s - work_s)
    place_s = pace.place_s if entry.needs_decode else 0.0
    return Job(entry, work_s + place_s, entry.due_s - pace.now - alone_s, entry.number)
