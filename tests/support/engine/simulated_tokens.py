"""What a simulated engine answers, computed without blocks and steps."""

from __future__ import annotations

from collections.abc import Sequence

from engine.runner.simulated_runner import _VALUE_SALT, _WORD, _key, _mix, _next_token


def expected_tokens(prompt: Sequence[int], count: int, eos: int | None = None) -> list[int]:
    """The first `count` tokens that a simulated engine appends to a prompt; ends early after `eos`."""
    tokens: list[int] = []
    key = folded = 0
    for position, token in enumerate(prompt):
        key, folded = _extend(key, folded, position, token)
    while len(tokens) < count:
        token = _next_token(key, folded, frozenset())
        tokens.append(token)
        if token == eos:
            break
        key, folded = _extend(key, folded, len(prompt) + len(tokens) - 1, token)
    return tokens


def _extend(key: int, folded: int, position: int, token: int) -> tuple[int, int]:
    key = _key(key, token)
    folded += (key + 3 * _mix(key ^ _VALUE_SALT)) * (2 * position + 1)
    return key, folded & _WORD
