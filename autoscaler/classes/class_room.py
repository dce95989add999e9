"""Room in the budgets for replicas of classes, beside all that exists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoscaler.plan import ClassShare


@dataclass(slots=True)
class ClassRoom:
    """What may be taken beside all that exists."""

    money: float = math.inf
    """For an hour."""
    gpus: float = math.inf
    places: dict[str, int] = field(default_factory=dict)
    """How many more there may be of limited classes."""

    def take(self, share: ClassShare, count: int) -> int:
        """How many of these replicas there is room for, which is taken."""
        count = min(count, self.places.get(share.name, count))
        for each, left in ((share.price_per_hour, self.money), (float(share.gpus), self.gpus)):
            if each > 0 and not math.isinf(left):
                count = min(count, math.floor((left + 1e-9) / each))
        count = max(0, count)
        self.money -= count * share.price_per_hour
        self.gpus -= count * share.gpus
        if share.name in self.places:
            self.places[share.name] -= count
        return count

    def with_ended(self, ended: Sequence[tuple[ClassShare, int]]) -> ClassRoom:
        """The same once so many of these have ended."""
        money = sum(share.price_per_hour * count for share, count in ended)
        gpus = sum(share.gpus * count for share, count in ended)
        return replace(self, money=self.money + money, gpus=self.gpus + gpus)

    def holds(self, share: ClassShare) -> bool:
        """Whether there is money, and GPUs, for one more."""
        return self.money >= share.price_per_hour - 1e-9 and self.gpus >= share.gpus
