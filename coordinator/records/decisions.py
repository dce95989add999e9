"""What was decided about a request at each stage, and the counterfactuals: its record put into words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from coordinator.records.request_record import AttemptFacts, RequestRecord
from coordinator.request.candidates import Candidate, FetchedPrefix, PairCost
from coordinator.workers.snapshot import PoolName

LEAST_MS = 0.05
"""Smaller differences of a prediction are not worth a word."""
TERMS: Mapping[str, str] = MappingProxyType(
    {
        "queue_s": "queue",
        "prefill_s": "prefill",
        "transfer_s": "transfer",
        "fetch_s": "fetch",
        "read_s": "read",
        "decode_wait_s": "decode",
        "others_s": "delay of others",
    }
)
"""The terms of a cost by their words."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen at one stage, from what, and why."""

    stage: str
    chosen: str
    candidates: tuple[Candidate, ...]
    """The chosen one first; empty if they are not known."""
    reason: str
    attempt: int = 0
    """From 1; 0: before the first."""


def decisions_of(record: RequestRecord, routing: str) -> list[Decision]:
    """The decisions about a request, in order. `routing` is the policy that chose its workers."""
    found = []
    if record.served_model and record.model != record.served_model:
        reason = f"the route {record.model} led there"
        found.append(Decision("model", record.served_model, (), reason))
    if record.served_model:
        found.append(_admission(record))
    for number, attempt in enumerate(record.attempts):
        if number:
            found.append(_resume(record.attempts[number - 1], attempt))
        prompt = record.prompt_tokens + record.resumed_tokens + attempt.first_position
        found.append(_choice("prefill", attempt.prefill_worker, attempt, prompt, routing))
        if attempt.decode_worker:
            found.append(_choice("decode", attempt.decode_worker, attempt, prompt, routing))
        if attempt.fetched is not None:
            held, reason = attempt.fetched, _why_fetched(attempt.fetched)
            found.append(Decision("prefix_fetch", held.holder, (), reason, attempt.number))
        if attempt.is_local:
            reason = "computing the prompt there was expected to be sooner than a handoff, or in time as well"
            if attempt.prefill_worker == attempt.decode_worker:
                reason = "the worker that computes it keeps the answer, without a handoff"
            found.append(Decision("local_prefill", attempt.decode_worker, (), reason, attempt.number))
    return found


def _why_fetched(fetched: FetchedPrefix) -> str:
    predicted, computing = fetched.predicted_s * 1e3, fetched.compute_s * 1e3
    text = f"{fetched.taker} lacked {fetched.tokens} tokens that it holds: predicted {predicted:.1f} ms"
    text += f", {computing:.1f} ms to compute them; took {fetched.took_s * 1e3:.1f} ms"
    text += " beside another request's fetch" if fetched.joined else ""
    return f"{text}, and failed: {fetched.failure}" if fetched.failure else text


def _admission(record: RequestRecord) -> Decision:
    waits = [
        f"{seconds * 1e3:.0f} ms because {pool} had no capacity"
        for pool, seconds in (("prefill", record.waits.prefill_s), ("decode", record.waits.decode_s))
        if seconds > 0
    ]
    if record.admitted_ms is None and record.failure and not record.attempts:
        return Decision("admission", "refused", (), record.failure)
    if record.admitted_ms is None:
        return Decision("admission", "queued", (), "it ended, or still is, in the queue")
    if not waits:
        return Decision("admission", "at once", (), "workers had capacity for it")
    forecast = f"; TTFT forecast {record.predicted_ttft_s * 1e3:.0f} ms" if record.predicted_ttft_s else ""
    return Decision("admission", "queued", (), " and ".join(waits) + forecast)


def _resume(failed: AttemptFacts, attempt: AttemptFacts) -> Decision:
    workers = "+".join(filter(None, (attempt.prefill_worker, attempt.decode_worker)))
    reason = (
        f"{failed.failed_worker} failed ({failed.failure}); {attempt.first_position} tokens had been sent"
    )
    return Decision("resume", workers, (), reason, attempt.number)


def _choice(pool: PoolName, chosen: str, attempt: AttemptFacts, prompt_tokens: int, routing: str) -> Decision:
    candidates = tuple(one for one in attempt.candidates if one.pool == pool)
    reason = _why(pool, candidates, prompt_tokens, routing)
    if candidates and candidates[0].worker_id != chosen:
        reason = _why_another(pool, candidates[0].worker_id, attempt)
    elif not candidates and chosen == attempt.prefill_worker == attempt.decode_worker:
        reason = "serves it alone: no two workers could together"
    return Decision(pool, chosen, candidates, reason, attempt.number)


def _why_another(pool: PoolName, routed: str, attempt: AttemptFacts) -> str:
    """Why the pair policy took another worker than routing did, to keep the targets."""
    if pool == "prefill":
        return f"is ready before {routed}, which routing preferred and whose streams leave it less time"
    if attempt.prefill_worker == attempt.decode_worker:
        return (
            f"decodes where it was computed: {routed}, which routing preferred, had no room within the target"
        )
    if attempt.is_local:
        return f"computes the prompt itself before {routed}, which routing preferred"
    return f"has room within the target, unlike {routed}, which routing preferred"


def _why(pool: PoolName, candidates: Sequence[Candidate], prompt_tokens: int, routing: str) -> str:
    if not candidates:
        return f"chosen by routing: {routing}, which predicts nothing that could be compared"
    chosen, *others = candidates
    cost = chosen.cost
    held = cost.cached_tokens if pool == "prefill" else cost.decode_cached_tokens
    head = f"predicted {cost.wait_s * 1e3:.1f} ms, {held} of {prompt_tokens} prompt tokens held"
    if chosen.is_home:
        head += ", home of the session"
    if not others:
        return f"the only {pool} worker that could serve it: {head}"
    return "; ".join([head, *(counterfactual(chosen, other) for other in others)])


def counterfactual(chosen: Candidate, other: Candidate) -> str:
    """What would have been different with another worker: "decode-1 was predicted 40 ms sooner for decode but held no
    prefix: +310 ms prefill"."""
    differences = {
        word: (getattr(other.cost, term) - getattr(chosen.cost, term)) * 1e3 for term, word in TERMS.items()
    }
    sooner = {word: -ms for word, ms in differences.items() if ms <= -LEAST_MS}
    later = {word: ms for word, ms in differences.items() if ms >= LEAST_MS}
    name = other.worker_id
    if not sooner and not later:
        return f"{name} was predicted the same; equal workers take turns"
    gained = f"{name} was predicted {sum(sooner.values()):.1f} ms sooner for {' and '.join(sooner)}"
    if not later:
        reason = (
            "is the home of the session" if chosen.is_home else "was preferred by less than predictions tell"
        )
        return f"{gained}, but {chosen.worker_id} {reason}"
    lost = ", ".join(f"+{ms:.1f} ms {word}" for word, ms in later.items())
    prefix = _prefix(chosen.cost, other.cost)
    if not sooner:
        return f"{name}{f' {prefix}' if prefix else ''}: {lost}"
    return f"{gained} but{f' {prefix}' if prefix else ''}: {lost}"


def _prefix(chosen: PairCost, other: PairCost) -> str:
    """How much less of the prompt the other pair holds, where it costs something."""
    for ours, theirs in (
        (chosen.cached_tokens, other.cached_tokens),
        (chosen.decode_cached_tokens, other.decode_cached_tokens),
    ):
        if theirs < ours:
            return f"held {theirs} of {ours} cached tokens" if theirs else "held no prefix"
    return ""
