"""Turns a client's request into an InferenceRequest: model resolved, fields checked, prompt tokenized."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from coordinator.models.model_routes import Found, ModelRoutes
from coordinator.models.tokenizers import PromptTokenizers
from coordinator.request.caller import Caller, RequestTargets
from coordinator.request.ids import random_bits
from coordinator.request.inference_request import (
    InferenceRequest,
    check_highest,
    check_length,
    check_prompt_form,
    check_request,
    check_resume,
    resolved_sampling,
    resolved_stop,
)
from coordinator.request.request_trace import RequestTrace
from coordinator.request.service_targets import resolved_targets
from coordinator.routing.router import RETRY_AFTER_S
from coordinator.workers.registry import Registry
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import UnavailableError
from splitserve.generation.grammar import (
    GrammarThread,
    check_grammar,
    compile_limits,
    llguidance_source,
    refused,
)
from splitserve.generation.kv_blocks import chain_salt
from splitserve.models.tokenizer import TooManyTokensError
from splitserve.runtime.calls.shared_calls import SharedCalls
from splitserve.v1 import generation_pb2, inference_pb2

SEED_BITS = 63
MAX_CACHED_GRAMMARS = 256
"""Grammars whose successful check is remembered, least recently used first out."""


class InputProcessor:
    """Resolves the model, validates and tokenizes."""

    def __init__(
        self,
        config: CoordinatorConfig,
        registry: Registry,
        routes: ModelRoutes,
        tokenizers: PromptTokenizers,
    ) -> None:
        self._config = config
        self._registry = registry
        self._routes = routes
        self._tokenizers = tokenizers
        self._grammars = GrammarCheck()

    async def process(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        request_id: str,
        received_s: float,
        deadline_s: float,
        trace: RequestTrace | None = None,
    ) -> InferenceRequest:
        """The request with all defaults filled in. Both times are on the coordinator's monotonic clock.

        Raises InvalidArgumentError, NotFoundError, or UnavailableError (NO_WORKER) before any worker has registered.
        """
        found = await self._find_model(request, request.session_id or request_id, caller)
        model = found.model
        check_request(request, model)
        targets, slo_ttft_s = self._targets(request, caller)
        await self._grammars.check(request.sampling)
        keyed = self._config.routing == "prefix" or self._config.peer_fetch == "on"
        block_sizes = model.block_sizes if keyed else ()
        prompt_field = f"prompt.{request.WhichOneof('prompt')}"
        try:
            prompt = await self._tokenizers.encode_named(
                model.tokenizer_source,
                request,
                block_sizes,
                chain_salt(caller.cache_salt, model.adapter),
                model.context_tokens,
                check=partial(check_prompt_form, request, model),
            )
        except TooManyTokensError as error:
            check_length(error.count, prompt_field, model, caller.max_prompt_tokens)
            raise
        check_length(len(prompt.token_ids), prompt_field, model, caller.max_prompt_tokens)
        check_highest(prompt.highest, prompt_field, model)
        stop = resolved_stop(request.stop, len(prompt.token_ids), model, caller.max_output_tokens)
        check_resume(request.resume, stop.max_tokens)
        return InferenceRequest(
            request_id=request_id,
            model=model,
            prompt=prompt.token_ids,
            sampling=resolved_sampling(request.sampling, seed=random_bits(SEED_BITS)),
            stop=stop,
            priority=request.priority,
            deadline_s=deadline_s,
            received_s=received_s,
            caller=caller,
            session_id=request.session_id,
            public_name=found.public_name,
            block_keys=prompt.block_keys,
            resumed=tuple(request.resume.token_ids),
            resumed_finish=request.resume.finish_reason,
            trace=trace,
            targets=targets,
            slo_ttft_s=slo_ttft_s,
        )

    def _targets(
        self, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> tuple[RequestTargets | None, float | None]:
        """See `resolved_targets`; None where nobody names any."""
        settings = self._config.admission
        named = caller.targets or settings.ttft_slo_s or settings.tpot_slo_s
        if not (named or request.HasField("ttft_ms") or request.HasField("tpot_ms")):
            return None, None
        return resolved_targets(request, caller, settings)

    async def _find_model(self, request: inference_pb2.GenerateRequest, key: str, caller: Caller) -> Found:
        """Resolves a public name; `key` selects among the models of a route. Waits for the first worker if needed."""
        name, served = request.model, request.resume.served_model
        wait_s = self._config.no_worker_wait_s
        found: Found | None = None
        if await self._registry.wait_until(self._registry.known_models, wait_s):
            routes = self._routes
            found = await self._registry.wait_until(
                lambda: (
                    routes.find_served(name, served, caller) if served else routes.find(name, key, caller)
                ),
                wait_s,
            )
        if found is None:
            message = "no prefill and no decode worker has registered"
            raise UnavailableError(message, reason="NO_WORKER", retry_after_s=RETRY_AFTER_S)
        return found


class GrammarCheck:
    """Compiles grammars without a vocabulary, on a dedicated thread; caches those that compiled.

    A worker compiles the grammar again for its model and may still refuse what only the vocabulary reveals.
    """

    def __init__(self) -> None:
        self._thread = GrammarThread()
        self._accepted: OrderedDict[bytes, None] = OrderedDict()
        self._checks: SharedCalls[None] = SharedCalls()

    async def check(self, sampling: generation_pb2.SamplingParams) -> None:
        """Raises InvalidArgumentError naming the field if the request has a grammar that does not compile."""
        if not sampling.HasField("grammar"):
            return
        key = sampling.grammar.SerializeToString(deterministic=True)
        if key not in self._accepted:
            work = partial(check_compiles, sampling.grammar)
            await self._checks.result(key, partial(self._thread.run, work))
            self._accepted[key] = None
        self._accepted.move_to_end(key)
        if len(self._accepted) > MAX_CACHED_GRAMMARS:
            self._accepted.popitem(last=False)


def check_compiles(grammar: generation_pb2.Grammar) -> None:
    """Checks bounds and compiles. Must run on a thread with a stack of STACK_BYTES. Raises InvalidArgumentError."""
    from llguidance import LLMatcher

    check_grammar(grammar)
    source = llguidance_source(grammar)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(source, limits=compile_limits())
    if wrong:
        raise refused(grammar, " ".join(messages))
