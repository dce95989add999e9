"""Prompts that nobody could compute within the target for which they may be refused, though it began at once. Pure.

Judged by what workers' own fits say of such a prompt, by the longest prefix that any of them holds in any tier, and on
the fastest one: who might be in time is let in.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.admission.entry import Entry, Refusal
from coordinator.admission.forecast import retry_after_s
from coordinator.routing.prompt_placement import prompt_fit_of
from coordinator.workers.load import DecodeLoad, PrefillLoad

TRY_EVERY_S = 10.0
"""How often one is let in all the same: fits come from what is computed, so that one that was too slow once would last
as long as nothing else is."""
_SURE = 0.8
"""Share of the least time that must be above the target: fits are right only on average."""


class TooLong:
    """The refusals of one model."""

    def __init__(self) -> None:
        self._tried_s = float("-inf")

    def refusal(
        self,
        entry: Entry,
        prefill: Iterable[PrefillLoad],
        decode: Iterable[DecodeLoad],
        now: float,
    ) -> Refusal | None:
        """Why it is refused when it comes; None: it may be in time, or this is not known. Of decode
        workers those count that have computed prompts: the pair policy takes others for as fast as a prefill worker."""
        slo_s = entry.ttft_slo_s
        if slo_s is None or entry.resumed or entry.held_tokens is None:
            return None
        least_s = _least_s(entry, entry.held_tokens, (*prefill, *decode), slo_s / _SURE)
        if least_s is None:
            return None
        if now - self._tried_s >= TRY_EVERY_S:
            self._tried_s = now
            return None
        message = (
            f"a prompt takes at least {_SURE * least_s:.3g} s to compute; at most {slo_s:.3g} s are allowed"
        )
        return Refusal(entry, "WOULD_MISS_SLO", message, retry_after_s(entry.request_id, least_s, slo_s))


def _least_s(
    entry: Entry, held: int, loads: Iterable[PrefillLoad | DecodeLoad], limit_s: float
) -> float | None:
    """Seconds on the fastest worker with all cores that neighbours lend it; None if within the limit, or unknown. The
    first one that is looked at mostly decides."""
    least_s = float("inf")
    for load in loads:
        report = load.report
        if not report.HasField("prompt_fit"):
            if isinstance(load, PrefillLoad):
                return None
            continue
        compute_s = prompt_fit_of(report.prompt_fit).chunk_s(entry.prompt_tokens - held, held)
        least_s = min(least_s, compute_s / max(1.0, report.lent_speedup))
        if least_s <= limit_s:
            return None
    return least_s if least_s < float("inf") else None
