"""Numbers of the benches' options, bounded: `argparse` types that say the bound in their error.

The types raise argparse.ArgumentTypeError for a number out of bounds, ValueError for text that is no number.
"""

from __future__ import annotations

from argparse import ArgumentTypeError

MOST = 10**9


def positive_number(text: str) -> float:
    """A number above 0 and below MOST."""
    if not 0 < (value := float(text)) < MOST:
        raise ArgumentTypeError(f"must be above 0 and below {MOST}, not {text}")
    return value


def positive_whole(text: str) -> int:
    """A whole number from 1 to MOST."""
    return _whole(text, 1)


def whole_number(text: str) -> int:
    """A whole number from 0 to MOST, as a seed, or a number of things of which 0 asks for none."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not least <= (value := int(text)) <= MOST:
        raise ArgumentTypeError(f"must be {least}..{MOST}, not {text}")
    return value
