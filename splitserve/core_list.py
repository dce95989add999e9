"""CPU core lists in text form: "0-3,6"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from splitserve.errors import InvalidArgumentError


def format_cores(cpus: Sequence[int]) -> str:
    """Formats cores for `--cpus`, with runs as ranges: "0-3,6"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_cores(text: str) -> tuple[int, ...]:
    """Parses "0,1" or "0-3,6". Raises InvalidArgumentError naming `cpus`."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) > 65535:
            raise _bad_cores(text)
        if dash and int(last) < int(first):
            raise _bad_cores(text)
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def _bad_cores(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f'cpus must look like "0,1" or "0-3" (given: {text!r})', field="cpus")


Cores = Annotated[
    tuple[int, ...],
    BeforeValidator(lambda cpus: parse_cores(cpus) if isinstance(cpus, str) else cpus),
    PlainSerializer(format_cores, return_type=str),
]
"""Core numbers; also accepts text."""
