"""The events of a request. Only `RequestEvents` writes the request's state and notifies observers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, Self

from coordinator.request.state import Candidate, RequestState, Waits
from coordinator.workers.snapshot import Worker
from splitserve.errors import InvalidArgumentError, SplitserveError
from splitserve.logs import log_exception
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2

P = ParamSpec("P")
MAX_FAILURE_CHARACTERS = 300
"""Most characters of an error in an attempt's record."""
BATCH_TOKENS = 8
"""Tokens of a stream that are reported to observers at once, half a KV block or less."""


class RequestObserver:
    """Base class of observers, with a no-op for each event, roughly in the order in which they occur.

    Methods are called on the request's path after its state was written, so they must be cheap. Exceptions are logged.
    """

    __slots__ = ()

    def arrived(self, state: RequestState) -> None:
        """The request is valid and within its quotas: it counts as demand from now on, served or not."""

    def routed(self, state: RequestState) -> None:
        """An attempt begins: `state.attempt` names its workers."""

    def reserving(self, state: RequestState) -> None:
        """Reserve is being called on the decode worker."""

    def reserve_ended(self, state: RequestState, waited_s: float) -> None:
        """The reservation was made, or given up, after `waited_s` seconds."""

    def prefilling(self, state: RequestState) -> None:
        """The prompt is being sent to the prefill worker."""

    def prefilled(self, state: RequestState, first: prefill_pb2.FirstToken) -> None:
        """The prefill worker has sent the first token."""

    def prefilling_locally(self, state: RequestState) -> None:
        """The decode worker is computing the prompt itself; the prefill worker is not called."""

    def prefilled_locally(self, state: RequestState, local: decode_pb2.LocalPrefill) -> None:
        """The decode worker has computed the prompt itself."""

    def transferred(self, state: RequestState, handoff: prefill_pb2.HandoffDone) -> None:
        """The last KV write was acknowledged. May precede or follow the first decode output."""

    def decode_began(self, state: RequestState, admit_ms: float) -> None:
        """The decode worker has made its first step, `admit_ms` milliseconds after it received the KV."""

    def sent(self, state: RequestState, output_tokens: int) -> None:
        """`output_tokens` more tokens were sent to the client. The first call implies that the prompt is computed.

        The first two deltas of each attempt are reported at once, later ones BATCH_TOKENS at a time, the rest at its
        end.
        """

    def completed(self, state: RequestState) -> None:
        """The whole answer was sent, except for the final `done` message."""

    def ended(self, state: RequestState, error: BaseException | None) -> None:
        """The request is over, with or without an error. Always the last event."""


class RequestControl(Protocol):
    """Receives the events of one request by which decisions are made. It is called before observers are."""

    def output_sent(self, tokens: int) -> None:
        """`tokens` more tokens were sent to the client; reported as in `RequestObserver.sent`."""

    def decoded(self) -> None:
        """The decode worker holds nothing for the request any more."""

    def ended(self, error: BaseException | None) -> None:
        """The request is over."""


