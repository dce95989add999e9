"""The warm-up runs before the first request, and fits into any pool."""

from __future__ import annotations

import pytest

from engine.core.model_runner import warm_up
from engine.runner.simulated_runner import SimulatedRunner
from splitserve.config.engine import EngineConfig


class Counting(SimulatedRunner):
    """Records how many tokens each step computed."""

    steps: tuple[int, ...] = ()

    def execute(self, batch):  # type: ignore[no-untyped-def]
        self.steps = (*self.steps, *(sequence.num_new for sequence in batch))
        return super().execute(batch)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, (64, 1)),
        ({"max_step_tokens": 16}, (15, 1)),
        ({"num_blocks": 2, "block_size_tokens": 4}, (7, 1)),
        ({"context_tokens": 1}, ()),
    ],
)
def test_a_prompt_and_a_token(settings: dict[str, int], steps: tuple[int, ...]) -> None:
    config = EngineConfig(kind="simulated", simulated_step_s=0.0, **settings)  # type: ignore[arg-type]
    runner = Counting(config)
    warm_up(runner, config.max_step_tokens)
    assert runner.steps == steps


def test_a_prompt_of_another_length() -> None:
    runner = Counting(EngineConfig(kind="simulated", simulated_step_s=0.0))
    warm_up(runner, None, prompt_tokens=20)
    assert runner.steps == (20, 1)
