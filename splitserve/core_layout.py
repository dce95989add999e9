"""Which cores each worker of a local cluster runs on. Pure, but for `available_cores`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One worker's cores and its number of compute threads. No cores: it may run on all."""

    cpus: tuple[int, ...]
    threads: int


def layout_cores(cores: Sequence[int], workers: int) -> list[CoreShare]:
    """Gives each of `workers` its own cores, so that compute threads of two workers never share one.

    Few cores (at most two a worker): each worker gets its distinct part of them, and where there are fewer cores
    than workers, one each in turn; the coordinator, which needs little, shares. More cores: all workers get
    equally many, and at least one stays free for the coordinator.
    """
    if not cores:
        raise InvalidArgumentError("cores must not be empty", field="cores")
    if workers < 1:
        raise InvalidArgumentError(f"workers must be at least 1, not {workers}", field="workers")
    ordered = sorted(cores)
    if workers >= len(ordered):
        return [CoreShare((ordered[n % len(ordered)],), 1) for n in range(workers)]
    if len(ordered) <= 2 * workers:
        each, more = divmod(len(ordered), workers)
    else:
        each, more = (len(ordered) - 1) // workers, 0
    shares, start = [], 0
    for number in range(workers):
        end = start + each + (1 if number < more else 0)
        shares.append(CoreShare(tuple(ordered[start:end]), end - start))
        start = end
    return shares


def unpinned_cores(cores: Sequence[int], workers: int) -> list[CoreShare]:
    """Lets every worker run anywhere, with as many threads as its fair part of the cores."""
    return [CoreShare((), max(1, len(cores) // workers))] * workers


def available_cores() -> list[int]:
    """The cores that this process, and so its children, may run on."""
    return sorted(os.sched_getaffinity(0))


def format_cores(cpus: Sequence[int]) -> str:
    """Cores as `--cpus` takes them, runs shortened: "0-3,6"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_cores(text: str) -> tuple[int, ...]:
    """The cores of "0,1" or "0-3,6". Raises InvalidArgumentError naming `cpus`."""
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
