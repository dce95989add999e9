"""What proposes next tokens: the interface. A draft is only ever a guess; no token of an answer depends on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from engine.core.types import SamplingParams

SUPPORTS = 6
"""Classes of guesses, see `Draft`."""
OF_A_MODEL = 5
"""The class of what a draft model guesses."""
GREEDY = SamplingParams(temperature=0.0)


class DraftRequest(NamedTuple):
    """A sequence to guess the next tokens of, up to `most`. `key` names it from one step to the next.

    What follows `most` is for drafters that compute: as in `ScheduledSequence`, and the hashes of its full blocks as
    far as they are known. `block_ids` covers all tokens and `most` - 1 more.
    """

    key: Hashable
    token_ids: Sequence[int]
    """Prompt and output so far; only ever grows under the same key."""
    most: int
    prompt_tokens: int = 0
    sampling: SamplingParams = GREEDY
    block_ids: Sequence[int] = ()
    block_hashes: Sequence[bytes] = ()
    table_id: int = 0


class Draft(NamedTuple):
    """Guessed tokens, each within the vocabulary. How often drafts of one `support`, below `SUPPORTS`, were right is
    measured, so it may be any class of guesses that are alike."""

    token_ids: Sequence[int]
    support: int


NO_DRAFT = Draft((), 0)


class Drafter(ABC):
    """Guesses next tokens. Used on the engine thread, before a step."""

    @abstractmethod
    def drafts(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        """One draft for each request; an empty one where there is no guess. All at once, for drafters that compute."""

    @abstractmethod
    def forget(self, key: Hashable) -> None:
        """The sequence has ended or lost its KV. Ignored for a key that is not known."""

    def forget_kv(self) -> None:
        """KV of the drafter's own has lost its content; no sequence is known."""
        return

    def close(self) -> None:
        """Gives back what is not memory of Python's."""
        return


class ComputingDrafter(Drafter):
    """Guesses that take time: a step of its own for each further token, after the sequence's own tokens."""

    context_tokens: int
    """It is not asked for guesses at or beyond this position of a sequence."""

    @abstractmethod
    def behind(self, request: DraftRequest) -> int:
        """Tokens of the sequence, without its last one, that it has not computed. `drafts` computes them first."""

    @abstractmethod
    def catch_up(self, request: DraftRequest, tokens: int) -> None:
        """Computes the next `tokens` of them, in one chunk, and guesses nothing."""

    @abstractmethod
    def token_s(self, sequences: int) -> float:
        """Seconds that one further token for each of so many sequences takes; 0 before any was measured."""

    @abstractmethod
    def chunk_s(self, tokens: int) -> float:
        """Seconds that `catch_up` takes for so many tokens; 0 before any was measured."""

    @abstractmethod
    def forget_times(self) -> None:
        """What `token_s` and `chunk_s` tell is out of date."""

    @abstractmethod
    def take_spent_s(self) -> float:
        """Seconds that it has computed since this was last asked."""
