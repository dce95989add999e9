"""Whether a command line runs a neutral worker, for replicas that were configured elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.errors import FailedPreconditionError

WORKER_KIND = "WORKER_KIND"
"""Reason of errors."""
_COMMANDS = {"worker": True, "prefill-worker": False, "decode-worker": False}


def runs_neutral(words: Sequence[str]) -> bool | None:
    """By the command among these words; None where there is none of a worker."""
    return next((_COMMANDS[word] for word in words if word in _COMMANDS), None)


def other_kind(what: str, words: Sequence[str], neutral: bool) -> str:
    """What is wrong where `what` runs workers of the other kind; else empty. What its command does not say is not
    checked."""
    found = runs_neutral(words)
    if found is None or found == neutral:
        return ""
    wanted, there = ("neutral", "pinned") if neutral else ("pinned", "neutral")
    return f"workers is {wanted}, but {what} run {there} workers; make their command and the policy agree"


def check_kind(what: str, words: Sequence[str], neutral: bool) -> None:
    """Raises FailedPreconditionError (WORKER_KIND) for workers of the other kind, as `other_kind`."""
    if problem := other_kind(what, words, neutral):
        raise FailedPreconditionError(problem, reason=WORKER_KIND, field="workers")
