"""The events of a request. `RequestEvents` is the one place that writes the request's state and notifies observers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, Self

from coordinator.request.caller import Caller
from coordinator.request.candidates import Candidate, FetchedPrefix
from coordinator.request.state import RequestState, Waits
from coordinator.workers.snapshot import Worker
from splitserve.errors import InvalidArgumentError, SplitserveError
from splitserve.logs import log_exception
from splitserve.v1 import decode_pb2, generation_pb2, inference_pb2, prefill_pb2

P = ParamSpec("P")
MAX_FAILURE_CHARACTERS = 300
"""Of an error that an attempt's record keeps."""
TOLD_TOKENS = 8
"""How many tokens of a stream observers are told of at once, half a KV block or less."""


class RequestObserver:
    """Base class of observers, with a no-op for each event, roughly in the order in which they occur.

    Methods are called on the request's path after its state was written, so they must be cheap. Exceptions are logged.
    """

    __slots__ = ()

    def arrived(self, state: RequestState) -> None:
        """The request is valid and within its quotas: it counts as demand from now on, served or not."""

    def routed(self, state: RequestState) -> None:
        """An attempt begins: `state.attempt` names its workers."""

    def prefix_missed(self, state: RequestState, tokens: int) -> None:
        """The prefill worker lacks so many tokens that a fetch was to bring; `state.attempt` says so already."""

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

    def decoded(self, state: RequestState) -> None:
        """The decode worker has finished. Its output may not have been sent to the client yet."""

    def sent(self, state: RequestState, output_tokens: int) -> None:
        """`output_tokens` more tokens were sent to the client. The first call implies that the prompt is computed. Of
        each attempt the first two deltas are told at once, later ones TOLD_TOKENS at a time, the rest at its end."""

    def attempt_completed(self, state: RequestState) -> None:
        """The attempt has sent all of its output."""

    def attempt_failed(self, state: RequestState, error: SplitserveError) -> None:
        """The attempt has failed; `state.attempt.suspect` is the worker at fault."""

    def attempt_ended(self, state: RequestState) -> None:
        """The attempt is over, whether completed, failed or cancelled; its workers are being notified."""

    def completed(self, state: RequestState) -> None:
        """The whole answer was sent, except for the final `done` message."""

    def ended(self, state: RequestState, error: BaseException | None) -> None:
        """The request is over, with or without an error. Always the last event."""


class RunningAttempts(RequestObserver):
    """The attempts that are under way; for those who look at all of them from time to time."""

    def __init__(self) -> None:
        self.attempts: dict[str, RequestState] = {}
        """By attempt id."""
        self._requests: dict[int, RequestState] = {}

    def has(self, state: RequestState) -> bool:
        """Whether a request that was routed has not ended, though it may be between two attempts."""
        return id(state) in self._requests

    def routed(self, state: RequestState) -> None:
        """See RequestObserver."""
        self._requests[id(state)] = self.attempts[state.attempt.attempt_id] = state

    def attempt_ended(self, state: RequestState) -> None:
        """See RequestObserver."""
        self.attempts.pop(state.attempt.attempt_id, None)

    def ended(self, state: RequestState, error: BaseException | None) -> None:
        """See RequestObserver."""
        self._requests.pop(id(state), None)


