"""One pass over the queue: what it has held back, and who of the others is still tried. Pure."""

from __future__ import annotations

from functools import cached_property

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
        self.only_late = True
        """Whether all that is held are prompts that cannot be in time, for want of a place among such."""
        self.late_from_s = float("inf")
        """When the first of those that prefill workers have no place for will be late, which gives it another place."""

    def waits(self, entry: Entry) -> None:
        """An entry waits for a place on a prefill worker, tried or not."""
        self.late_from_s = min(self.late_from_s, self._late_rates.next_s(entry, self._now))

    def passes_over(self, entry: Entry) -> bool:
        """Whether an entry is not tried."""
        late_s = self._late_rates.everywhere_s(entry)
        if late_s <= self._now:  # it takes no place of long ones
            return self._late_held
        if entry.uncached_tokens < self._least_long:
            return False
        self.late_from_s = min(self.late_from_s, late_s)
        return True

    @cached_property
    def _late_rates(self) -> LateRates:
        return self._prefill.late_rates()

    def hold(self, entry: Entry, for_prefill: bool, others_may_fit: bool, held_by_late: bool) -> Offer:
        """An entry has found no place, `for_prefill` or for another reason; what that means for those behind it.

        `held_by_late`: only because it cannot be in time.
        """
        if for_prefill:
            self.waits(entry)
        if held_by_late:
            self._late_held = True
            return Offer.SKIP
        self.only_late = False
        if not others_may_fit:
            return Offer.STOP
        if for_prefill and self._prefill.held_by_long:
            self._least_long = entry.uncached_tokens
            return Offer.SKIP
        return Offer.MISFIT
