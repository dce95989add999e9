"""The engine's inputs and outputs, as plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.precedence import FIRST_COME, Precedence
from engine.pacing.step_time_fit import DecodeStepFit, PromptFit
from engine.pacing.token_clock import ServiceTargets
from splitserve.errors import InvalidArgumentError, ResourceExhaustedError, SplitserveError
from splitserve.generation.kv_blocks import Adapter
from splitserve.tracing.context import TraceContext


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the model that the rest of the worker needs. `adapters`: those that requests may name."""

    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    adapters: Mapping[str, Adapter] = field(default_factory=dict)


class OutputMatcher(Protocol):
    """The state of one output within its grammar. Used on the engine thread."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that may be sampled to end the answer where the grammar is complete."""

    @property
    def complete(self) -> bool:
        """Whether the output is complete and nothing can follow."""

    def leading(self, token_ids: Sequence[int]) -> int:
        """How many of these next tokens the grammar allows without ending with them."""

    def after(self, token_ids: Sequence[int]) -> OutputMatcher:
        """A matcher of the output with these next tokens, all of them `leading`."""

    @property
    def error(self) -> str:
        """Why the grammar cannot continue; empty while it can."""

    @property
    def raw(self) -> Any:
        """The library's own object, for computing several masks at a time."""

    def advance(self, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """Consumes the output tokens of a sequence, `token_ids` in whole, that are new since the last call. Raises
        InvalidArgumentError (GRAMMAR_FAILED) for a token that the grammar does not allow.
        """

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Writes the mask of the next token: int32 `[ceil(vocabulary / 32)]`, one bit per token."""


class RequestGrammar(Protocol):
    """The compiled grammar of a request's output. Thread-safe."""

    def matcher(self) -> OutputMatcher:
        """A matcher for a new, empty output."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Ranges are those of protos/splitserve/v1/generation.proto, already checked."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the token is always the argmax."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends. `eos_token_ids` come from the model, `stop_token_ids` from the client."""

    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


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
    """The span that this worker's spans are part of."""
    adapter: Adapter | None = None
    """What computes it beside the base model."""
    targets: ServiceTargets | None = None
    """What its client was promised; prompts beside it are paced by that, see `engine.pacing.token_clock`."""
    prefix_only: bool = False
    """Whether nothing is computed: its KV is written by a peer and stays in the prefix cache, or is read from there."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt itself, without the output of earlier attempts."""
        return len(self.token_ids) - self.prior_output_tokens

    @property
    def adapter_fingerprint(self) -> str:
        """What a ticket says of the adapter; empty without one."""
        return self.adapter.fingerprint if self.adapter else ""


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step. A tuple: each step makes many, and a frozen dataclass costs more to make.

    The step computes positions [`num_computed`, `num_computed + num_new`) of `token_ids`, which is the whole sequence
    so far, prompt and output; it is shared with the scheduler and must not be changed. `block_ids` is the block table
    and covers those positions. With `sample`, the last computed position is the end of the sequence, and its next token
    is sampled. The output begins at `prompt_tokens` (for penalties and the position of the sampled token). With a
    `draft`, which guesses the tokens after a single new one, `block_ids` covers these positions, too.
    """

    request_id: str
    token_ids: Sequence[int]
    prompt_tokens: int
    num_computed: int
    num_new: int
    block_ids: Sequence[int]
    sample: bool
    sampling: SamplingParams
    banned_token_ids: frozenset[int] = frozenset()
    """Tokens that must not be sampled now (end of sequence before `min_tokens`)."""
    matcher: OutputMatcher | None = None
    """For structured output: the state of the output within its grammar."""
    table_id: int = 0
    """Names the block table in this process: as long as it is the same, `block_ids` only grows. 0: a table without a
    name, which may be another one in each step."""
    draft: tuple[int, ...] = ()
    ahead: int = 0
    """For a row of a draft, see `draft_rows`: how many drafted tokens end at its position."""


class RowsFailedError(SplitserveError):
    """Some sequences of a step cannot be continued; `rows` are their indices in the batch.

    The others are unaffected. The step may be run again without the failed ones, because computing a position twice
    writes the same KV.
    """

    default_reason = "ROWS_FAILED"

    def __init__(self, message: str, rows: tuple[int, ...], *, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.rows = rows


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability (natural logarithm) of an emitted token and of the most probable alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token that the runner sampled for one sequence."""

    token_id: int
    logprob: Logprob | None = None
    following: tuple[SampledToken, ...] = ()
    """With a draft: the tokens sampled after it, one for each drafted token that was the one sampled."""


@dataclass(slots=True)
class RequestOutput:
    """Progress of one request in one step.

    `first_position` is the output position of `token_ids[0]`, tokens of earlier attempts included. `text` is what these
    tokens completed. `failure` is (reason, message) if the engine failed the request; `finish_reason` is then ABORT.
    """

    request_id: str
    first_position: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: tuple[str, str] | None = None


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


@dataclass(slots=True)
class StepResult:
    """Everything one engine step produced."""

    outputs: list[RequestOutput] = field(default_factory=list)
    progress: list[ChunkProgress] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    """Requests whose first step this was, and how many of their leading tokens were in the prefix cache."""
    scheduled_tokens: int = 0
    duration_s: float = 0.0

    def drop(self, request_id: str) -> bool:
        """Removes the outputs of a request; returns whether there were any."""
        before = len(self.outputs)
        self.outputs = [output for output in self.outputs if output.request_id != request_id]
        return len(self.outputs) < before


@dataclass(frozen=True, slots=True)
class ReservedBlocks:
    """Blocks reserved for KV that a peer will write: `block_ids`, in sequence order.

    The first one begins with token `cached_tokens`, a multiple of the block size; what is before it is cached here.
    """

    block_ids: tuple[int, ...]
    cached_tokens: int


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
    kept_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    step_fit: DecodeStepFit | None = None
    prompt_fit: PromptFit | None = None
    late_prompts: int = 0
    streams: int | None = None
    lent_speedup: float = 0.0
    decode_speedup: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on requests from the model and the pool, all in tokens."""

    context_tokens: int
    pool_tokens: int
    vocabulary_size: int

    @classmethod
    def of(cls, facts: ModelFacts, context_tokens: int | None, pool_tokens: int) -> RequestLimits:
        """The bounds of a model, with the setting `EngineConfig.context_tokens`, and of a pool of `pool_tokens`."""
        context = min(facts.context_tokens, context_tokens or facts.context_tokens)
        return cls(context, pool_tokens, facts.vocabulary_size)

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
        prior = request.prior_output_tokens
        if not 0 <= prior < len(tokens):
            message = f"prior_output_tokens must be in 0..{len(tokens) - 1}"
            raise InvalidArgumentError(message, field="prior_output_tokens")
        if request.stop.max_tokens <= prior:
            message = f"max_tokens must exceed the {prior} tokens that were output already"
            raise InvalidArgumentError(message, field="max_tokens")
        if len(tokens) >= self.context_tokens:
            needed = "tokens must hold it and one output token"
            message = f"the prompt has {len(tokens)} tokens; the context of {self.context_tokens} {needed}"
            raise InvalidArgumentError(message, field="prompt")
        if len(tokens) > self.pool_tokens:
            message = f"the prompt has {len(tokens)} tokens, the KV pool holds {self.pool_tokens}"
            raise ResourceExhaustedError(message, reason="KV_POOL_TOO_SMALL")
