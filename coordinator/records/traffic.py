"""Records the shape of traffic for those who ask: lengths, times and keyed hashes of requests, never their content."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from coordinator.metrics.recorder import outcome_of
from coordinator.records.record_keeper import COMPLETED
from coordinator.request.observer import RequestObserver
from coordinator.request.state import RequestState
from splitserve.errors import ResourceExhaustedError
from splitserve.v1 import scaling_pb2, traffic_pb2

BLOCK_TOKENS = 512
"""Tokens of a hashed block, as in the traces that the simulator reads."""
MAX_BLOCKS = 4096
HASH_BYTES = 6
"""48 bits: a trace's copies multiply the hashes, which stay below 2^64."""
MAX_RECORDINGS = 4
MAX_BUFFERED = 4096
"""Requests of one recording that wait to be read."""


@dataclass(frozen=True, slots=True)
class RecordingTerms:
    """Takes requests for `model` (empty: any) that arrive in [`since_s`, `until_s`), by the wall clock."""

    salt: bytes
    since_s: float
    until_s: float
    drain_s: float = 0.0
    model: str = ""

    def takes(self, model: str, received_s: float) -> bool:
        """Whether a request belongs to the recording."""
        return self.since_s <= received_s < self.until_s and self.model in ("", model)


class Recording:
    """One reader's view of the requests that end. Bounded: what a slow reader leaves is counted, not kept."""

    def __init__(self, terms: RecordingTerms) -> None:
        self.terms = terms
        self.lost = 0
        self._buffer: deque[traffic_pb2.RecordedRequest] = deque()
        self._filled = asyncio.Event()

    def add(self, state: RequestState, error: BaseException | None, received_s: float) -> None:
        """Takes a request that has ended, if it belongs here."""
        if not self.terms.takes(state.request.model.name, received_s):
            return
        if len(self._buffer) >= MAX_BUFFERED:
            self.lost += 1
            return
        self._buffer.append(recorded_request(state, error, received_s, self.terms.salt))
        self._filled.set()

    def take(self, limit: int) -> list[traffic_pb2.RecordedRequest]:
        """The next requests, at most `limit`."""
        taken = [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]
        if not self._buffer:
            self._filled.clear()
        return taken

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be read."""
        return not self._buffer

    async def wait(self, timeout_s: float) -> None:
        """Returns when there is something to take, at the latest after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._filled.wait()
        except TimeoutError:
            return


class TrafficRecorder(RequestObserver):
    """Observes requests while it is wanted, and passes those that end to the recordings under way."""

    def __init__(self) -> None:
        self.ended_requests = 0
        """Observed requests that have ended."""
        self._until_s = 0.0
        self._running: dict[int, tuple[str, float]] = {}
        """Model and arrival by the wall clock, by identity: two clients may choose the same id."""
        self._recordings: list[Recording] = []

    @property
    def is_wanted(self) -> bool:
        """Whether requests that arrive now belong to a recording. Also while no stream is open: one that broke may be
        opened again."""
        return bool(self._recordings) or time.time() < self._until_s

    def arrived(self, state: RequestState) -> None:
        """See RequestObserver."""
        self._running[id(state)] = (state.request.model.name, _received_s(state))

    def ended(self, state: RequestState, error: BaseException | None) -> None:
        """See RequestObserver. A request that was over its tenant's quota never arrived, and is left out."""
        known = self._running.pop(id(state), None)
        if known is None:
            return
        self.ended_requests += 1
        for recording in self._recordings:
            recording.add(state, error, known[1])

    def begin(self, terms: RecordingTerms) -> Recording:
        """Begins a recording; `end` it. Raises ResourceExhaustedError (RECORDINGS) when there are too many."""
        if len(self._recordings) >= MAX_RECORDINGS:
            message = f"{MAX_RECORDINGS} recordings are under way here already"
            raise ResourceExhaustedError(message, reason="RECORDINGS")
        recording = Recording(terms)
        self._until_s = max(self._until_s, terms.until_s)
        self._recordings.append(recording)
        return recording

    def end(self, recording: Recording) -> None:
        """Ends a recording."""
        self._recordings.remove(recording)

    def running(self, terms: RecordingTerms) -> int:
        """Requests of a recording that have not ended yet."""
        return sum(terms.takes(*known) for known in self._running.values())


def recorded_request(
    state: RequestState, error: BaseException | None, received_s: float, salt: bytes
) -> traffic_pb2.RecordedRequest:
    """The shape of a request that has ended."""
    request, report = state.request, state.report
    if state.attempts == 1 and state.current is not None:
        report = state.current.report  # has what a sum over several attempts would not mean anything for
    outcome = COMPLETED
    if not state.completed:
        outcome = scaling_pb2.Outcome.Name(outcome_of(error)).removeprefix("OUTCOME_").lower()
    found = traffic_pb2.RecordedRequest(
        model=request.model.name,
        tenant_hash=_hash(salt, b"tenant", request.caller.tenant.encode()),
        prompt_tokens=len(request.prompt),
        max_output_tokens=request.max_tokens,
        output_tokens=len(state.token_ids),
        outcome=outcome,
        block_hashes=block_hashes(request.prompt, salt),
        tpot_ms=state.tpot_s * 1e3,
        prefill_queue_ms=report.worker_queue_ms,
        prefill_compute_ms=report.prefill_ms,
        prefill_chunks=report.chunks,
        cached_tokens=report.cached_prompt_tokens,
        handoff_ms=report.transfer_ms + report.decode_admit_ms if report.transfer_bytes else 0.0,
        wait_ms=report.reserve_ms + (state.waits.prefill_s + state.waits.decode_s) * 1e3,
    )
    found.received.FromNanoseconds(round(received_s * 1e9))
    if state.first_token_s is not None:
        found.ttft_ms = (state.first_token_s - request.received_s) * 1e3
    return found


def block_hashes(prompt: Sequence[int], salt: bytes) -> list[int]:
    """Keyed hashes of the prompt's blocks, each chained to the one before: equal beginnings have equal hashes."""
    found: list[int] = []
    before = b""
    for start in range(0, min(len(prompt), BLOCK_TOKENS * MAX_BLOCKS), BLOCK_TOKENS):
        block = array("I", prompt[start : start + BLOCK_TOKENS]).tobytes()
        before = blake2b(before + block, digest_size=16, key=salt, person=b"block").digest()
        found.append(int.from_bytes(before[:HASH_BYTES]))
    return found


def _hash(salt: bytes, kind: bytes, content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=HASH_BYTES, key=salt, person=kind).digest())


def _received_s(state: RequestState) -> float:
    return time.time() - (time.monotonic() - state.request.received_s)
