"""Decides, reproducibly, which operation a planned fault happens to."""

from __future__ import annotations

import random
from collections import Counter

from splitserve.fault_plan import FaultPlan, Trigger
from splitserve.logs import log_event


class FaultDice:
    """One stream of decisions for each trigger of a plan, so that no trigger shifts another's chances."""

    def __init__(self, plan: FaultPlan) -> None:
        self.injected: Counter[str] = Counter()
        """How often each fault has happened, by the trigger's name."""
        self._triggers: dict[str, Trigger] = {
            name: value for name, value in plan if isinstance(value, Trigger) and value.planned
        }
        self._random = {name: random.Random(f"{plan.seed}:{name}") for name in self._triggers}
        self._asked: Counter[str] = Counter()

    def fires(self, name: str, agent_id: str) -> bool:
        """Whether the fault happens to the next operation it can happen to. Counts and logs it if so."""
        trigger = self._triggers.get(name)
        if trigger is None:
            return False
        self._asked[name] += 1
        number = self._asked[name]
        lucky = self._random[name].random() < trigger.probability
        planned = number in trigger.at or (trigger.every is not None and number % trigger.every == 0)
        if not (lucky or planned):
            return False
        self.injected[name] += 1
        log_event("fault.injected", fault=name, operation=number, agent_id=agent_id)
        return True
