"""The coordinator's own book of prompts without a first token: what each worker has to compute, and by when.

Reports are up to half a second old, in which a coordinator sends several prompts. The book knows its own at once; it
does not know those of other coordinators.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from coordinator.request.caller import CLASS_RANKS
from coordinator.request.observer import RequestObserver
from coordinator.request.state import RequestState
from coordinator.workers.snapshot import WorkerKey
from engine.pacing.step_time_fit import PromptFit
from splitserve.v1 import decode_pb2, prefill_pb2


@dataclass(frozen=True, slots=True)
class BookedPrompt:
    """A prompt at a worker. `due_s` is on the coordinator's monotonic clock; infinity: no target."""

    tokens: int
    cached_tokens: int
    due_s: float
    class_rank: int
    decode: WorkerKey | None = None
    """Where the answer will be decoded."""

    def goes_before(self, due_s: float, class_rank: int, now: float) -> bool:
        """Whether a worker serves it before one of that class that is due then: as triage does, late ones after those
        that can be in time."""
        if self.class_rank != class_rank:
            return self.class_rank > class_rank
        return now <= self.due_s <= due_s


class _Page:
    """The prompts of one worker."""

    def __init__(self) -> None:
        self.prompts: dict[str, BookedPrompt] = {}
        self.since_s = 0.0
        """When it began with the prompt that it computes now, as far as seen from here."""


class PromptBook:
    """Prompts by worker boot, each under a name of its own. A page ends with its last prompt, so workers that have left
    leave nothing behind. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._pages: dict[WorkerKey, _Page] = defaultdict(_Page)
        self._places: dict[str, WorkerKey] = {}
        self._promised: defaultdict[WorkerKey, dict[str, BookedPrompt]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._places)

    def place_of(self, name: str) -> WorkerKey | None:
        """Where a prompt is booked."""
        return self._places.get(name)

    def has_prompts(self, worker: WorkerKey) -> bool:
        """Whether any is booked at a worker."""
        return worker in self._pages

    def ahead_s(self, worker: WorkerKey, due_s: float, class_rank: int, fit: PromptFit, now: float) -> float:
        """Seconds of work at a worker before a prompt of that class that is due then."""
        page = self._pages.get(worker)
        if page is None:
            return 0.0
        work = [
            fit.chunk_s(prompt.tokens, prompt.cached_tokens)
            for prompt in page.prompts.values()
            if prompt.goes_before(due_s, class_rank, now)
        ]
        # One of them is under way; the longest bounds how far it can have come.
        return sum(work) - min(now - page.since_s, max(work)) if work else 0.0

    def promised(self, worker: WorkerKey) -> int:
        """Number of booked prompts whose answers a worker will decode."""
        return len(self._promised.get(worker, ()))

    def promised_before(self, worker: WorkerKey, due_s: float, class_rank: int, now: float) -> int:
        """How many of those are served before a prompt of that class that is due then, so that their streams take of
        the worker's time until then. Late ones come once there is time for them, which may be long after."""
        promised = self._promised.get(worker)
        if promised is None:
            return 0
        return sum(prompt.goes_before(due_s, class_rank, now) for prompt in promised.values())

    def place(self, name: str, worker: WorkerKey, prompt: BookedPrompt, now: float) -> None:
        """Books a prompt at a worker, and nowhere else any more."""
        self.remove(name, now)
        page = self._pages[worker]
        if not page.prompts:
            page.since_s = now
        page.prompts[name] = prompt
        if prompt.decode is not None:
            self._promised[prompt.decode][name] = prompt
        self._places[name] = worker

    def remove(self, name: str, now: float) -> None:
        """A prompt has been computed, or is nobody's work any more. Idempotent."""
        worker = self._places.pop(name, None)
        if worker is None:
            return
        page = self._pages[worker]
        prompt = page.prompts.pop(name)
        if prompt.decode is not None:
            del self._promised[prompt.decode][name]
            if not self._promised[prompt.decode]:
                del self._promised[prompt.decode]
        page.since_s = now
        if not page.prompts:
            del self._pages[worker]


class PromptBookkeeper(RequestObserver):
    """Keeps a book from the events of requests."""

    def __init__(self, book: PromptBook) -> None:
        self._book = book

    def routed(self, state: RequestState) -> None:
        """See RequestObserver. The prefill worker is to compute the prompt, until something else is known."""
        self._place(state, state.attempt.prefill.key, state.attempt.expected_cached_tokens)

    def prefix_missed(self, state: RequestState, tokens: int) -> None:
        """See RequestObserver. The prompt is more work than was booked."""
        self._place(state, state.attempt.prefill.key, state.attempt.expected_cached_tokens)

    def expected_locally(self, state: RequestState, cached_tokens: int) -> None:
        """The decode worker, which has so many tokens cached, may compute the prompt of the latest attempt itself."""
        if state.attempt.decode is not None:
            self._place(state, state.attempt.decode.key, cached_tokens)

    def prefilling(self, state: RequestState) -> None:
        """See RequestObserver. It is the prefill worker after all."""
        if self._book.place_of(state.attempt.attempt_id) != state.attempt.prefill.key:
            self._place(state, state.attempt.prefill.key, state.attempt.expected_cached_tokens)

    def prefilled(self, state: RequestState, first: prefill_pb2.FirstToken) -> None:
        """See RequestObserver."""
        self._remove(state)

    def prefilled_locally(self, state: RequestState, local: decode_pb2.LocalPrefill) -> None:
        """See RequestObserver."""
        self._remove(state)

    def attempt_ended(self, state: RequestState) -> None:
        """See RequestObserver. However it has ended, its prompt is nobody's work any more."""
        self._remove(state)

    def _place(self, state: RequestState, worker: WorkerKey, cached_tokens: int) -> None:
        request, now = state.request, time.monotonic()
        tokens = max(1, len(request.prompt) + len(state.token_ids) - cached_tokens)
        rank = CLASS_RANKS[request.caller.priority_class]
        decode = state.attempt.decode
        prompt = BookedPrompt(
            tokens, cached_tokens, due_of(state, now), rank, decode.key if decode is not None else None
        )
        self._book.place(state.attempt.attempt_id, worker, prompt, now)

    def _remove(self, state: RequestState) -> None:
        self._book.remove(state.attempt.attempt_id, time.monotonic())


def due_of(state: RequestState, now: float) -> float:
    """When a request's first token is due, or the next one of an answer that goes on; infinity without a target."""
    targets = state.request.targets
    if targets is None or targets.ttft_s is None:
        return float("inf")
    return (now if state.token_ids else state.request.received_s) + targets.ttft_s
