"""Converts between protobuf messages and the engine's plain data."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain
from typing import Any

from engine.core.engine import (
    EngineLoad,
    EngineRequest,
    FinishReason,
    PoolingParams,
    RequestGrammar,
    RequestOutput,
    StopParams,
)
from engine.core.model_runner import ModelFacts, PromptLogprobs, SamplingParams
from engine.scheduling.waiting_queue import Precedence
from kv_transfer.lanes import JudgedLane
from splitserve.config.security import CeilingConfig
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.generation.bounds import (
    LEAST_TARGET_MS,
    MAX_TPOT_MS,
    MAX_TTFT_MS,
    check_prompt_logprobs,
    check_sampling,
    check_stop,
    require,
)
from splitserve.generation.kv_blocks import Adapter, chain_salt
from splitserve.tracing.context import TraceContext
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2, registry_pb2
from worker.preemption import SpotNotice

FINISH_REASONS: dict[FinishReason | None, generation_pb2.FinishReason.ValueType] = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
}
DEFAULT_CEILINGS = CeilingConfig()
MAX_TIMEOUT_S = 86_400.0
MAX_SALT_BYTES = 64


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
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgumentError(f"timeout must be in (0, {MAX_TIMEOUT_S:g}] s", field="timeout")
    _check_salt(message.cache_salt, ceilings)
    adapter = _adapter(message.adapter, facts) if message.HasField("adapter") else None
    if not message.stop.HasField("max_tokens") or message.stop.max_tokens < 1:
        raise InvalidArgumentError("stop.max_tokens must be at least 1", field="stop.max_tokens")
    limit = ceilings.max_output_tokens
    if limit is not None and message.stop.max_tokens > limit:
        raise InvalidArgumentError(f"stop.max_tokens must be at most {limit} here", field="stop.max_tokens")
    pooling = _pooling_params(message)
    require(
        (pooling is not None) == bool(facts.pooling), "pooling", "set for pooling models, and only for them"
    )
    check_sampling(message.sampling, facts.vocabulary_size)
    require(not message.sampling.bad_words, "sampling.bad_words", "empty here: coordinators tokenize them")
    check_stop(message.stop, facts.vocabulary_size, facts.context_tokens)
    check_prompt_logprobs(message.sampling, len(message.token_ids) - message.prior_output_tokens)
    tpot_s, first_due_s = _targets(message, now)
    order = message.precedence
    return EngineRequest(
        request_id=engine_id,
        token_ids=tuple(message.token_ids),
        sampling=sampling_params(message.sampling),
        stop=stop_params(message.stop, facts),
        prior_output_tokens=message.prior_output_tokens,
        precedence=Precedence(order.class_rank, order.tenant_key, order.within_tenant),
        cache_salt=chain_salt(message.cache_salt, adapter),
        adapter=adapter,
        deadline_s=now + timeout_s,
        grammar=grammar,
        prefill_only=prefill_only,
        trace=TraceContext.from_proto(message.trace) if message.HasField("trace") else None,
        tpot_s=tpot_s,
        first_due_s=first_due_s,
        pooling=pooling,
    )


def _pooling_params(
    message: prefill_pb2.PrefillRequest | decode_pb2.ReserveRequest,
) -> PoolingParams | None:
    if not isinstance(message, prefill_pb2.PrefillRequest) or not message.HasField("pooling"):
        return None
    require(message.second_begins <= len(message.token_ids), "second_begins", "at most the prompt's length")
    how = message.pooling
    activation = how.use_activation if how.HasField("use_activation") else None
    return PoolingParams(how.dimensions or None, activation, message.second_begins)


def _targets(
    message: prefill_pb2.PrefillRequest | decode_pb2.ReserveRequest, now: float
) -> tuple[float | None, float]:
    """The TPOT target, and when the first token is due; None and infinity without targets."""
    targets = message.targets
    for name, value, lowest, highest in (
        ("tpot_ms", targets.tpot_ms, LEAST_TARGET_MS, MAX_TPOT_MS),
        ("ttft_ms", targets.ttft_ms, LEAST_TARGET_MS, MAX_TTFT_MS),
        ("ttft_left_ms", targets.ttft_left_ms, -MAX_TTFT_MS, MAX_TTFT_MS),
    ):
        if value and not lowest <= value <= highest:  # 0: the request has no such target
            text = f"targets.{name} must be in {lowest:g}..{highest:.0f}"
            raise InvalidArgumentError(text, field=f"targets.{name}")
    tpot_s = targets.tpot_ms / 1e3 if targets.tpot_ms else None
    left_s = min(targets.ttft_left_ms, targets.ttft_ms) / 1e3 if targets.ttft_ms else float("inf")
    return tpot_s, now + left_s


def _adapter(message: generation_pb2.AdapterRef, facts: ModelFacts) -> Adapter:
    adapter = facts.adapters.get(message.name)
    if adapter is None or adapter.fingerprint != message.fingerprint:
        what = "is not here" if adapter is None else "has other files here"
        text = f"adapter {message.name[:128]!r} {what}"
        raise FailedPreconditionError(text, reason="ADAPTER_MISMATCH", field="adapter")
    return adapter


def _check_salt(salt: bytes, ceilings: CeilingConfig) -> None:
    minimum = int(ceilings.require_cache_salt)
    if not minimum <= len(salt) <= MAX_SALT_BYTES:
        text = f"cache_salt must have {minimum}..{MAX_SALT_BYTES} bytes"
        raise InvalidArgumentError(text, field="cache_salt")


def sampling_params(message: generation_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters; a field that the message leaves out has the default of `SamplingParams`, as in the proto."""
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    values.pop("grammar", None)
    values["logit_bias"] = tuple((entry.token_id, entry.bias) for entry in message.logit_bias)
    values["allowed_token_ids"] = tuple(message.allowed_token_ids)
    values["bad_sequences"] = tuple(tuple(bad.ids) for bad in message.bad_sequences)
    return SamplingParams(**values)


def stop_params(message: generation_pb2.StopParams, facts: ModelFacts) -> StopParams:
    """Stop conditions, with the model's end-of-sequence tokens."""
    return StopParams(
        max_tokens=message.max_tokens,
        eos_token_ids=facts.eos_token_ids,
        stop_token_ids=frozenset(message.stop_token_ids),
        stop_strings=tuple(message.stop_strings),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        keep_special_tokens=message.keep_special_tokens,
        keep_stop=message.keep_stop,
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
        prompt_logprobs=_prompt_logprobs(output.prompt_logprobs) if output.prompt_logprobs else None,
        pooled=output.pooled,
    )


def _prompt_logprobs(prompt: PromptLogprobs) -> generation_pb2.PromptLogprobs:
    return generation_pb2.PromptLogprobs(
        token_ids=prompt.token_ids,
        logprobs=prompt.logprobs,
        ranks=prompt.ranks,
        top_token_ids=chain.from_iterable(prompt.top_token_ids),
        top_logprobs=chain.from_iterable(prompt.top_logprobs),
    )


def worker_load(load: EngineLoad) -> registry_pb2.WorkerLoad:
    """The engine's part of a load report."""
    values = {field.name: getattr(load, field.name) for field in fields(load)}
    return registry_pb2.WorkerLoad(**values | {"latency": load.latency.to_proto()})


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
