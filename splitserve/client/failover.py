"""Which coordinator a client uses, and how a generation goes on at another one. No I/O."""

from __future__ import annotations

import time

from splitserve.addresses import check_address
from splitserve.client.call_errors import CONNECTION_LOST, ended_early, took_too_long
from splitserve.client.types import Completion, CompletionAccumulator, Delta
from splitserve.errors import InvalidArgumentError, SplitserveError, UnavailableError
from splitserve.tracing.context import TraceContext
from splitserve.v1 import generation_pb2, inference_pb2


class Targets:
    """The coordinators of one cluster, "host:port,host:port". One is in use at a time."""

    def __init__(self, target: str) -> None:
        """Raises InvalidArgumentError."""
        self.addresses = [check_address(address.strip(), "target") for address in target.split(",")]
        self.index = 0

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def current(self) -> str:
        """The address in use."""
        return self.addresses[self.index]

    def leave(self, index: int) -> None:
        """Moves on from the unavailable coordinator `index`, unless a concurrent call has done so already."""
        if self.index == index:
            self.index = (index + 1) % len(self.addresses)


class Failover:
    """The attempts of one call. It fails once all coordinators, one after the other, have failed without progress."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._failures = 0
        self.index = targets.index
        """Index of the coordinator to call now."""

    @property
    def target(self) -> str:
        """Address of the coordinator to call now."""
        return self._targets.addresses[self.index]

    def progressed(self) -> None:
        """A part of the answer has arrived: failures are counted from 0 again."""
        self._failures = 0

    def failed(self, error: SplitserveError) -> None:
        """Moves on to the next coordinator. Raises the error unless it is UnavailableError and one is left to try."""
        self._failures += 1
        if self._failures >= len(self._targets) or not isinstance(error, UnavailableError):
            raise error from None
        self._targets.leave(self.index)
        self.index = self._targets.index


class GenerationSession:
    """One generation, across the coordinators that serve parts of it.

    A token depends only on the prompt, the tokens before it, the seed and its position. So a coordinator that gets
    these goes on exactly where another one stopped.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        targets: Targets,
        timeout_s: float,
        traceparent: str | None = None,
    ) -> None:
        """Raises InvalidArgumentError (traceparent)."""
        self.request = request
        """The message for the next call."""
        self.metadata = _trace_metadata(traceparent)
        """Metadata of each call, beside the client's own."""
        self.timeout_s = timeout_s
        self.failover = Failover(targets)
        self.received = False
        """Whether the coordinator in use has sent something."""
        self._deadline_s = time.monotonic() + timeout_s
        self._accumulator = CompletionAccumulator(request.model)
        self._started: inference_pb2.GenerationStart | None = None
        self._finish_reason = generation_pb2.FINISH_REASON_UNSPECIFIED

    def left_s(self) -> float:
        """Time for the next call. Raises DeadlineExceededError."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise took_too_long(self.failover.target, self.timeout_s)
        return left_s

    def take(self, response: inference_pb2.GenerateResponse) -> Delta | Completion:
        """The next item of the answer; a Completion is the last. Raises SplitserveError (STREAM_GAP, BAD_ANSWER)."""
        self.received = True
        if response.HasField("started") and self._started is None:
            self._started = response.started
        if response.HasField("done"):
            return self._accumulator.finish(response.done)
        delta = self._accumulator.add(response.delta)
        self._finish_reason = response.delta.finish_reason
        self.failover.progressed()
        return delta

    def ended(self) -> None:
        """The stream ended without a Completion: prepares the next call, or raises UnavailableError."""
        self.failed(ended_early(self.failover.target))

    def failed(self, error: SplitserveError) -> None:
        """The call failed: prepares the next one, or raises the error."""
        if self._accumulator.token_ids and self._started is None:
            raise error from None  # an answer cannot go on without the message that describes its start
        # Of what a request carries only a grammar is known to be able to end a coordinator. Another request is asked
        # again: most that wait when a coordinator ends have nothing to do with its end.
        has_grammar = self.request.sampling.HasField("grammar")
        if self._started is None and has_grammar and error.reason == CONNECTION_LOST:
            message = f"{error.message}; no other is asked, as this request's grammar may have ended it"
            raise UnavailableError(message, reason=CONNECTION_LOST) from None
        self.failover.failed(error)
        self.received = False
        if self._started is not None:
            self._resume(self._started)

    def _resume(self, started: inference_pb2.GenerationStart) -> None:
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        request.request_id = started.request_id
        request.sampling.seed = started.seed
        request.resume.Clear()
        request.resume.token_ids.extend(self._accumulator.token_ids)
        request.resume.served_model = started.served_model
        request.resume.finish_reason = self._finish_reason
        request.resume.traceparent = started.traceparent
        self.request = request


def _trace_metadata(traceparent: str | None) -> tuple[tuple[str, str], ...]:
    if traceparent is None:
        return ()
    if TraceContext.parse(traceparent) is None:
        message = "traceparent must be a W3C trace context, 00-TRACE_ID-SPAN_ID-FLAGS"
        raise InvalidArgumentError(message, field="traceparent")
    return (("traceparent", traceparent),)
