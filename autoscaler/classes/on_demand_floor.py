"""How much of a pool must be on machines that are not taken away. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

MAX_FLOOR = 10_000
_SHARE = re.compile(r"(100|[0-9]{1,2})%", re.ASCII)


def checked_floor(value: Any) -> int | str:
    """A floor as the policy file has it. Raises PydanticCustomError for anything else."""
    if isinstance(value, str) and _SHARE.fullmatch(value):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_FLOOR:
        return value
    message = f"must be 0 to {MAX_FLOOR} units, or a share from 0% to 100%"
    raise PydanticCustomError("on_demand_floor", message)


@dataclass(frozen=True, slots=True)
class OnDemandFloor:
    """The least units of a pool's classes without `spot`: a number, or a share of those that are wanted."""

    units: float = 0.0
    share: float = 0.0
    others: float = 0.0
    """Units that others have, which are in the total."""
    others_on_demand: float = 0.0
    """Those of them that are not on spot machines."""

    @classmethod
    def of(cls, value: int | str) -> OnDemandFloor:
        """From the policy file."""
        return cls(share=int(value[:-1]) / 100) if isinstance(value, str) else cls(units=value)

    def within(self, units: float) -> float:
        """The units of our own that must be on demand, where `units` of our own are wanted; never more than these."""
        total = units + self.others
        least = max(self.units, math.ceil(self.share * total - 1e-9))
        return max(0.0, min(units, min(least, total) - self.others_on_demand))

    def __str__(self) -> str:
        return f"{self.share:.0%}" if self.share else f"{self.units:g}"


NO_FLOOR = OnDemandFloor()
