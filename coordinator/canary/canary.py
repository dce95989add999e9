"""Asks pairs of workers in rounds for the answer to a golden prompt, and compares it with the reference.

The reference of a prompt is the answer that most pairs gave in the first round with this prompt. It is valid as long as
one of the workers that gave it is registered. One golden prompt is under way at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import Metric

from coordinator.canary.probe import ANSWER_TOKENS, AnswerToken, Prober
from coordinator.models.tokenizers import PromptTokenizers
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Model, PoolSnapshot, WorkerKey
from splitserve.config.coordinator import CanaryConfig
from splitserve.errors import ConfigError, SplitserveError
from splitserve.logs import log_event, log_exception
from splitserve.metrics import counters, gauges
from splitserve.runtime.bounded_file import read_named_text

TOLERANCE_NATS = 0.5
"""Correct workers may round differently, so log-probabilities differ a little. An answer is wrong if one differs by
more than this."""
GOLDEN_TOKENS = 64
"""Leading tokens of a text that are sent."""
MAX_PAIRS = 16
"""Most pairs that one round asks; with more pairs, rounds take turns."""
MAX_PROMPTS, MAX_PROMPT_BYTES = 64, 64 * 1024
BUILT_IN = (
    "The sea covers about seventy percent of the planet. Its water moves in currents that carry heat from the "
    "equator towards the poles. The largest of these currents in the Atlantic is called the Gulf",
    "To bake a simple loaf of bread you need flour, water, salt and yeast. Mix them in a bowl, knead the dough for "
    "ten minutes, and let it rest until it has doubled in size. Then place it in a hot oven for about",
)
OUTCOMES = ("right", "wrong", "unanswered")

Answer = Sequence[AnswerToken]
NO_REFERENCE: tuple[Answer, frozenset[WorkerKey]] = ((), frozenset())


class GoldenPair(NamedTuple):
    """A prefill and a decode worker, by their keys."""

    prefill: WorkerKey
    decode: WorkerKey


@dataclass(slots=True)
class ModelCanary:
    """The canary's state of one model."""

    rounds: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    references: dict[int, tuple[Answer, frozenset[WorkerKey]]] = field(default_factory=dict)
    """By number of the prompt: the reference, and the workers that gave it."""
    wrong: frozenset[GoldenPair] = frozenset()
    """Pairs whose last answer was wrong."""


