"""What a worker needs of an engine: requests in, steps, tokens out, and the memory of its KV blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from engine.core.step_stats import TotalsByKind
from engine.core.types import EngineLoad, EngineRequest, RequestOutput, ReservedBlocks, StepResult
from engine.kv_cache.cache_events import KvEventLog
from splitserve.errors import ResourceExhaustedError

Then = Callable[[], None]
Held = Callable[[list[int] | ResourceExhaustedError], None]
"""Takes the blocks of a prefix that are held, or why they are not."""


class Engine(ABC):
    """Single-threaded: every method is called on the thread that built it.

    A request enters through `add_request` (computed here) or through `reserve` and `admit` (a peer writes the KV of
    its tokens). It ends with an output that has a finish reason, or silently through `abort`.

    A step has two halves, `begin_step` and `finish_step`. Between them the device may be computing: `add_request`,
    `reserve`, `read_back`, `admit` and `begin_step` raise BrokenInvariantError. Everything else may be called; blocks
    that are freed meanwhile are not reused before the next step.
    """

    max_step_tokens: int
    """Most tokens of one step, prompts and outputs together."""
    paces_prompts: bool
    """Whether prompts take only what streams with targets leave."""
    kv_events: KvEventLog
    """Changes of the prefix cache; may be read on any thread."""
    step_totals: TotalsByKind
    """Totals over the steps since the start; may be read on any thread."""

    @abstractmethod
    def add_request(self, request: EngineRequest) -> None:
        """Queues a request.

        Call `release_held` once after the end of a `prefill_only` request. Raises InvalidArgumentError for a request
        that can never be computed or an id in use, ResourceExhaustedError (QUEUE_FULL with a retry hint,
        KV_POOL_TOO_SMALL without).
        """

    @abstractmethod
    def abort(self, request_id: str) -> bool:
        """Ends a request without output; returns whether it was live. Idempotent. Drops output that was not taken yet.

        Reserved blocks stay quarantined until `release_writer`; those of a `prefill_only` request are held until
        `release_held`.
        """

    @abstractmethod
    def release_held(self, request_id: str) -> bool:
        """Frees the blocks of an ended `prefill_only` request; returns whether there was one. Idempotent."""

    @abstractmethod
    def hold_prefix(self, request: EngineRequest, held: Held) -> None:
        """Holds the blocks of a `prefix_only` request, which are cached here, until `release_held`.

        `held` is called with all of them in order, now or when lower tiers have brought them, or with none if one is
        gone; not if the request has been aborted. Raises InvalidArgumentError for a request that can never be held,
        FailedPreconditionError (NO_PREFIX_FETCH) where the engine's cache cannot be read, and ResourceExhaustedError
        (PREFIX_READS_FULL) where lower tiers read as much for peers as they may; once it has returned, `held` is called
        with that error instead.
        """

    @abstractmethod
    def reserve(self, request: EngineRequest, reservation: int) -> ReservedBlocks | None:
        """Reserves blocks for the KV of all of `request.token_ids`, to be written by a peer.

        None if there are not enough free blocks or no running slot now: try again later. Leading full blocks that are
        cached here are shared; the others are owned by the request and, until `release_writer`, by the writer. Raises
        like `add_request` for a request that can never fit. One that is `prefix_only` ends when it is admitted.
        """

    def read_back(self, request: EngineRequest, bytes_per_s: float, then: Then, again: Then | None) -> bool:
        """Begins to read blocks of a request's prefix from lower tiers into the prefix cache, as far as that is sooner
        than a peer's transfer of them at `bytes_per_s`, above 0.

        Whether anything is read: then `then` is called on this thread once it has been, or takes too long. What has not
        come by then is missing, as ever. By default nothing is. Where reading could spare more than asking takes, a
        store that workers share is asked first: then `again` is called in place of `then`, once it has answered or
        takes too long. None: it has been asked.
        """
        return False

    @abstractmethod
    def reservations_wait(self, waits: bool) -> None:
        """Says whether reservations wait that were not granted: what ends streams sooner helps them. An engine that
        never rests for a neighbour's sake need not know."""

    @abstractmethod
    def keep_prompt_room(self) -> None:
        """From now on reservations leave room for a prompt: blocks for the longest sequence, but at most half of all,
        and a running slot. Only the first reservation may take them.

        For workers that compute prompts for peers from which they take reservations' KV: without room, prompts here
        could wait for reservations whose prompts wait there.
        """

    @abstractmethod
    def cached_tokens(self, request: EngineRequest) -> int:
        """Leading tokens of a request that need not be computed here, by the present prefix cache; a lower bound."""

    @abstractmethod
    def admit(self, reservation: int, first_token_id: int) -> RequestOutput | None:
        """Starts decoding a reserved sequence whose KV has been written, from its first output token on.

        The first token's text counts as emitted, by the worker that sampled it. Returns the last output if the answer
        ends with it, else None. Raises NotFoundError for a reservation that is not live (any more),
        InvalidArgumentError for a token outside the vocabulary or the request's grammar.
        """

    @abstractmethod
    def release_writer(self, reservation: int) -> bool:
        """Ends the writer's ownership of a reservation's blocks; returns whether it had any. Idempotent."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step can do anything now; False while everything waits for blocks, or streams that are ahead of
        their targets for a neighbour that computes on this worker's cores."""

    @abstractmethod
    def next_deadline(self) -> float:
        """When to ask `has_work` again at the latest, on `time.monotonic`: at the next deadline of a request, or to end
        a rest for a neighbour's sake. Infinity if there is neither."""

    @property
    def lent(self) -> bool:
        """Whether a neighbour computes on this worker's cores while this one rests: wake up less often then."""
        return False

    @abstractmethod
    def begin_step(self, computing: Callable[[float | None], None] = lambda expected_s: None) -> None:
        """The first half of a step: expires requests and queues the next batch at the device, after a call of
        `computing` with the seconds that this will take, None if unknown."""

    @abstractmethod
    def finish_step(self) -> None:
        """The second half: waits for the tokens and updates the sequences. `take_result` returns the result."""

    def step(self) -> StepResult:
        """Runs both halves of a step and returns its result."""
        self.begin_step()
        self.finish_step()
        result = self.take_result()
        assert result is not None
        return result

    @property
    @abstractmethod
    def result_can_wait(self) -> bool:
        """Whether to take the latest result only after the next `begin_step`, while the device computes."""

    @abstractmethod
    def take_result(self) -> StepResult | None:
        """The result of the latest finished step, once; must be taken before the next one is finished."""

    @abstractmethod
    def load(self) -> EngineLoad:
        """The present load."""

    @abstractmethod
    def close(self) -> None:
        """Releases the device."""
