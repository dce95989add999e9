"""One pass over the queue: what it has held back, and who of the others is still tried. Pure."""

from __future__ import annotations

from functools import cached_property

from coordinator.admission.decode_capacity import LATE_PATIENCE_S
from coordinator.admission.entry import Entry
from coordinator.admission.prefill_capacity import LateRates, PrefillCapacity
from splitserve.queues import Offer


class OfferRound:
    """A pass at time `now`, in seconds. Long prompts, and those that cannot be in time, are served in order among
    themselves, so that none starves: once one is held, the others like it are passed over."""

    def __init__(self, prefill: PrefillCapacity, now: float) -> None:
        self._prefill, self._now = prefill, now
        self._least_long = float("inf")
        self._late_held = False
        self._late_until_s = -float("inf")
        self.only_late = True
        """Whether all that is held are prompts that cannot be in time, for want of a place among such."""
        self.patient_until_s = float("inf")
        """When the first of those that leave places on decode workers to others takes any."""
        self.late_from_s = float("inf")
        """When the first of those that prefill workers have no place for will be late, which gives it another place."""

    def waits(self, entry: Entry) -> None:
        """An entry waits for a place on a prefill worker, tried or not."""
        self.late_from_s = min(self.late_from_s, self._late_rates.next_s(entry, self._now))

    def passes_over(self, entry: Entry) -> bool:
        """Whether an entry is not tried."""
        if self.gives_way(entry):
            self._leaves_places(entry)
            return True
        late_s = self._late_rates.everywhere_s(entry)
        if late_s <= self._now:  # it takes no place of long ones
            return self._late_held
        if entry.uncached_tokens < self._least_long:
            return False
        self.late_from_s = min(self.late_from_s, late_s)
        return True

    def gives_way(self, entry: Entry) -> bool:
        """Whether an entry leaves the places on decode workers to others, as one before it does: it is late, too, or is
        due at no time."""
        if self._late_until_s == -float("inf") or self._now - entry.arrived_s >= LATE_PATIENCE_S:
            return False
        return entry.needs_decode and (entry.due_s <= self._late_until_s or entry.due_s == float("inf"))

    def _leaves_places(self, entry: Entry) -> None:
        self.patient_until_s = min(self.patient_until_s, entry.arrived_s + LATE_PATIENCE_S)

    @cached_property
    def _late_rates(self) -> LateRates:
        return self._prefill.late_rates()

    def hold(self, entry: Entry, for_prefill: bool, others_may_fit: bool, gives_way: bool = False) -> Offer:
        """An entry has found no place, `for_prefill` or for another reason; what that means for those behind it.

        `gives_way`: it leaves the places on decode workers that there are to those that can be in time. With what
        prefill workers have to do, all that are due by then are late.
        """
        if gives_way:
            self._late_until_s = max(self._late_until_s, self._now + self._prefill.backlog_s(self._now))
            self._leaves_places(entry)
            return Offer.SKIP
        if for_prefill:
            self.waits(entry)
        if for_prefill and self._prefill.held_by_late:
            self._late_held = True
            return Offer.SKIP
        self.only_late = False
        if not others_may_fit:
            return Offer.STOP
        if for_prefill and self._prefill.held_by_long:
            self._least_long = entry.uncached_tokens
            return Offer.SKIP
        return Offer.MISFIT
