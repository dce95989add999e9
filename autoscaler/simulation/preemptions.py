"""Which simulated machines are taken away, and when. By seed, and the same for every policy."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from splitserve.errors import InvalidArgumentError

MAX_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Preemptions:
    """Of spot machines, each for itself: after its order a machine stays for an exponential time, so that the chance of
    a notice does not depend on its age. The n-th replica of a pool draws the same time under every policy."""

    per_hour: float = 0.0
    """Notices that a machine gets in an hour, on average."""
    notice_s: float = 30.0
    """From the notice until it is gone."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.per_hour <= MAX_PER_HOUR:
            message = f"preemptions must be 0 to {MAX_PER_HOUR:g} an hour, not {self.per_hour:g}"
            raise InvalidArgumentError(message, field="preemptions")
        if not (math.isfinite(self.notice_s) and self.notice_s >= 0):
            message = f"spot_notice must be at least 0 s, not {self.notice_s:g}"
            raise InvalidArgumentError(message, field="spot_notice")

    def notice_after_s(self, name: str) -> float | None:
        """Seconds from the order of the replica of this name to its notice; None: there is none."""
        if not self.per_hour:
            return None
        return random.Random(f"{self.seed} taken away {name}").expovariate(self.per_hour / 3600)


NONE_TAKEN = Preemptions()
