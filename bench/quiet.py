"""How much of the machine others use while something is measured."""

from __future__ import annotations

import time

import psutil


class OtherLoad:
    """CPU time of all processes but this one and its children, since the last `mark`."""

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._cores = psutil.cpu_count() or 1
        self.mark()

    def mark(self) -> None:
        """Begins anew."""
        self._others_s, self._since_s = self._others(), time.monotonic()

    def share(self) -> float:
        """Of all cores together, 0..1. Good to a few hundredths over a second: the kernel counts ticks."""
        passed_s = time.monotonic() - self._since_s
        return max(0.0, (self._others() - self._others_s) / (passed_s * self._cores))

    def _others(self) -> float:
        whole = psutil.cpu_times()
        busy_s = sum(whole) - whole.idle - whole.iowait - whole.guest - whole.guest_nice
        ours = [self._self, *self._self.children(recursive=True)]
        return float(busy_s - sum(sum(process.cpu_times()[:2]) for process in ours))
