"""Converts between protobuf messages and the engine's plain data."""

from __future__ import annotations

from engine.core.precedence import Precedence
from engine.core.types import (
    EngineLoad,
    EngineRequest,
    FinishReason,
    ModelFacts,
    RequestGrammar,
    RequestOutput,
    SamplingParams,
    StopParams,
)
from engine.pacing.step_time_fit import DecodeStepFit, PromptFit
from engine.pacing.token_clock import ServiceTargets
from engine.tiers.kv_tiers import KvTiers
from kv_transfer.lane import JudgedLane
from splitserve.config.security import CeilingConfig
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.generation.bounds import (
    LEAST_TARGET_MS,
    MAX_TPOT_MS,
    MAX_TTFT_MS,
    check_sampling,
    check_stop,
)
from splitserve.generation.kv_blocks import Adapter, chain_salt
from splitserve.spot.source import SpotNotice
from splitserve.tracing.context import TraceContext
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2, registry_pb2

FINISH_REASONS: dict[FinishReason | None, generation_pb2.FinishReason.ValueType] = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
}
DEFAULT_CEILINGS = CeilingConfig()


def engine_request(
    message: prefill_pb2.PrefillRequest | decode_pb2.ReserveRequest,
    *,
    engine_id: str,
    facts: ModelFacts,
    now: float,
    prefill_only: bool,
    grammar: RequestGrammar | None = None,
    ceilings: CeilingConfig = DEFAULT_CEILINGS,
) -> EngineRequest:
    """Checks and converts a request of either service. The tokens are checked by the engine core.

    `engine_id` is the request's id in this engine, which must be unique there; clients may repeat theirs. `now` is
    `time.monotonic()`; `grammar` comes from `GrammarCompiler.compiled`. Raises InvalidArgumentError with the
    field, and FailedPreconditionError (ADAPTER_MISMATCH) for an adapter that is not this worker's.
    """
    if not message.request_id:
        raise InvalidArgumentError("request_id must not be empty", field="request_id")
    timeout_s = message.timeout.seconds + message.timeout.nanos / 1e9
    if not 0 < timeout_s <= ceilings.max_timeout_s:
        raise InvalidArgumentError(f"timeout must be in (0, {ceilings.max_timeout_s:g}] s", field="timeout")
    _check_salt(message.cache_salt, ceilings)
    adapter = _adapter(message.adapter, facts) if message.HasField("adapter") else None
    if not message.stop.HasField("max_tokens") or message.stop.max_tokens < 1:
        raise InvalidArgumentError("stop.max_tokens must be at least 1", field="stop.max_tokens")
    limit = ceilings.max_output_tokens
    if limit is not None and message.stop.max_tokens > limit:
        raise InvalidArgumentError(f"stop.max_tokens must be at most {limit} here", field="stop.max_tokens")
    check_sampling(message.sampling, facts.vocabulary_size)
    check_stop(message.stop, facts.vocabulary_size, facts.context_tokens)
    return EngineRequest(
        request_id=engine_id,
        token_ids=tuple(message.token_ids),
        sampling=sampling_params(message.sampling),
        stop=stop_params(message.stop, facts),
        prior_output_tokens=message.prior_output_tokens,
        precedence=precedence(message.precedence),
        cache_salt=chain_salt(message.cache_salt, adapter),
        adapter=adapter,
        deadline_s=now + timeout_s,
        grammar=grammar,
        prefill_only=prefill_only,
        trace=TraceContext.from_proto(message.trace) if message.HasField("trace") else None,
        targets=_targets(message, now),
        prefix_only=message.prefix_only,
    )


def check_wanted(
    message: prefill_pb2.PrefillRequest | decode_pb2.ReserveRequest, prefixes_only: bool
) -> None:
    """Raises FailedPreconditionError (PREFIXES_ONLY) for a request where a service is for prefixes alone."""
    if prefixes_only and not message.prefix_only:
        text = "prefix_only must be set: this worker is of the other pool, and moves prefixes alone"
        raise FailedPreconditionError(text, reason="PREFIXES_ONLY", field="prefix_only")


def precedence(message: generation_pb2.Precedence) -> Precedence:
    """A request's place among others."""
    return Precedence(message.class_rank, message.tenant_key, message.within_tenant)


def _targets(
    message: prefill_pb2.PrefillRequest | decode_pb2.ReserveRequest, now: float
) -> ServiceTargets | None:
    if not message.HasField("targets"):
        return None
    targets = message.targets
    for name, value, lowest, highest in (
        ("tpot_ms", targets.tpot_ms, LEAST_TARGET_MS, MAX_TPOT_MS),
        ("ttft_ms", targets.ttft_ms, LEAST_TARGET_MS, MAX_TTFT_MS),
        ("ttft_left_ms", targets.ttft_left_ms, -MAX_TTFT_MS, MAX_TTFT_MS),
    ):
        if value and not lowest <= value <= highest:  # 0 is the default of all
            text = f"targets.{name} must be in {lowest:g}..{highest:.0f}"
            raise InvalidArgumentError(text, field=f"targets.{name}")
    return ServiceTargets(
        tpot_s=targets.tpot_ms / 1e3 if targets.tpot_ms else None,
        ttft_s=targets.ttft_ms / 1e3 if targets.ttft_ms else None,
        first_due_s=now + min(targets.ttft_left_ms, targets.ttft_ms) / 1e3
        if targets.ttft_ms
        else float("inf"),
    )


