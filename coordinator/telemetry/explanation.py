"""Explains single requests: the decision at each stage, and its reason.

`decisions_of` describes a record's decisions, with the predicted costs of other workers. `Explainer` finds the records
that a caller may see and makes messages of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.request.inference_request import Caller
from coordinator.request.state import Candidate
from coordinator.telemetry.record_keeper import Kind, RecordKeeper
from coordinator.telemetry.request_record import AttemptFacts, RequestRecord, cost_of, phases_of
from coordinator.workers.registry import Registry
from splitserve.errors import NotFoundError
from splitserve.generation.bounds import between, require
from splitserve.roles import PoolName
from splitserve.v1 import records_pb2
from splitserve.v1.records_pb2 import RequestDecision

LEAST_MS = 0.05
"""Smaller differences between predictions are not mentioned."""
TERMS: Mapping[str, str] = MappingProxyType(
    {
        "queue_s": "queue",
        "prefill_s": "prefill",
        "transfer_s": "transfer",
        "decode_wait_s": "decode",
        "others_s": "delay of others",
    }
)
"""Names of the terms of a cost, by field of `PairCost`."""


def decisions_of(record: RequestRecord) -> list[RequestDecision]:
    """The decisions about a request, in order."""
    decisions: list[RequestDecision] = []
    if record.served_model and record.model != record.served_model:
        reason = f"the route {record.model} led there"
        decisions.append(RequestDecision(stage="model", chosen=record.served_model, reason=reason))
    if record.served_model:
        decisions.append(_admission(record))
    for number, attempt in enumerate(record.attempts):
        if number:
            decisions.append(_resume(record.attempts[number - 1], attempt))
        prompt = record.prompt_tokens + record.resumed_tokens + attempt.first_position
        decisions.append(_choice("prefill", attempt.prefill_worker, attempt, prompt))
        if attempt.decode_worker:
            decisions.append(_choice("decode", attempt.decode_worker, attempt, prompt))
        if attempt.is_local:
            reason = "computing the prompt there was expected to be sooner than a handoff, or in time as well"
            if attempt.prefill_worker == attempt.decode_worker:
                reason = "the worker that computes it keeps the answer, without a handoff"
            decisions.append(
                RequestDecision(
                    stage="local_prefill", chosen=attempt.decode_worker, reason=reason, attempt=attempt.number
                )
            )
    return decisions


def _admission(record: RequestRecord) -> RequestDecision:
    chosen, reason = _admitted(record)
    return RequestDecision(stage="admission", chosen=chosen, reason=reason)


def _admitted(record: RequestRecord) -> tuple[str, str]:
    waits = [
        f"{seconds * 1e3:.0f} ms because {pool} had no capacity"
        for pool, seconds in (("prefill", record.waits.prefill_s), ("decode", record.waits.decode_s))
        if seconds > 0
    ]
    if record.admitted_ms is None and record.failure and not record.attempts:
        return "refused", record.failure
    if record.admitted_ms is None:
        return "queued", "it ended, or still is, in the queue"
    if not waits:
        return "at once", "workers had capacity for it"
    forecast = f"; TTFT forecast {record.predicted_ttft_s * 1e3:.0f} ms" if record.predicted_ttft_s else ""
    return "queued", " and ".join(waits) + forecast


def _resume(failed: AttemptFacts, attempt: AttemptFacts) -> RequestDecision:
    workers = "+".join(filter(None, (attempt.prefill_worker, attempt.decode_worker)))
    reason = (
        f"{failed.failed_worker} failed ({failed.failure}); {attempt.first_position} tokens had been sent"
    )
    return RequestDecision(stage="resume", chosen=workers, reason=reason, attempt=attempt.number)


def _choice(pool: PoolName, chosen: str, attempt: AttemptFacts, prompt_tokens: int) -> RequestDecision:
    candidates = tuple(candidate for candidate in attempt.candidates if candidate.pool == pool)
    return RequestDecision(
        stage=pool,
        chosen=chosen,
        candidates=map(_candidate, candidates),
        reason=_why(pool, candidates, prompt_tokens),
        attempt=attempt.number,
    )


def _why(pool: PoolName, candidates: Sequence[Candidate], prompt_tokens: int) -> str:
    if not candidates:
        return "the other workers that could serve it are not known"
    chosen, *others = candidates
    cost = chosen.cost
    held = cost.cached_tokens if pool == "prefill" else cost.decode_cached_tokens
    head = f"predicted {cost.wait_s * 1e3:.1f} ms, {held} of {prompt_tokens} prompt tokens held"
    if chosen.is_home:
        head += ", home of the session"
    if not others:
        return f"the only {pool} worker that could serve it: {head}"
    return "; ".join([head, *(_compared(chosen, other) for other in others)])


def _compared(chosen: Candidate, other: Candidate) -> str:
    """The difference to the cost with another worker: "decode-1: -40.0 ms decode, +310.0 ms prefill"."""
    differences = {
        word: (getattr(other.cost, term) - getattr(chosen.cost, term)) * 1e3 for term, word in TERMS.items()
    }
    shown = [f"{ms:+.1f} ms {word}" for word, ms in differences.items() if abs(ms) >= LEAST_MS]
    if not shown:
        return f"{other.worker_id} was predicted the same; equal workers take turns"
    return f"{other.worker_id}: {', '.join(shown)}"


ANSWER_ID = re.compile(r"[A-Za-z0-9._-]{1,137}\Z")
"""A request id, perhaps with the prefix of OpenAI's ids."""
DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


