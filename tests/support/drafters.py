"""Drafters for tests: such as know the answer, such as guess at random, and such as do both in turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence

from engine.core.types import SampledToken, ScheduledSequence
from engine.runner.simulated_runner import SimulatedRunner, expected_tokens
from engine.speculation.drafter import Draft, Drafter, DraftRequest
from splitserve.config.engine import EngineConfig

Guess = Callable[[DraftRequest], list[int]]


class GuessingDrafter(Drafter):
    """Drafts what a function says; remembers who was asked for and who was forgotten."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.known: set[Hashable] = set()

    def drafts(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        self.known.update(request.key for request in asked)
        return [Draft(self._guess(request)[: request.most], 3) for request in asked]

    def forget(self, key: Hashable) -> None:
        self.known.discard(key)


def oracle(request: DraftRequest) -> list[int]:
    """What the simulated model says without bans."""
    return expected_tokens(list(request.token_ids), request.most)


def garbage(seed: int = 0, vocabulary_size: int = 257) -> Guess:
    """Any tokens, of any number."""
    pick = random.Random(seed)
    return lambda request: [pick.randrange(vocabulary_size) for _ in range(pick.randrange(request.most + 1))]


def mostly_right(seed: int = 0, vocabulary_size: int = 257) -> Guess:
    """The simulated model's tokens, with a wrong one now and then."""
    pick = random.Random(seed)

    def guess(request: DraftRequest) -> list[int]:
        tokens = oracle(request)
        if pick.random() < 0.5:
            tokens[pick.randrange(len(tokens))] = pick.randrange(vocabulary_size)
        return tokens

    return guess


def replay(answers: dict[str, list[int]], prompts: dict[str, int], seed: int = 0) -> Guess:
    """What the answers of an earlier run were, by request id, with a wrong token now and then."""
    pick = random.Random(seed)

    def guess(request: DraftRequest) -> list[int]:
        name = request.key.request_id  # type: ignore[attr-defined]
        if name not in answers:
            return []
        at = len(request.token_ids) - prompts[name]
        tokens = answers[name][at : at + request.most]
        if tokens and pick.random() < 0.4:
            tokens[pick.randrange(len(tokens))] = pick.randrange(200)
        return tokens

    return guess


class VirtualClock:
    """Stands still but for what computes."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class VirtualRunner(SimulatedRunner):
    """Moves a clock instead of sleeping: by `step_s` for a step, and by `token_s` for each token of a chunk."""

    def __init__(self, config: EngineConfig, clock: VirtualClock, step_s: float, token_s: float) -> None:
        super().__init__(config)
        self._virtual, self._step_s, self._token_s = clock, step_s, token_s
        self.computed = 0
        """Tokens."""

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        chunks = sum(each.num_new for each in batch if each.num_new > 1)
        self.computed += sum(each.num_new for each in batch)
        rows = sum(1 + len(each.draft) for each in batch)
        self._virtual.now += self._step_s * (0.95 + 0.05 * rows) + self._token_s * chunks
        return super().execute(batch)


class OftenRight(VirtualRunner):
    """A draft model that is another one than the simulated model, for one token in five."""

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        return [
            SampledToken(32 + token.token_id % 64) if token is not None and token.token_id % 5 == 0 else token
            for token in super().execute(batch)
        ]
