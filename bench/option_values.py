"""Numbers of the benches' options, bounded: `argparse` types that say the bound in their error; options that benches
share.

The types raise argparse.ArgumentTypeError for a number out of bounds, ValueError for text that is no number.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError

from splitserve.cluster.placement import available_cores
from splitserve.config.cluster import ClusterConfig

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


def add_narrower_options(parser: ArgumentParser, prompts: int) -> None:
    """The options of benches that compare a narrower format with bfloat16: answers to so many prompts, and speeds."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument(
        "--prompts", type=whole_number, default=prompts, help=f"default: {prompts}; 0 asks for none"
    )
    threads = [len(available_cores()), 1]
    parser.add_argument("--threads", type=positive_whole, nargs="*", default=threads, help="none: no speeds")