class Explainer:
    """Callers see the records of their own tenant, admins the records of all tenants."""

    def __init__(self, keeper: RecordKeeper, registry: Registry) -> None:
        self._keeper, self._registry = keeper, registry

    def record(
        self, request: records_pb2.GetRequestRecordRequest, caller: Caller
    ) -> records_pb2.GetRequestRecordResponse:
        """One record.

        Raises InvalidArgumentError, or NotFoundError (REQUEST_NOT_FOUND), the same for an unknown id as for another
        tenant's.
        """
        name = request.request_id
        require(ANSWER_ID.match(name) is not None, "request_id", "1..137 characters of [A-Za-z0-9._-]")
        kept = self._keeper.find(name, None if caller.is_admin else caller.tenant)
        if kept is None:
            message = f"this coordinator has no record of a request {name!r}: another one may, or it is too long ago"
            raise NotFoundError(message, reason="REQUEST_NOT_FOUND", field="request_id")
        return records_pb2.GetRequestRecordResponse(record=self._message(kept))

    def records(
        self, request: records_pb2.ListRequestRecordsRequest, caller: Caller
    ) -> records_pb2.ListRequestRecordsResponse:
        """The kept records. Raises InvalidArgumentError."""
        between("limit", request.limit, 0, MAX_LIMIT)
        kinds: list[Kind] = ["slow"] if request.slow else []
        kinds += ["failed"] if request.failed else []
        kept = self._keeper.kept(
            kinds or ("recent", "slow", "failed"), None if caller.is_admin else caller.tenant
        )
        summaries = [
            records_pb2.RequestSummary(
                request_id=record.request_id,
                received=_timestamp(record),
                outcome=record.outcome,
                ttft_ms=record.first_token_ms,
                total_ms=record.ended_ms,
                kept_because=self._keeper.why_kept(record),
            )
            for record in kept[: request.limit or DEFAULT_LIMIT]
        ]
        return records_pb2.ListRequestRecordsResponse(requests=summaries)

    def _message(self, record: RequestRecord) -> records_pb2.RequestRecord:
        cost = cost_of(record)
        return records_pb2.RequestRecord(
            request_id=record.request_id,
            tenant=record.tenant,
            model=record.model,
            served_model=record.served_model,
            received=_timestamp(record),
            outcome=record.outcome,
            failure=record.failure,
            ttft_ms=record.first_token_ms,
            total_ms=record.ended_ms,
            phases=[
                records_pb2.RequestPhase(
                    name=phase.name,
                    start_ms=phase.start_ms,
                    end_ms=phase.end_ms,
                    worker=phase.worker,
                    attempt=phase.attempt,
                )
                for phase in phases_of(record)
            ],
            decisions=decisions_of(record),
            attempts=[self._attempt(attempt) for attempt in record.attempts],
            attempt_count=record.attempt_count,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            tpot_ms=record.tpot_ms,
            longest_gap_ms=record.longest_gap_ms,
            longest_gap_position=record.longest_gap_position,
            cost=records_pb2.RequestCost(
                prefill_seconds=cost.prefill_s,
                decode_seconds=cost.decode_s,
                kv_block_seconds=cost.kv_block_s,
                written_bytes=cost.written_bytes,
            ),
            kept_because=self._keeper.why_kept(record),
            trace_id="" if record.trace is None else record.trace.context.trace_id,
            trace_exported=record.trace is not None and record.trace.exported,
        )

    def _attempt(self, attempt: AttemptFacts) -> records_pb2.RecordedAttempt:
        report = attempt.report
        return records_pb2.RecordedAttempt(
            number=attempt.number,
            prefill_worker="" if attempt.is_local else attempt.prefill_worker,
            decode_worker=attempt.decode_worker,
            reserved_blocks=report.reserved_blocks,
            cached_tokens=report.cached_prompt_tokens,
            decode_cached_tokens=report.decode_cached_tokens,
            chunks=report.chunks,
            transport=report.transport,
            lane=self._lane(attempt) if report.transfer_bytes else "",
            written_bytes=report.transfer_bytes,
            descriptors=report.descriptors,
            failed_worker=attempt.failed_worker,
            failure=attempt.failure,
        )

    def _lane(self, attempt: AttemptFacts) -> str:
        """The present lane between the attempt's workers: storing it with every request would cost more."""
        snapshot = self._registry.snapshot()
        prefill = next(
            (worker for worker in snapshot.workers if worker.worker_id == attempt.prefill_worker), None
        )
        lanes = snapshot.lanes_of(prefill) if prefill is not None else []
        return next((lane.lane for peer, lane in lanes if peer.worker_id == attempt.decode_worker), "")


def _candidate(candidate: Candidate) -> records_pb2.DecisionCandidate:
    cost = candidate.cost
    return records_pb2.DecisionCandidate(
        worker=candidate.worker_id,
        predicted_ms=cost.wait_s * 1e3,
        queue_ms=cost.queue_s * 1e3,
        prefill_ms=cost.prefill_s * 1e3,
        transfer_ms=cost.transfer_s * 1e3,
        decode_wait_ms=cost.decode_wait_s * 1e3,
        others_ms=cost.others_s * 1e3,
        cached_tokens=cost.cached_tokens,
        decode_cached_tokens=cost.decode_cached_tokens,
    )


def _timestamp(record: RequestRecord) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(int(record.received_unix_s * 1e9))
    return timestamp