def _adapter(message: generation_pb2.AdapterRef, facts: ModelFacts) -> Adapter:
    adapter = facts.adapters.get(message.name)
    if adapter is None or adapter.fingerprint != message.fingerprint:
        what = "is not here" if adapter is None else "has other files here"
        text = f"adapter {message.name[:128]!r} {what}"
        raise FailedPreconditionError(text, reason="ADAPTER_MISMATCH", field="adapter")
    return adapter


def _check_salt(salt: bytes, ceilings: CeilingConfig) -> None:
    minimum, maximum = int(ceilings.require_cache_salt), ceilings.max_cache_salt_bytes
    if not minimum <= len(salt) <= maximum:
        raise InvalidArgumentError(f"cache_salt must have {minimum}..{maximum} bytes", field="cache_salt")


def sampling_params(message: generation_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters, with the defaults of the proto."""
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def stop_params(message: generation_pb2.StopParams, facts: ModelFacts) -> StopParams:
    """Stop conditions, with the model's end-of-sequence tokens."""
    return StopParams(
        max_tokens=message.max_tokens,
        eos_token_ids=facts.eos_token_ids,
        stop_token_ids=frozenset(message.stop_token_ids),
        stop_strings=tuple(message.stop_strings),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
    )


def output_delta(output: RequestOutput) -> generation_pb2.OutputDelta:
    """A request's output of one step."""
    return generation_pb2.OutputDelta(
        first_position=output.first_position,
        token_ids=output.token_ids,
        text=output.text,
        logprobs=[
            generation_pb2.TokenLogprob(
                token_id=entry.token_id,
                logprob=entry.logprob,
                top=[generation_pb2.TopLogprob(token_id=token, logprob=value) for token, value in entry.top],
            )
            for entry in output.logprobs
        ],
        finish_reason=FINISH_REASONS[output.finish_reason],
    )


def worker_load(load: EngineLoad) -> registry_pb2.WorkerLoad:
    """The engine's part of a load report."""
    return registry_pb2.WorkerLoad(
        waiting_requests=load.waiting_requests,
        running_requests=load.running_requests,
        waiting_tokens=load.waiting_tokens,
        total_blocks=load.total_blocks,
        free_blocks=load.free_blocks,
        reserved_blocks=load.reserved_blocks,
        quarantined_blocks=load.quarantined_blocks,
        referenced_blocks=load.referenced_blocks,
        prefill_tokens_per_second=load.prefill_tokens_per_s,
        decode_step_ms=load.decode_step_s * 1e3,
        step_fit=step_fit_message(load.step_fit),
        prompt_fit=prompt_fit_message(load.prompt_fit),
        late_prompts=load.late_prompts,
        streams=load.streams,
        lent_speedup=load.lent_speedup,
        decode_speedup=load.decode_speedup,
    )


def add_tier_reads(load: registry_pb2.WorkerLoad, tiers: KvTiers | None) -> None:
    """The tiers' part of a load report; for any thread."""
    if tiers is None:
        return
    for name, tier in tiers.all.items():
        message = load.host_tier if name == "host" else load.disk_tier
        message.gb_per_second = tier.bytes_per_s / 1e9
        message.waiting_bytes = tier.reading_blocks * tier.store.block_bytes
        if name == "disk":
            message.shared_id = tiers.shared_id


def step_fit_message(fit: DecodeStepFit | None) -> registry_pb2.DecodeStepFit | None:
    """As a load report has it."""
    if fit is None:
        return None
    return registry_pb2.DecodeStepFit(
        base_ms=fit.base_s * 1e3, sequence_ms=fit.sequence_s * 1e3, context_token_ms=fit.context_token_s * 1e3
    )


def prompt_fit_message(fit: PromptFit | None) -> registry_pb2.PromptFit | None:
    """As a load report has it."""
    if fit is None:
        return None
    return registry_pb2.PromptFit(
        base_ms=fit.base_s * 1e3,
        token_ms=fit.token_s * 1e3,
        pair_ms=fit.pair_s * 1e3,
        mixing_ms=fit.mixing_s * 1e3,
    )


def lane_report(judged: JudgedLane) -> registry_pb2.LaneReport:
    """A measured lane, for a load report."""
    lane = judged.lane
    return registry_pb2.LaneReport(
        agent_id=lane.agent_id,
        gb_per_second=lane.gb_per_s,
        latency_ms=lane.latency_s * 1e3,
        lane=lane.kind,
        problem=judged.problem or "",
        refused=judged.refused,
    )


def preemption_notice(notice: SpotNotice | None, now: float) -> registry_pb2.PreemptionNotice | None:
    """A spot notice as reported at `now`, in monotonic seconds; None without one."""
    if notice is None:
        return None
    message = registry_pb2.PreemptionNotice(source=notice.source)
    message.time_left.FromNanoseconds(round(max(0.0, notice.ends_s - now) * 1e9))
    return message
