"""What proposes next tokens: the interface. A draft is only ever a guess; no token of an answer depends on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

SUPPORTS = 5
"""Classes of guesses, see `Draft`."""


class DraftRequest(NamedTuple):
    """A sequence to guess the next tokens of, up to `most`. `key` names it from one step to the next."""

    key: Hashable
    token_ids: Sequence[int]
    """Prompt and output so far; only ever grows under the same key."""
    most: int


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
