"""Translates a request's parameters into vLLM's, and vLLM's outputs into tokens."""

from __future__ import annotations

from typing import Any

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from engine.core.engine import EngineRequest
from engine.core.model_runner import Logprob, OutputMatcher, PromptLogprobs, SampledToken
from engine.vllm.connector import AWAITS_FIELD, HOLD_FIELD, PRIOR_FIELD
from splitserve.errors import BrokenInvariantError, InvalidArgumentError
from splitserve.v1 import generation_pb2

MAX_SEED = 2**63 - 1


class VllmGrammar:
    """A grammar that vLLM compiles and follows."""

    def __init__(self, grammar: generation_pb2.Grammar) -> None:
        match grammar.WhichOneof("kind"):
            case "json_schema":
                self.params = StructuredOutputsParams(json=grammar.json_schema)
            case "regex":
                self.params = StructuredOutputsParams(regex=grammar.regex)
            case "lark":
                self.params = StructuredOutputsParams(grammar=grammar.lark)
            case _:
                self.params = StructuredOutputsParams(json_object=True)

    def matcher(self) -> OutputMatcher:
        """Raises BrokenInvariantError: the worker does not follow the grammar."""
        raise BrokenInvariantError("vLLM follows the grammars of its requests")


class VllmGrammars:
    """Makes the grammars of requests. The coordinator has checked them; vLLM compiles them."""

    async def compiled(
        self, sampling: generation_pb2.SamplingParams, tenant: object = None
    ) -> VllmGrammar | None:
        """Returns the grammar of sampling parameters, None without one."""
        return VllmGrammar(sampling.grammar) if sampling.HasField("grammar") else None

    def close(self) -> None:
        """Does nothing."""


def vllm_params(request: EngineRequest, *, awaits_kv: bool) -> SamplingParams:
    """Returns a request's parameters for vLLM. `awaits_kv`: a peer writes the KV of its tokens.

    To vLLM, the output of earlier attempts is prompt: penalties do not count it, bad sequences do not begin in it; the
    grammar does.
    """
    sampling, stop, prior = request.sampling, request.stop, request.prior_output_tokens
    max_tokens = 1 if request.prefill_only else stop.max_tokens - prior
    stop_token_ids = stop.stop_token_ids if stop.ignore_eos else stop.stop_token_ids | stop.eos_token_ids
    transfer = {AWAITS_FIELD: awaits_kv, HOLD_FIELD: request.prefill_only, PRIOR_FIELD: prior}
    grammar = request.grammar
    return SamplingParams(
        temperature=sampling.temperature,
        # vLLM takes no top_p of 0. It means the same as top_k=1: the most probable token only.
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k if sampling.top_p else 1,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        # What vLLM itself makes of `bad_words`.
        _bad_words_token_ids=[list(bad) for bad in sampling.bad_sequences] or None,
        seed=None if sampling.greedy else sampling.seed & MAX_SEED,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs if request.scores_prompt and not awaits_kv else None,
        max_tokens=max_tokens,
        min_tokens=max(0, min(max_tokens, stop.min_tokens - prior)),
        stop_token_ids=sorted(stop_token_ids),
        ignore_eos=stop.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=grammar.params if isinstance(grammar, VllmGrammar) else None,
        extra_args={"kv_transfer_params": transfer},
    )


def vllm_pooling_params(request: EngineRequest, task: str, processor: Any) -> PoolingParams:
    """Returns the parameters of a request that is pooled, by vLLM's `task` and `InputProcessor`.

    Raises InvalidArgumentError (field `pooling.dimensions`) for dimensions that the model does not offer.
    """
    how, model = request.pooling, processor.model_config
    assert how is not None, "the request is pooled"
    if (dimensions := how.dimensions) is not None:
        field, offered = "pooling.dimensions", model.matryoshka_dimensions
        if not model.is_matryoshka:
            message = f"{field} is not supported: the model is not trained for shorter embeddings"
            raise InvalidArgumentError(message, reason="UNSUPPORTED_FIELD", field=field)
        if not (dimensions in offered if offered else dimensions <= model.embedding_size):
            bound = f"one of {', '.join(map(str, offered))}" if offered else f"1..{model.embedding_size}"
            raise InvalidArgumentError(f"{field} must be {bound}, not {dimensions}", field=field)
    # A model whose tokenizer names no types takes none: vLLM would end.
    typed = how.second_begins and "token_type_ids" in processor.get_tokenizer().model_input_names
    pairs = {"compressed_token_type_ids": how.second_begins} if typed else None
    return PoolingParams(
        task=task, dimensions=how.dimensions, use_activation=how.use_activation, extra_kwargs=pairs
    )


def sampled_tokens(output: Any, top_count: int | None) -> list[SampledToken]:
    """Returns the tokens of a vLLM `EngineCoreOutput`, with log-probabilities if the request asks for them.

    `top_count`: how many of the most probable tokens the request asks for.
    """
    tokens: list[int] = output.new_token_ids
    lists = output.new_logprobs
    if lists is None:
        return [SampledToken(token) for token in tokens]
    sampled: list[SampledToken] = []
    for token, token_ids, logprobs in zip(tokens, lists.logprob_token_ids, lists.logprobs, strict=False):
        # vLLM puts the sampled token first, before as many of the most probable ones as any request of the step wants.
        (_, logprob), *top = zip(token_ids.tolist(), logprobs.tolist(), strict=True)
        sampled.append(SampledToken(token, Logprob(token, logprob, tuple(top[:top_count]))))
    return sampled


def put_prompt_logprobs(output: Any, prompt: PromptLogprobs) -> None:
    """Adds the log-probabilities of the prompt that come with a vLLM `EngineCoreOutput`, the first one of a request."""
    if (tensors := output.new_prompt_logprobs_tensors) is None:
        return
    # vLLM puts the prompt's token first, before the most probable ones.
    token_ids, logprobs = tensors.logprob_token_ids, tensors.logprobs
    own, ranks = logprobs[:, 0].tolist(), tensors.selected_token_ranks.tolist()
    prompt.put(0, own, ranks, token_ids[:, 1:].tolist(), logprobs[:, 1:].tolist())