class RequestEvents:
    """The events of one request; a context manager whose exit emits `ended`.

    `emit` only notifies observers; the other methods write the state first. An observer that raises neither fails the
    request nor keeps the event from other observers.
    """

    __slots__ = ("_listeners", "_observers", "_tell_at", "_told", "_untold", "state")

    def __init__(self, state: RequestState, observers: Iterable[RequestObserver] = ()) -> None:
        self.state = state
        self._observers = tuple(observers)
        self._listeners = _listeners(tuple(map(type, self._observers)))
        self._untold, self._tell_at = 0, 1
        """Tokens sent that observers have not been told of, and how many of them they are told of."""
        self._told = 0
        """How often they were told of tokens of this attempt."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell_sent()
        self.emit(RequestObserver.ended, error)

    def observe(self, observer: RequestObserver) -> None:
        """Adds an observer, for all events from now on."""
        self._observers = (*self._observers, observer)
        self._listeners = _listeners(tuple(map(type, self._observers)))

    def emit(
        self,
        event: Callable[Concatenate[RequestObserver, RequestState, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Notifies all observers of an event, given as a method of RequestObserver."""
        observers = self._observers
        for position, listener in self._listeners.get(event.__name__, ()):
            try:
                listener(observers[position], self.state, *args, **kwargs)
            except Exception as error:
                log_exception("observer.failed", error, observer=listener.__qualname__)

    def waited(self, waits: Waits, predicted_ttft_s: float = 0.0) -> None:
        """Records time that the request waited for admission, and the forecast of it. Emits nothing."""
        self.state.waits += waits
        self.state.predicted_ttft_s = predicted_ttft_s

    def admitted(self, now: float) -> None:
        """All of admission is over. Emits nothing."""
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
        self._told, self._tell_at = 0, 1
        self.emit(RequestObserver.routed)

    def prefix_fetched(self, fetched: FetchedPrefix) -> None:
        """Records a fetch before the attempt. One that failed leaves its tokens to be computed."""
        attempt = self.state.attempt
        attempt.fetched = fetched
        if fetched.failure and fetched.taker == attempt.prefill.worker_id:
            attempt.expected_cached_tokens -= fetched.tokens
            self.emit(RequestObserver.prefix_missed, fetched.tokens)

    def reserving(self, now: float) -> None:
        """See RequestObserver."""
        self.state.attempt.reserving_s = now
        self.emit(RequestObserver.reserving)

    def prefilling(self, now: float) -> None:
        """See RequestObserver."""
        self.state.attempt.prefilling_s = now
        self.emit(RequestObserver.prefilling)

    def prefilled(self, first: prefill_pb2.FirstToken) -> None:
        """See RequestObserver."""
        attempt = self.state.attempt
        attempt.prefilled_s = time.monotonic()
        attempt.report.record_prefill(first)
        self.emit(RequestObserver.prefilled, first)

    def prefilling_locally(self) -> None:
        """See RequestObserver."""
        self.state.attempt.is_local = True
        self.emit(RequestObserver.prefilling_locally)

    def prefilled_locally(self, local: decode_pb2.LocalPrefill) -> None:
        """See RequestObserver."""
        attempt = self.state.attempt
        attempt.prefilled_s = time.monotonic()
        attempt.report.record_local_prefill(local)
        self.emit(RequestObserver.prefilled_locally, local)

    def transferred(self, handoff: prefill_pb2.HandoffDone) -> None:
        """See RequestObserver."""
        attempt = self.state.attempt
        attempt.report.record_transfer(handoff, attempt.prefill.transport)
        self.emit(RequestObserver.transferred, handoff)

    def decode_began(self, admit_ms: float) -> None:
        """See RequestObserver."""
        attempt = self.state.attempt
        attempt.decode_began_s = time.monotonic()
        attempt.report.decode_admit_ms = admit_ms
        self.emit(RequestObserver.decode_began, admit_ms)

    def sent(self, delta: generation_pb2.OutputDelta, now: float) -> None:
        """Appends a delta that is about to be sent to the client.

        Raises SplitserveError (OUTPUT_GAP), and tells nothing, unless the delta follows the previous one.
        """
        self.state.append(delta, now)
        self._untold += len(delta.token_ids)
        if self._untold >= self._tell_at:
            self._tell_sent()

    def attempt_failed(self, error: SplitserveError) -> None:
        """See RequestObserver."""
        self._tell_sent()
        self.state.attempt.failure = failure_text(error)
        self.emit(RequestObserver.attempt_failed, error)

    def attempt_ended(self) -> None:
        """See RequestObserver."""
        self._tell_sent()
        self.state.end_attempt(time.monotonic())
        self.emit(RequestObserver.attempt_ended)

    def completed(self) -> None:
        """See RequestObserver."""
        self.state.completed = True
        self.emit(RequestObserver.completed)

    def _tell_sent(self) -> None:
        """Tells what has been sent: for an observer many tokens are no more work than one."""
        if count := self._untold:
            self._untold = 0
            self._told += 1
            self._tell_at = 1 if self._told < 2 else TOLD_TOKENS
            self.emit(RequestObserver.sent, count)


def failure_text(error: BaseException | None) -> str:
    """Reason and message of an error, for a record; empty where a client has just left. The message of an error that
    finds fault with a field may repeat what is in it, so the field is named instead."""
    match error:
        case None | asyncio.CancelledError():
            return ""
        case InvalidArgumentError():
            return f"{error.reason}: {error.field or 'the request'}"[:MAX_FAILURE_CHARACTERS]
        case SplitserveError():
            return f"{error.reason}: {error.message}"[:MAX_FAILURE_CHARACTERS]
    return type(error).__name__


_EVENTS = tuple(name for name in vars(RequestObserver) if not name.startswith("_"))


@lru_cache(maxsize=256)
def _listeners(
    kinds: tuple[type[RequestObserver], ...],
) -> Mapping[str, Sequence[tuple[int, Callable[..., None]]]]:
    """What is called for each event, given the classes of a request's observers: the positions of those that override
    its method, and their functions. Requests have the same few sets of observers."""
    found: dict[str, list[tuple[int, Callable[..., None]]]] = {}
    for position, kind in enumerate(kinds):
        for name in _EVENTS:
            if getattr(kind, name) is not getattr(RequestObserver, name):
                found.setdefault(name, []).append((position, getattr(kind, name)))
    return found


class QuotaPlugin(Protocol):
    """A caller's quota, asked before any work is done for a request."""

    def entered(
        self, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> AbstractContextManager[AdmissionPlugin]:
        """Holds the request's place while the context is open. Its value charges what is known once the prompt is
        tokenized. Never waits. Raises ResourceExhaustedError with a retry hint."""


class AdmissionPlugin(Protocol):
    """A step between a valid request and the workers: a tenant's quota, the capacity queue."""

    async def admit(self, events: RequestEvents) -> None:
        """Returns once the request is admitted; may wait. Adds an observer that releases what the request holds.

        Raises ResourceExhaustedError with a retry hint, or PermissionDeniedError.
        """
