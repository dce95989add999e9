"""The engine as a worker sees it: requests in, steps, tokens out, and the memory of its KV blocks."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.model_runner import Logprob, ModelFacts, OutputMatcher, PromptLogprobs, SamplingParams
from engine.kv_cache.block_pool import KvEventLog
from engine.scheduling.step_times import TotalsByKind
from engine.scheduling.waiting_queue import FIRST_COME, Precedence
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.generation.kv_blocks import Adapter
from splitserve.latency_model import UNMEASURED, LatencyModel
from splitserve.tracing.context import TraceContext


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RequestGrammar(Protocol):
    """The compiled grammar of a request's output. Thread-safe."""

    def matcher(self) -> OutputMatcher:
        """A matcher for a new, empty output."""


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends. `eos_token_ids` come from the model, `stop_token_ids` from the client."""

    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    keep_special_tokens: bool = False
    """Whether the text, in which stop strings are looked for, has the names of special tokens."""
    keep_stop: bool = False
    """Whether the text has the stop string or stop token that ends it."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a pooling model computes its result; see `PoolingParams` in the protos."""

    dimensions: int | None = None
    """None: all."""
    use_activation: bool | None = None
    """None: as the model says."""
    second_begins: int = 0
    """Where the second text of a pair begins; 0: the model does not tell texts apart."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to compute.

    `token_ids` is the prompt, followed by `prior_output_tokens` tokens that earlier attempts emitted. These count as
    output for penalties, positions, stop conditions and detokenization. `deadline_s` is on the engine's clock
    (`time.monotonic`).
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    prior_output_tokens: int = 0
    precedence: Precedence = FIRST_COME
    cache_salt: bytes = b""
    """Salts the hashes of its blocks; see `splitserve.generation.kv_blocks.chain_salt`."""
    deadline_s: float = float("inf")
    grammar: RequestGrammar | None = None
    """Structured output: the grammar that the answer must match."""
    prefill_only: bool = False
    """Whether to end after one new token, and keep the blocks until `Engine.release_held`.

    The token's output has a finish reason only if the whole answer ends with it.
    """
    trace: TraceContext | None = None
    """The parent span of this worker's spans."""
    adapter: Adapter | None = None
    """The LoRA adapter that is applied to the base model; None: the base model alone."""
    tpot_s: float | None = None
    """The TPOT target in seconds a token, which bounds the prompt tokens of a step beside this stream."""
    first_due_s: float = float("inf")
    """When the first token is due by its TTFT target, on the engine's clock."""
    pooling: PoolingParams | None = None
    """None: tokens are sampled."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt itself, without the output of earlier attempts."""
        return len(self.token_ids) - self.prior_output_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted. They leave with the first output token."""
        return self.sampling.prompt_logprobs is not None and not self.prior_output_tokens

    @property
    def adapter_fingerprint(self) -> str:
        """The adapter's fingerprint, as in tickets; empty without an adapter."""
        return self.adapter.fingerprint if self.adapter else ""


