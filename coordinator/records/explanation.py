"""Answers questions about single requests: finds the record that a caller may see and makes messages of it."""

from __future__ import annotations

import re

from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.records.decisions import decisions_of
from coordinator.records.phases import phases_of
from coordinator.records.record_keeper import Kind, RecordKeeper
from coordinator.records.request_record import AttemptFacts, RequestRecord, cost_of
from coordinator.request.caller import Caller
from coordinator.request.candidates import Candidate
from coordinator.workers.registry import Registry
from splitserve.config.coordinator import Routing
from splitserve.errors import NotFoundError
from splitserve.generation.bounds import between, require
from splitserve.v1 import records_pb2

ANSWER_ID = re.compile(r"[A-Za-z0-9._-]{1,137}\Z")
"""A request id, perhaps with what OpenAI's ids begin with."""
DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


class Explainer:
    """Callers see the records of their own tenant, admins those of all."""

    def __init__(self, keeper: RecordKeeper, registry: Registry, routing: Routing) -> None:
        self._keeper, self._registry, self._routing = keeper, registry, routing

    def record(
        self, request: records_pb2.GetRequestRecordRequest, caller: Caller
    ) -> records_pb2.GetRequestRecordResponse:
        """One record.

        Raises InvalidArgumentError, or NotFoundError (REQUEST_NOT_FOUND), the same for an unknown id as for another
        tenant's.
        """
        name = request.request_id
        require(ANSWER_ID.match(name) is not None, "request_id", "1..137 characters of [A-Za-z0-9._-]")
        found = self._keeper.find(name, None if caller.is_admin else caller.tenant)
        if found is None:
            message = f"this coordinator has no record of a request {name!r}: another one may, or it is too long ago"
            raise NotFoundError(message, reason="REQUEST_NOT_FOUND", field="request_id")
        return records_pb2.GetRequestRecordResponse(record=self._message(found))

    def records(
        self, request: records_pb2.ListRequestRecordsRequest, caller: Caller
    ) -> records_pb2.ListRequestRecordsResponse:
        """The kept records. Raises InvalidArgumentError."""
        between("limit", request.limit, 0, MAX_LIMIT)
        wanted: tuple[tuple[bool, Kind], ...] = ((request.slow, "slow"), (request.failed, "failed"))
        kinds: tuple[Kind, ...] = tuple(kind for asked, kind in wanted if asked) or (
            "recent",
            "slow",
            "failed",
        )
        found = self._keeper.kept(kinds, None if caller.is_admin else caller.tenant)
        return records_pb2.ListRequestRecordsResponse(
            requests=[self._summary(record) for record in found[: request.limit or DEFAULT_LIMIT]]
        )

    def _summary(self, record: RequestRecord) -> records_pb2.RequestSummary:
        return records_pb2.RequestSummary(
            request_id=record.request_id,
            received=_timestamp(record),
            outcome=record.outcome,
            ttft_ms=record.first_token_ms,
            total_ms=record.ended_ms,
            kept_because=self._keeper.why_kept(record),
        )

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
            decisions=[
                records_pb2.RequestDecision(
                    stage=decision.stage,
                    chosen=decision.chosen,
                    candidates=[_candidate(candidate) for candidate in decision.candidates],
                    reason=decision.reason,
                    attempt=decision.attempt,
                )
                for decision in decisions_of(record, self._routing)
            ],
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
        """The lane between the attempt's workers as it is known now; a look-up for every request would cost more."""
        snapshot = self._registry.snapshot()
        prefill = next((one for one in snapshot.workers if one.worker_id == attempt.prefill_worker), None)
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
        fetch_ms=cost.fetch_s * 1e3,
        read_ms=cost.read_s * 1e3,
    )


def _timestamp(record: RequestRecord) -> Timestamp:
    made = Timestamp()
    made.FromNanoseconds(int(record.received_unix_s * 1e9))
    return made
