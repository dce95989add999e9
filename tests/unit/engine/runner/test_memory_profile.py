"""The share of a device that becomes KV, from a trial run on a stand-in for its memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.model_runner import SampledToken, ScheduledSequence
from engine.kv_cache.memory import choose_num_blocks
from engine.runner.memory_profile import OUTSIDE_BYTES, SPARE_BYTES, kv_budget, with_kv_memory
from engine.runner.simulated_runner import SimulatedRunner
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError

GIB = 2**30
STEP_TOKENS = 96
SETTINGS = {"kind": "simulated", "simulated_step_s": 0, "simulated_prefill_token_s": 0}


@pytest.mark.parametrize(
    ("total", "free", "own", "share", "kv"),
    [
        (80, 78, 16, 0.9, 72 - 16),
        (80, 78, 16, 0.45, 36 - 16),
        # The other worker on the device has taken its part.
        (80, 42, 16, 0.45, 36 - 16),
        # Others take more than the shares assume: no more than is free.
        (80, 10, 16, 0.9, None),
        (24, 22, 16, 0.5, 12 - 16),
    ],
)
def test_budget(total: int, free: int, own: int, share: float, kv: int | None) -> None:
    expected = free * GIB - SPARE_BYTES if kv is None else kv * GIB - OUTSIDE_BYTES
    assert kv_budget(total * GIB, free * GIB, own * GIB, share) == pytest.approx(expected, abs=1)


class Memory:
    """A device with weights of 4 GiB on it; the trial's step takes 2 more."""

    def __init__(self, total: int = 40 * GIB) -> None:
        self._total = total
        self.highest = 0
        self.trials: list[Trial] = []

    def reset_peak(self) -> None:
        self.highest = 4 * GIB

    def peak(self) -> int:
        return self.highest

    def free(self) -> int:
        assert all(trial.closed for trial in self.trials)
        return self._total - 4 * GIB

    def total(self) -> int:
        return self._total

    def trial(self, config: EngineConfig) -> Trial:
        self.trials.append(Trial(config, self))
        return self.trials[-1]


class Trial(SimulatedRunner):
    def __init__(self, config: EngineConfig, memory: Memory) -> None:
        super().__init__(config)
        self.steps: list[int] = []
        self.closed = False
        self._memory = memory

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        self.steps.append(sum(sequence.num_new for sequence in batch))
        pool = self.pool_memory.num_blocks * self.layout.block_bytes
        self._memory.highest = max(self._memory.highest, 6 * GIB + pool)
        return super().execute(batch)

    def close(self) -> None:
        self.closed = True
        super().close()


def test_a_trial_computes_the_largest_step_and_one_that_decodes() -> None:
    memory = Memory()
    config = with_kv_memory(EngineConfig.model_validate(SETTINGS), STEP_TOKENS, memory.trial, memory)
    (trial,) = memory.trials
    assert trial.steps == [STEP_TOKENS, 1]
    assert trial.closed
    assert config.kv_memory_bytes == int(0.9 * 40 * GIB) - 6 * GIB - OUTSIDE_BYTES
    layout = trial.layout
    assert choose_num_blocks(config, layout) == config.kv_memory_bytes // layout.block_bytes


@pytest.mark.parametrize("given", [{"num_blocks": 9}, {"kv_memory_bytes": 2**20}])
def test_what_is_set_stays(given: dict[str, int]) -> None:
    memory = Memory()
    config = EngineConfig.model_validate(SETTINGS | given)
    assert with_kv_memory(config, STEP_TOKENS, memory.trial, memory) is config
    assert not memory.trials


def test_a_share_that_is_too_small_is_one_sentence() -> None:
    memory = Memory(total=10 * GIB)
    config = EngineConfig.model_validate(SETTINGS | {"device_memory_share": 0.5})
    with pytest.raises(ConfigError) as refused:
        with_kv_memory(config, STEP_TOKENS, memory.trial, memory)
    assert refused.value.message == (
        "engine.device_memory_share: 0.5 of the device leaves nothing for KV;"
        " model and working memory take 0.75 of it, and 6.0 GiB are free"
    )
    assert memory.trials[0].closed
