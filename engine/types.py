"""What goes into the engine and what comes out of it, as plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.grammar import CompiledGrammar


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; ranges as in protos/splitserve/v1/generation.proto, already checked."""

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
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends. `eos_token_ids` are the model's; `stop_token_ids` the client's."""

    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to compute.

    `token_ids` is the prompt followed by `prior_output_tokens` tokens that earlier attempts emitted; they
    count as output for penalties, positions, stop conditions and detokenization. `deadline_s` is on the
    engine's monotonic clock (`time.monotonic`).
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    prior_output_tokens: int = 0
    priority: int = 0
    cache_salt: bytes = b""
    deadline_s: float = float("inf")
    grammar: CompiledGrammar | None = None
    """What the output is held to."""
    prefill_only: bool = False
    """End here after one new token and keep the blocks until `EngineCore.release_held`.

    The token's output has a finish reason only if the whole answer ends with it.
    """

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt proper, earlier attempts' output not counted."""
        return len(self.token_ids) - self.prior_output_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token and of the likeliest alternatives, natural logarithm."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the runner chose for one sequence."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class RequestOutput:
    """Progress of one request in one step.

    `first_position` is the output position of `token_ids[0]` (tokens of earlier attempts included).
    `text` became certain with these tokens. `failure` is (reason, message) when the engine gave the
    request up; `finish_reason` is then ABORT.
    """

    request_id: str
    first_position: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: tuple[str, str] | None = None


@dataclass(slots=True)
class ChunkProgress:
    """KV of one request that became final in a step: tokens [start, end) now lie in `block_ids`.

    `block_ids` is the whole block table of the sequence so far, in sequence order. A prefix-cache hit
    shows as a first progress whose `start` is 0 and whose `end` covers the cached tokens too.
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
    started: list[str] = field(default_factory=list)
    """Requests whose first step this was."""
    scheduled_tokens: int = 0
    duration_s: float = 0.0

    def drop(self, request_id: str) -> bool:
        """Forgets the outputs of a request; whether there were any."""
        before = len(self.outputs)
        self.outputs = [output for output in self.outputs if output.request_id != request_id]
        return len(self.outputs) < before


@dataclass(frozen=True, slots=True)
class ReservedBlocks:
    """Blocks set aside for KV that a peer will write.

    `block_ids` are the blocks to be written, in sequence order; the first holds token `cached_tokens`
    (a multiple of the block size), before which everything is in this engine's prefix cache.
    """

    block_ids: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeStepFit:
    """Time of a step that only decodes: `base_s` + `sequence_s` * sequences + `context_token_s` * their KV tokens."""

    base_s: float
    sequence_s: float
    context_token_s: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of how busy an engine is; see `WorkerLoad` in the protos."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    reserved_blocks: int = 0
    quarantined_blocks: int = 0
    referenced_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    step_fit: DecodeStepFit | None = None
