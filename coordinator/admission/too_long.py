"""Prompts that nobody could compute within the target for which they may be refused, though it began at once. Pure.

Judged by what workers' own fits say of such a prompt, by the longest prefix that any of them holds in any tier, and on
the fastest one: who might be in time is let in.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.admission.entry import Entry, Refusal
from coordinator.admission.forecast import MOST_RETRY_S
from coordinator.routing.prompt_placement import prompt_fit_of
from coordinator.workers.load import DecodeLoad, PrefillLoad

TRY_EVERY_S = 10.0
"""How often one is let in all the same, at most, for each power of two of tokens: fits come from what is computed, so
that one that was too slow once would last as long as nothing else is."""
MOST_TRIED = 0.1
"""Share of a worker's time that those of a power of two may take, by the fits."""
_SURE = 0.8
"""Share of the least time that must be above the target: fits are right only on average."""


class TooLong:
    """The refusals of one model."""

    def __init__(self) -> None:
        self._let_in_s: dict[int, float] = {}
        """When the last one of each power of two was."""

    def least_s(
        self, entry: Entry, prefill: Iterable[PrefillLoad], decode: Iterable[DecodeLoad]
    ) -> float | None:
        """Seconds that it takes on the fastest worker; None: it may be in time, or this is not known. Of decode
        workers those count that have computed prompts: the pair policy takes others for as fast as a prefill worker."""
        if entry.ttft_slo_s is None or entry.resumed or entry.held_tokens is None:
            return None
        return _least_s(entry, entry.held_tokens, (*prefill, *decode), entry.ttft_slo_s / _SURE)

    def refusal(self, entry: Entry, least_s: float, now: float) -> Refusal | None:
        """Why it is refused when it comes; None: it is to be let in. Asks to come back as late as can be asked: waiting
        does not help."""
        let_in_s = self._let_in_s.get(_power(entry))
        if let_in_s is None or now - let_in_s >= max(TRY_EVERY_S, least_s / MOST_TRIED):
            return None
        message = (
            f"a prompt takes at least {_SURE * least_s:.3g} s to compute; "
            f"at most {entry.ttft_slo_s:.3g} s are allowed"
        )
        return Refusal(entry, "WOULD_MISS_SLO", message, MOST_RETRY_S)

    def let_in(self, entry: Entry, now: float) -> None:
        """It has been started or queued, though it takes too long."""
        self._let_in_s[_power(entry)] = now


def _power(entry: Entry) -> int:
    return (entry.prompt_tokens - (entry.held_tokens or 0)).bit_length()


def _least_s(
    entry: Entry, held: int, loads: Iterable[PrefillLoad | DecodeLoad], limit_s: float
) -> float | None:
    """Seconds on the fastest worker with all cores that neighbours lend it; None if within the limit, or unknown. The
    first one that is looked at mostly decides."""
    least_s = float("inf")
    for load in loads:
        report = load.report
        if report.disk_tier.shared_id:  # the store has what workers left that are gone
            return None
        if not report.HasField("prompt_fit"):
            if isinstance(load, PrefillLoad) and load.host_peer is None:
                return None
            continue
        compute_s = prompt_fit_of(report.prompt_fit).chunk_s(entry.prompt_tokens - held, held)
        least_s = min(least_s, compute_s / max(1.0, report.lent_speedup))
        if least_s <= limit_s:
            return None
    return least_s if least_s < float("inf") else None