class Canary:
    """The canary of one coordinator. Each coordinator of a cluster has its own."""

    def __init__(
        self, config: CanaryConfig, registry: Registry, tokenizers: PromptTokenizers, prober: Prober
    ) -> None:
        """Raises ConfigError for a file of prompts that cannot be used."""
        self.interval_s = config.interval_s
        self._registry = registry
        self._tokenizers = tokenizers
        self._prober = prober
        self._texts = read_prompts(config.prompts)
        self._models: dict[str, ModelCanary] = {}

    async def run(self) -> None:
        """Runs a round after each pause, until cancelled."""
        while True:
            await asyncio.sleep(self.interval_s)
            await self.round()

    async def round(self) -> None:
        """One round of each model. A model that fails does not keep the others from their round."""
        models = self._registry.snapshot().models()
        served = {name: model for name, model in models.items() if not model.pooling}
        self._models = {name: self._models.get(name) or ModelCanary() for name in served}
        for name, model in served.items():
            try:
                await self._round_of(model, self._models[name])
            except SplitserveError as error:
                log_exception("canary.round_failed", error, model=name)

    async def _round_of(self, model: Model, canary: ModelCanary) -> None:
        tokenizer = await self._tokenizers.tokenizer(model.tokenizer_source)
        number = canary.rounds % len(self._texts)
        most = min(GOLDEN_TOKENS, model.context_tokens - ANSWER_TOKENS)
        token_ids = tuple(tokenizer.encode(self._texts[number])[:most])
        pairs = pairs_of(self._registry.snapshot(), model.name)
        start = canary.rounds * MAX_PAIRS % max(1, len(pairs))
        canary.rounds += 1
        canary.wrong &= frozenset(pairs)
        if not token_ids or not pairs:
            return
        answers = await self._answers(canary, [*pairs[start:], *pairs[:start]][:MAX_PAIRS], token_ids)
        registered = {worker.key for worker in self._registry.snapshot().workers}
        if not canary.references.get(number, NO_REFERENCE)[1] & registered:
            canary.references[number] = elect(answers)
        reference, _ = canary.references[number]
        for pair, answer in answers.items():
            if answer and not differs(reference, answer):
                canary.outcomes["right"] += 1
                canary.wrong -= {pair}
                continue
            canary.outcomes["wrong"] += 1
            canary.wrong |= {pair}
            log_event(
                "canary.wrong_answer",
                level=logging.WARNING,
                model=model.name,
                prefill_worker=pair.prefill[0],
                decode_worker=pair.decode[0],
                prompt=number,
                expected=[token.token_id for token in reference],
                answered=[token.token_id for token in answer],
            )

    async def _answers(
        self, canary: ModelCanary, pairs: Sequence[GoldenPair], token_ids: tuple[int, ...]
    ) -> dict[GoldenPair, Answer]:
        answers: dict[GoldenPair, Answer] = {}
        for pair in pairs:
            prefill, decode = self._registry.get(pair.prefill), self._registry.get(pair.decode)
            try:
                if prefill is not None and decode is not None:
                    answers[pair] = await self._prober.ask(prefill, decode, token_ids)
            except (SplitserveError, TimeoutError):
                canary.outcomes["unanswered"] += 1
        return answers

    def metrics(self) -> list[Metric]:
        """The canary's metrics, for a Prometheus scrape; none if it is off."""
        if not self.interval_s:
            return []
        models = list(self._models.items())
        answers = {(name, outcome): model.outcomes[outcome] for name, model in models for outcome in OUTCOMES}
        wrong = {name: len(model.wrong) for name, model in models}
        text = "Golden prompts by outcome"
        return [
            counters("splitserve_canary_answers", text, ("model", "outcome"), answers),
            gauges("splitserve_canary_wrong_pairs", "Pairs whose last answer was wrong", "model", wrong),
        ]


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """The texts of a file, one a line, empty lines left out; without a file the built-in ones.

    Raises ConfigError (`canary.prompts`) for a file that cannot be read, or holds none or too many.
    """
    if path is None:
        return BUILT_IN
    lines = read_named_text(path, "canary.prompts", MAX_PROMPT_BYTES).splitlines()
    texts = tuple(line.strip() for line in lines if line.strip())
    if not 1 <= len(texts) <= MAX_PROMPTS:
        message = f"canary.prompts: {path}: needs 1 to {MAX_PROMPTS} lines"
        raise ConfigError(message, field="canary.prompts")
    return texts


def pairs_of(snapshot: PoolSnapshot, model: str) -> list[GoldenPair]:
    """All pairs of a model that can serve, those that a circuit breaker has ejected included."""
    usable = [
        worker
        for worker in snapshot.workers
        if worker.model.name == model and worker.usable and worker.joined
    ]
    return [
        GoldenPair(prefill.key, decode.key)
        for prefill in usable
        for decode in usable
        if prefill.computes_prompts and decode.decodes and prefill.reaches(decode)
    ]


def elect(answers: Mapping[GoldenPair, Answer]) -> tuple[Answer, frozenset[WorkerKey]]:
    """The answer that agrees with most others, and the workers of the agreeing pairs."""
    best, agreeing = NO_REFERENCE[0], list[GoldenPair]()
    for answer in filter(None, answers.values()):
        pairs = [pair for pair, other in answers.items() if not differs(answer, other)]
        if len(pairs) > len(agreeing):
            best, agreeing = answer, pairs
    return best, frozenset(key for pair in agreeing for key in pair)


def differs(reference: Answer, answer: Answer) -> bool:
    """Whether an answer is wrong: shorter than the reference, or further from it than rounding explains.

    Answers are compared up to the first token that differs: after it they continue different texts. This token is right
    if it was nearly as probable in the reference as the reference's own token.
    """
    for expected, given in zip(reference, answer, strict=False):
        if expected.token_id != given.token_id:
            return expected.logprob - expected.top.get(given.token_id, -math.inf) > TOLERANCE_NATS
        if abs(expected.logprob - given.logprob) > TOLERANCE_NATS:
            return True
    return len(answer) < len(reference)
