"""A request's parameters as vLLM takes them, and its tokens as vLLM returns them."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from engine.core.engine import EngineRequest
from engine.core.model_runner import Logprob, OutputMatcher, SampledToken
from engine.vllm.connector import AWAITS_FIELD, HOLD_FIELD, PRIOR_FIELD
from engine.vllm.first_token import KEY_FIELD
from splitserve.errors import BrokenInvariantError
from splitserve.v1 import generation_pb2

MAX_SEED = 2**63 - 1


class VllmGrammar:
    """A grammar that vLLM compiles."""

    def __init__(self, grammar: generation_pb2.Grammar) -> None:
        self.grammar = grammar

    def matcher(self) -> OutputMatcher:
        """Raises BrokenInvariantError: vLLM follows the output."""
        raise BrokenInvariantError("vLLM follows the grammars of its requests")

    def params(self) -> StructuredOutputsParams:
        """As vLLM takes it."""
        grammar = self.grammar
        match grammar.WhichOneof("kind"):
            case "json_schema":
                return StructuredOutputsParams(json=grammar.json_schema)
            case "regex":
                return StructuredOutputsParams(regex=grammar.regex)
            case "lark":
                return StructuredOutputsParams(grammar=grammar.lark)
            case _:
                return StructuredOutputsParams(json_object=True)


class VllmGrammars:
    """The grammars of requests: vLLM compiles them, the coordinator has checked them."""

    def prepare(self) -> None:
        """Nothing to do."""

    async def compiled(
        self, sampling: generation_pb2.SamplingParams, tenant: object = None
    ) -> VllmGrammar | None:
        """The grammar of sampling parameters, None without one."""
        return VllmGrammar(sampling.grammar) if sampling.HasField("grammar") else None

    def close(self) -> None:
        """Nothing to do."""


def vllm_params(request: EngineRequest, key: str, *, awaits_kv: bool) -> SamplingParams:
    """A request's parameters for vLLM. Output of earlier attempts is prompt to vLLM: penalties do not count it, a
    grammar does. `key` names the request in its ranks."""
    sampling, stop, prior = request.sampling, request.stop, request.prior_output_tokens
    most = 1 if request.prefill_only else stop.max_tokens - prior
    ends = stop.stop_token_ids if stop.ignore_eos else stop.stop_token_ids | stop.eos_token_ids
    transfer: dict[str, Any] = {AWAITS_FIELD: awaits_kv, HOLD_FIELD: request.prefill_only, PRIOR_FIELD: prior}
    extra: dict[str, Any] = {"kv_transfer_params": transfer}
    if awaits_kv:
        extra[KEY_FIELD] = key
    grammar = request.grammar
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k if sampling.top_p else 1,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=None if sampling.greedy else sampling.seed & MAX_SEED,
        logprobs=sampling.logprobs,
        max_tokens=most,
        min_tokens=max(0, min(most, stop.min_tokens - prior)),
        stop_token_ids=sorted(ends),
        ignore_eos=stop.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=grammar.params() if isinstance(grammar, VllmGrammar) else None,
        extra_args=extra,
    )


def sampled_tokens(output: Any) -> list[SampledToken]:
    """The tokens of one of vLLM's `EngineCoreOutput`s, with their log-probabilities if any were asked for."""
    tokens: list[int] = output.new_token_ids
    lists = output.new_logprobs
    if lists is None:
        return [SampledToken(token) for token in tokens]
    return [
        SampledToken(token, _logprob(token, lists.logprob_token_ids[index], lists.logprobs[index]))
        for index, token in enumerate(tokens)
    ]


def _logprob(token: int, token_ids: Any, logprobs: Any) -> Logprob:
    """vLLM puts the sampled token first, and then the most probable ones."""
    pairs = list(zip(token_ids.tolist(), logprobs.tolist(), strict=True))
    return Logprob(token, pairs[0][1], tuple(pairs[1:]))
