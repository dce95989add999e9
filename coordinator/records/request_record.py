"""The record of one request: what its coordinator knows of it, without a token of prompt or answer.

It is made once, by `RecordKeeper`, from the state that all other observers see; phases, decisions and messages derive
from it. All times are in milliseconds since the request was received; None: it did not come to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.request.candidates import Candidate, FetchedPrefix
from coordinator.request.request_trace import RequestTrace
from coordinator.request.state import NO_WAITS, AttemptReport, Waits
from splitserve.generation.kv_blocks import blocks_for
from splitserve.tracing.context import TraceContext


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """One attempt."""

    number: int
    prefill_worker: str
    decode_worker: str
    """Empty if the answer needed none."""
    is_local: bool
    """Whether the decode worker computed the prompt itself."""
    candidates: tuple[Candidate, ...]
    """See `Pair.candidates`."""
    report: AttemptReport
    began_ms: float
    reserving_ms: float | None
    prefilling_ms: float | None
    prefilled_ms: float | None
    decode_began_ms: float | None
    ended_ms: float
    """Of a running attempt: when the record was made."""
    first_position: int
    """Output tokens that earlier attempts had brought."""
    failed_worker: str
    failure: str
    """Reason and message; empty unless it failed."""
    trace: TraceContext | None = None
    """Its span."""
    fetched: FetchedPrefix | None = None

    @property
    def decoding_ms(self) -> float | None:
        """When its second token could be computed."""
        return self.prefilled_ms if self.is_local else self.decode_began_ms


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, ended or running."""

    request_id: str
    tenant: str
    model: str
    """As the client named it."""
    outcome: str
    """A label of `splitserve_requests_ended_total`, or "running"."""
    received_unix_s: float
    ended_ms: float
    """Of a running request: when the record was made."""
    failure: str = ""
    """Reason and message of the error that it ended with."""
    is_refusal: bool = False
    """Whether that error says that the request is wrong or that there is no room for it."""
    served_model: str = ""
    """Empty for a request that was not understood; the rest is then missing, too."""
    prompt_tokens: int = 0
    resumed_tokens: int = 0
    """Output tokens that another coordinator had sent."""
    output_tokens: int = 0
    block_size_tokens: int = 0
    """Tokens per KV block; 0: unknown."""
    tokenized_ms: float | None = None
    admitted_ms: float | None = None
    waits: Waits = NO_WAITS
    predicted_ttft_s: float = 0.0
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    tpot_ms: float = 0.0
    longest_gap_ms: float = 0.0
    longest_gap_position: int = 0
    attempts: Sequence[AttemptFacts] = ()
    """At most MAX_PAST_ATTEMPTS, and a running one."""
    attempt_count: int = 0
    trace: RequestTrace | None = None

    @property
    def first_attempt(self) -> AttemptFacts | None:
        """The attempt that brought the first token."""
        if self.first_token_ms is None:
            return None
        return next((one for one in self.attempts if one.ended_ms >= self.first_token_ms), None)


@dataclass(frozen=True, slots=True)
class CostOfRequest:
    """What a request took, all recorded attempts together. Times in seconds."""

    prefill_s: float
    decode_s: float
    kv_block_s: float
    written_bytes: int


def cost_of(record: RequestRecord) -> CostOfRequest:
    """The cost of a request.

    KV blocks count as held on the prefill worker while the prompt is computed and written, and on the decode worker
    from the reservation to the end, where they grow evenly from the prompt's to the whole context's.
    """
    prefill_s = decode_s = block_s = 0.0
    written_bytes, size = 0, max(1, record.block_size_tokens)
    for attempt in record.attempts:
        report = attempt.report
        prompt = record.prompt_tokens + record.resumed_tokens + attempt.first_position
        blocks = blocks_for(prompt, size)
        prefill_s += report.prefill_ms / 1e3
        written_bytes += report.transfer_bytes
        if not attempt.is_local:
            block_s += blocks * (report.prefill_ms + report.transfer_ms) / 1e3
        if attempt.decoding_ms is not None:
            decode_s += (attempt.ended_ms - attempt.decoding_ms) / 1e3
        reserved_ms = attempt.prefilling_ms if not attempt.is_local else attempt.reserving_ms
        if attempt.decode_worker and reserved_ms is not None:
            whole = record.prompt_tokens + record.resumed_tokens + record.output_tokens
            mean = (blocks + max(blocks, blocks_for(whole, size))) / 2
            block_s += mean * (attempt.ended_ms - reserved_ms) / 1e3
    return CostOfRequest(prefill_s, decode_s, block_s, written_bytes)
