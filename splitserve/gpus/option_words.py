"""Reading single options from the words of a command line that another program parses. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

TENSOR_PARALLEL = ("--tensor-parallel-size", "-tp")
"""vLLM's option for the number of its ranks."""


def value_given(words: Sequence[str], names: Collection[str]) -> str | None:
    """The last value that any of the options has, of `--name value` and `--name=value`; None where none is given.

    `_` in an option's name reads as `-`. An option that ends the line has the value "".
    """
    found = None
    for place, word in enumerate(words):
        name, mark, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if mark else "".join(words[place + 1 : place + 2])
    return found
