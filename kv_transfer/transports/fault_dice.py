"""When each fault of a plan fires."""

from __future__ import annotations

import random
from collections import Counter

from splitserve.config.faults import FaultPlan, Trigger
from splitserve.logs import log_event


class FaultDice:
    """Decides when each trigger of a plan fires. Each has its own random stream, independent of the others."""

    def __init__(self, plan: FaultPlan) -> None:
        self.injected: Counter[str] = Counter()
        """Number of injected faults by trigger name."""
        self._triggers: dict[str, Trigger] = {
            name: value for name, value in plan if isinstance(value, Trigger) and value.planned
        }
        self._random = {name: random.Random(f"{plan.seed}:{name}") for name in self._triggers}
        self._operations: Counter[str] = Counter()

    def fires(self, name: str, agent_id: str) -> bool:
        """Whether the fault hits the trigger's next operation. Counts and logs it if so."""
        trigger = self._triggers.get(name)
        if trigger is None:
            return False
        self._operations[name] += 1
        number = self._operations[name]
        by_chance = self._random[name].random() < trigger.probability
        planned = number in trigger.at or (trigger.every is not None and number % trigger.every == 0)
        if not (by_chance or planned):
            return False
        self.injected[name] += 1
        log_event("fault.injected", fault=name, operation=number, agent_id=agent_id)
        return True