@dataclass(slots=True)
class RequestOutput:
    """Progress of one request in one step.

    `first_position` is the output position of `token_ids[0]`, tokens of earlier attempts included. `text` is the text
    that these tokens completed. `failure` is (reason, message) if the engine failed the request; `finish_reason` is
    then ABORT.
    """

    request_id: str
    first_position: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: tuple[str, str] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """With the first output token, if they are wanted and the prompt was computed here."""
    pooled: Sequence[float] = ()
    """The result of a pooling model."""

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing but tokens and text."""
        return not (self.finish_reason or self.logprobs or self.failure or self.prompt_logprobs)


@dataclass(slots=True)
class ChunkProgress:
    """KV of one request that became final in a step: that of tokens [start, end).

    `block_ids` is the whole block table of the sequence so far, in sequence order. After a prefix-cache hit the first
    progress starts at 0 and covers the cached tokens too.
    """

    request_id: str
    start: int
    end: int
    block_ids: list[int]
    cached_tokens: int
    group_blocks: tuple[int, ...] = ()
    """Number of `block_ids` for each group of layers; empty: there is one group."""


@dataclass(slots=True)
class StepResult:
    """Everything one engine step produced."""

    outputs: list[RequestOutput] = field(default_factory=list)
    progress: list[ChunkProgress] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    """Requests that were in a step for the first time, with the number of their tokens found in the prefix cache."""
    scheduled_tokens: int = 0
    duration_s: float = 0.0

    def add(self, output: RequestOutput | None) -> None:
        """Adds an output, if there is one."""
        if output is not None:
            self.outputs.append(output)

    def drop(self, request_id: str) -> bool:
        """Removes the outputs of a request; returns whether there were any."""
        before = len(self.outputs)
        self.outputs = [output for output in self.outputs if output.request_id != request_id]
        return len(self.outputs) < before


@dataclass(frozen=True, slots=True)
class ReservedBlocks:
    """Blocks reserved for KV that a peer will write: `block_ids`, in sequence order.

    The first one begins with token `cached_tokens`, a multiple of the block size; the tokens before are cached here.
    `group_blocks`: number of blocks for each group of layers, one group after the other; empty: there is one group.
    """

    block_ids: tuple[int, ...]
    cached_tokens: int
    group_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of an engine's load; see `WorkerLoad` in the protos."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    reserved_blocks: int = 0
    quarantined_blocks: int = 0
    referenced_blocks: int = 0
    latency: LatencyModel = UNMEASURED
    streams: int | None = None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on requests from the model and the pool, in tokens, and whether a request may have its prompt scored."""

    context_tokens: int
    pool_tokens: int
    vocabulary_size: int
    scores_prompts: bool = True

    @classmethod
    def of(cls, facts: ModelFacts, context_tokens: int | None, pool_tokens: int) -> RequestLimits:
        """The bounds of a model, with the setting `EngineConfig.context_tokens`, and of a pool of `pool_tokens`."""
        context = min(facts.context_tokens, context_tokens or facts.context_tokens)
        return cls(context, pool_tokens, facts.vocabulary_size, facts.scores_prompts)

    @property
    def sequence_tokens(self) -> int:
        """Longest sequence, prompt and output. The last token needs no KV."""
        return min(self.context_tokens, self.pool_tokens + 1)

    def check_first_token(self, token_id: int) -> None:
        """Raises InvalidArgumentError for a first token of a handoff that is outside the vocabulary."""
        if not 0 <= token_id < self.vocabulary_size:
            raise InvalidArgumentError(f"first token {token_id} is out of range", field="first_token_id")

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidArgumentError, or ResourceExhaustedError (KV_POOL_TOO_SMALL) if the pool can never hold it."""
        tokens = request.token_ids
        if not tokens:
            raise InvalidArgumentError("the prompt is empty", field="prompt")
        if min(tokens) < 0 or max(tokens) >= self.vocabulary_size:
            message = f"token ids must be in 0..{self.vocabulary_size - 1}"
            raise InvalidArgumentError(message, field="token_ids")
        if request.scores_prompt and not self.scores_prompts:
            message = "prompt_logprobs is not supported for this model"
            raise InvalidArgumentError(message, reason="UNSUPPORTED_FIELD", field="sampling.prompt_logprobs")
        prior = request.prior_output_tokens
        if not 0 <= prior < len(tokens):
            message = f"prior_output_tokens must be in 0..{len(tokens) - 1}"
            raise InvalidArgumentError(message, field="prior_output_tokens")
        if request.stop.max_tokens <= prior:
            message = f"max_tokens must exceed the {prior} tokens that were output already"
            raise InvalidArgumentError(message, field="max_tokens")
        if len(tokens) + (request.pooling is None) > self.context_tokens:
            needed = "tokens must hold it and one output token"
            message = f"the prompt has {len(tokens)} tokens; the context of {self.context_tokens} {needed}"
            raise InvalidArgumentError(message, field="prompt")
        if len(tokens) > self.pool_tokens:
            message = f"the prompt has {len(tokens)} tokens, the KV pool holds {self.pool_tokens}"
            raise ResourceExhaustedError(message, reason="KV_POOL_TOO_SMALL")


class Engine(ABC):
    """Single-threaded: every method is called on the thread that built it.

    A request enters through `add_request` (computed here) or through `reserve` and `admit` (a peer writes the KV of
    its tokens). It ends with an output that has a finish reason, or silently through `abort`.

    A step has two halves, `begin_step` and `finish_step`. Between them the device may be computing: `add_request`,
    `reserve`, `admit` and `begin_step` raise BrokenInvariantError. Everything else may be called; blocks
    that are freed meanwhile are not reused before the next step.
    """

    max_step_tokens: int
    """Maximum number of tokens of one step, prompts and outputs together."""
    kv_events: KvEventLog
    """Changes of the prefix cache; may be read on any thread."""
    step_totals: TotalsByKind
    """Totals over the steps since the start; may be read on any thread."""

    @abstractmethod
    def add_request(self, request: EngineRequest) -> None:
        """Queues a request.

        Once a `prefill_only` request has ended, call `release_held`. Raises InvalidArgumentError for a request
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
    def reserve(self, request: EngineRequest, reservation: int) -> ReservedBlocks | None:
        """Reserves blocks for the KV of all of `request.token_ids`, to be written by a peer.

        None if there are not enough free blocks or no running slot now: try again later, or call `abort`, because the
        engine may have begun to make room. Leading full blocks that are cached here are shared; the others are owned by
        the request and, until `release_writer`, by the writer. Raises like `add_request` for a request that can never
        fit.
        """

    @abstractmethod
    def keep_prompt_room(self, keeps: bool) -> None:
        """Whether reservations from now on leave room for a prompt: blocks for the longest sequence, at most half of
        all blocks, and a running slot. Only a reservation beside no other may take this room.

        It is for two workers that compute prompts for each other. Without room, the prompts of each could wait for
        blocks held by its reservations, whose own prompts wait at the other worker.
        """

    @abstractmethod
    def cached_tokens(self, request: EngineRequest) -> int:
        """Leading tokens of a request that are in the prefix cache now; a lower bound."""

    @abstractmethod
    def admit(self, reservation: int, first_token_id: int) -> RequestOutput | None:
        """Starts decoding a reserved sequence whose KV has been written, from its first output token on.

        The first token's text counts as emitted, by the worker that sampled it. Returns the last output if the answer
        ends with it, else None. Raises NotFoundError for a reservation that is not live,
        InvalidArgumentError for a token outside the vocabulary or the request's grammar.
        """

    @abstractmethod
    def release_writer(self, reservation: int) -> bool:
        """Ends the writer's ownership of a reservation's blocks; returns whether it had any. Idempotent."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step can do anything now; False while everything waits for blocks."""

    @abstractmethod
    def next_deadline(self) -> float:
        """The next deadline of a request, on `time.monotonic`, infinity if there is none: call `has_work` again by
        then."""

    def collect(self) -> None:
        """Between two steps: goes on with sequences whose grammar has answered. Their outputs are in the next result.
        Engines whose sequences never wait for a grammar do nothing."""
        return

    @abstractmethod
    def begin_step(self, computing: Callable[[float | None], None] = lambda expected_s: None) -> None:
        """The first half of a step: expires requests and queues the next batch at the device. Before that it calls
        `computing` with the seconds that the step will take, None if unknown."""

    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        """Has `poll` called repeatedly, on this thread, while a device computes a step: transports of device memory
        have no progress thread. Ignored by engines that do not wait for a device."""
        return

    @abstractmethod
    def finish_step(self) -> None:
        """The second half: waits for the tokens and updates the sequences. `take_result` returns the result."""

    def step(self) -> StepResult:
        """Runs `collect` and both halves of a step; returns the outputs of all three."""
        self.collect()
        early = self.take_result()
        self.begin_step()
        self.finish_step()
        result = self.take_result()
        assert result is not None
        if early is not None:
            result.outputs[:0], result.progress[:0] = early.outputs, early.progress
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
        """The load now."""

    @abstractmethod
    def close(self) -> None:
        """Releases the device."""