class RequestEvents:
    """The events of one request; a context manager whose exit emits `ended`.

    Observers are for telemetry. Events that come on several paths and by which decisions are made go to `control`; the
    request flow makes all other calls itself. `emit` only notifies observers; the other methods write the state first.
    An observer that raises neither fails the request nor keeps the event from other observers.
    """

    __slots__ = ("_batch_tokens", "_batches", "_observers", "_pending_tokens", "control", "state")

    def __init__(self, state: RequestState, observers: Iterable[RequestObserver] = ()) -> None:
        self.state = state
        self.control: RequestControl | None = None
        self._observers = tuple(observers)
        self._pending_tokens, self._batch_tokens = 0, 1
        """Sent tokens that are not reported yet, and how many of them are reported at once."""
        self._batches = 0
        """Reports of sent tokens in this attempt."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._report_sent()
        if self.control is not None:
            self.control.ended(error)
        self.emit(RequestObserver.ended, error)

    def emit(
        self,
        event: Callable[Concatenate[RequestObserver, RequestState, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Notifies all observers of an event, given as a method of RequestObserver."""
        for observer in self._observers:
            listener = getattr(observer, event.__name__)
            try:
                listener(self.state, *args, **kwargs)
            except Exception as error:
                log_exception("observer.failed", error, observer=listener.__qualname__)

    def waited(self, waits: Waits, predicted_ttft_s: float = 0.0) -> None:
        """Records the time that the request waited for admission, and the forecast of its TTFT. Emits nothing."""
        self.state.waits += waits
        self.state.predicted_ttft_s = predicted_ttft_s

    def admitted(self, now: float) -> None:
        """Records the end of admission. Emits nothing."""
        self.state.admitted_s = now

    def routed(
        self,
        prefill: Worker,
        decode: Worker | None,
        cached_tokens: int,
        now: float,
        candidates: tuple[Candidate, ...] = (),
    ) -> None:
        """Begins an attempt on these workers; `cached_tokens` of the prompt are expected in prefill's cache."""
        self.state.begin_attempt(prefill, decode, cached_tokens, now, candidates)
        self._batches, self._batch_tokens = 0, 1
        self.emit(RequestObserver.routed)

    def reserving(self, now: float) -> None:
        """Reserve is being called on the decode worker."""
        self.state.attempt.reserving_s = now
        self.emit(RequestObserver.reserving)

    def prefilling(self, now: float) -> None:
        """The prompt is being sent to the prefill worker."""
        self.state.attempt.prefilling_s = now
        self.emit(RequestObserver.prefilling)

    def prefilled(self, first: prefill_pb2.FirstToken) -> None:
        """The prefill worker has sent the first token."""
        attempt = self.state.attempt
        attempt.prefilled_s = time.monotonic()
        attempt.report.record_prefill(first)
        self.emit(RequestObserver.prefilled, first)

    def prefilling_locally(self) -> None:
        """The decode worker computes the prompt itself."""
        self.state.attempt.is_local = True
        self.emit(RequestObserver.prefilling_locally)

    def prefilled_locally(self, local: decode_pb2.LocalPrefill) -> None:
        """The decode worker has computed the prompt itself."""
        attempt = self.state.attempt
        attempt.prefilled_s = time.monotonic()
        attempt.report.record_local_prefill(local)
        self.emit(RequestObserver.prefilled_locally, local)

    def transferred(self, handoff: prefill_pb2.HandoffDone) -> None:
        """The last KV write was acknowledged."""
        attempt = self.state.attempt
        attempt.report.record_transfer(handoff, attempt.prefill.transport)
        self.emit(RequestObserver.transferred, handoff)

    def decode_began(self, admit_ms: float) -> None:
        """The decode worker has made its first step."""
        attempt = self.state.attempt
        attempt.decode_began_s = time.monotonic()
        attempt.report.decode_admit_ms = admit_ms
        self.emit(RequestObserver.decode_began, admit_ms)

    def sent(self, delta: generation_pb2.OutputDelta, now: float) -> None:
        """Appends a delta that is about to be sent to the client.

        Raises SplitserveError (OUTPUT_GAP), and emits nothing, unless the delta follows the previous one.
        """
        self.state.append(delta, now)
        self._pending_tokens += len(delta.token_ids)
        if self._pending_tokens >= self._batch_tokens:
            self._report_sent()

    def decoded(self) -> None:
        """The decode worker has finished; its output may not have been sent to the client yet."""
        if self.control is not None:
            self.control.decoded()

    def attempt_failed(self, error: SplitserveError) -> None:
        """The attempt has failed."""
        self._report_sent()
        self.state.attempt.failure = failure_text(error)

    def attempt_ended(self) -> None:
        """The attempt is over, whether completed, failed or cancelled."""
        self._report_sent()
        self.state.end_attempt(time.monotonic())

    def completed(self) -> None:
        """The whole answer was sent, except for the final `done` message."""
        self.state.completed = True
        self.emit(RequestObserver.completed)

    def _report_sent(self) -> None:
        """Reports the tokens sent since the last report: for an observer many tokens are no more work than one."""
        if count := self._pending_tokens:
            self._pending_tokens = 0
            self._batches += 1
            self._batch_tokens = 1 if self._batches < 2 else BATCH_TOKENS
            if self.control is not None:
                self.control.output_sent(count)
            self.emit(RequestObserver.sent, count)


def failure_text(error: BaseException | None) -> str:
    """Reason and message of an error, for a record; empty if the client has left. An invalid field is named instead of
    the message, which may repeat the field's content."""
    match error:
        case None | asyncio.CancelledError():
            return ""
        case InvalidArgumentError():
            return f"{error.reason}: {error.field or 'the request'}"[:MAX_FAILURE_CHARACTERS]
        case SplitserveError():
            return f"{error.reason}: {error.message}"[:MAX_FAILURE_CHARACTERS]
    return type(error).__name__
