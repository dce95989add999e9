"""Gumbel noise of tokens: the largest of the sums of a row's logits and its noise is a draw from their softmax.

A token's noise depends on seed, position and token id only. So a rounding of the logits changes a draw only where the
two largest sums are as close as that, and it does not matter which other tokens are candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_U64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = 2.0**-52
"""A number of 52 bits and a half, times this, is exact in float64 and lies between 0 and 1, both excluded."""


def noise_key(seed: int, position: int) -> int:
    """Names the noise of an output's `position`, from 0; an int64, a function of its arguments only."""
    return _signed(_mix(_mix(seed) + (position + 1) * _GAMMA))


def noise_of(keys: Sequence[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """The noise of all tokens for each key, float64 `[keys, vocabulary]`, within [-3.7, 36.8], computed on the device.

    Devices differ by the rounding of logarithms at most.
    """
    tokens = torch.arange(vocabulary, device=device)
    names = torch.tensor(keys, dtype=torch.int64).to(device)[:, None]
    return -torch.log(-torch.log((_bits(tokens, names).double() + 0.5) * _UNIT))


def _bits(tokens: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """52 random bits of each token, int64: SplitMix64's stream that starts at its key, read at the token's id.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014. Products of int64 tensors wrap, and
    their shifts repeat the sign, which the masks remove.
    """
    state = tokens * _signed(_GAMMA) + keys
    state = (state ^ _shifted(state, 30)) * _signed(_FACTORS[0])
    state = (state ^ _shifted(state, 27)) * _signed(_FACTORS[1])
    return _shifted(state ^ _shifted(state, 31), 12)


def _shifted(state: torch.Tensor, places: int) -> torch.Tensor:
    return (state >> places) & (_U64 >> places)


def _mix(state: int) -> int:
    state &= _U64
    state = ((state ^ (state >> 30)) * _FACTORS[0]) & _U64
    state = ((state ^ (state >> 27)) * _FACTORS[1]) & _U64
    return state ^ (state >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
