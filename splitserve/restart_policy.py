"""When a dead process of the local cluster is started again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restarts with exponential back-off, and gives up on a crash loop. Times are in seconds."""

    max_deaths: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.5
    last_delay_s: float = 8.0

    def delay_s(self, deaths: Sequence[float], now_s: float) -> float | None:
        """How long to wait before the next start, or None to give up.

        `deaths` are the times at which the process died since it last got ready, the one just now included.
        """
        recent = [death for death in deaths if now_s - death <= self.window_s]
        if len(recent) >= self.max_deaths:
            return None
        return float(min(self.first_delay_s * 2 ** max(0, len(recent) - 1), self.last_delay_s))
