"""The threads that compute in a process: variables that OpenMP and MKL read when they are loaded."""

from __future__ import annotations

import os

_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SPINS, _WAIT_POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_FEW_SPINS = "1000"
"""Some tens of microseconds. libgomp's threads spin for milliseconds at a barrier by default. Where others compute on
the same cores, a thread then spins while the one that it waits for has none, at each of the hundreds of barriers of a
step. See docs/decisions/0091-threads-that-wait-give-up-their-core.md."""
_MORE_SPINS = "20000"
"""Some tenths of a millisecond, for threads that have their cores to themselves: waking one that sleeps takes longer
than most waits. See docs/decisions/0096-pinned-threads-spin-longer.md."""


def set_compute_threads(threads: int) -> None:
    """So many threads, for libraries that are loaded from now on."""
    os.environ.update(dict.fromkeys(_NUMBERS, str(threads)))


def set_spins(*, pinned: bool) -> None:
    """Threads that wait for others give up their core soon, later where nobody else computes there (`pinned`). What the
    environment says about that stays. For libraries that are loaded from now on."""
    if _WAIT_POLICY not in os.environ:
        os.environ.setdefault(_SPINS, _MORE_SPINS if pinned else _FEW_SPINS)
