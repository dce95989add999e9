"""The seasons of `predictive` over restarts of the autoscaler: recorded, written, read, and gone on with in phase."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from autoscaler.control_loop import ControlLoop, LoopSettings
from autoscaler.decisions.decider import Decider
from autoscaler.policies.policy_file import PredictivePool
from autoscaler.policies.predictive import SEASONS_KEPT, PredictiveMemory, resumed
from autoscaler.policy_in_force import LearnedHistory, PolicyFile, PolicyInForce
from autoscaler.reconcile import PlannedRotation
from autoscaler.signals.history_file import MAX_RATES, HistoryFile, SeasonRecord
from autoscaler.signals.observer import Observer
from tests.support.scaling.fake_actuator import FakeActuator
from tests.support.scaling.signal_sources import Clock, FakeSource, worker
from tests.support.waiting import PATIENCE_S

pytest.importorskip("statsmodels")

SEASON, INTERVAL_S = 8, 10.0
SEASON_S = SEASON * INTERVAL_S
POOL = f"{{kind: predictive, target_ms: 1000, season_s: {SEASON_S}, interval_s: {INTERVAL_S}}}"
POLICY = f"interval_s: 5\nprefill: {POOL}\ndecode: {{target_ms: 50}}\n"
EPOCH_S = 1_700_000_000.0
HISTORY_S = 1800.0


def demand(wall_s: float) -> int:
    return round(20 + 18 * math.sin(2 * math.pi * wall_s / SEASON_S))


class Life:
    """One life of an autoscaler on a machine whose monotonic clock began at `boot_s`."""

    def __init__(self, folder: Path, wall: Clock, boot_s: float, policy: str = POLICY) -> None:
        (folder / "policy.yaml").write_text(policy)
        self.wall, file = wall, PolicyFile(folder / "policy.yaml")
        self.source = FakeSource("c:1", wall)
        self.source.workers = [worker("prefill-9"), worker("decode-9")]
        actuator = FakeActuator()
        observer = Observer(
            [self.source], actuator.replicas, clock=lambda: wall.now - boot_s, wall_clock=wall
        )
        first = PolicyInForce(file, observer, LoopSettings(interval_s=0.0)).first()
        self.loop = ControlLoop(
            observer.observe, first.decide, self, actuator, first.settings, decider=Decider(turn_s=PATIENCE_S)
        )
        self.learned = LearnedHistory(file, observer, self.loop)
        self.history = HistoryFile(folder / "history.json", wall_clock=wall)
        self.history.restore(self.learned, HISTORY_S)

    async def apply(self, where: PlannedRotation, decisions: Any) -> None:
        pass

    async def live(self, seconds: float) -> None:
        for _ in range(round(seconds / 5)):
            self.wall.now += 5
            self.source.arrive(demand(self.wall.now))
            await self.loop.tick()

    def save(self) -> None:
        self.history.save(self.learned.history())

    @property
    def memory(self) -> PredictiveMemory:
        memory = self.loop.memory.prefill.policy
        assert isinstance(memory, PredictiveMemory)
        return memory


def peak(memory: PredictiveMemory) -> int:
    """Intervals from now to that of the highest forecast."""
    return memory.forecast.index(max(memory.forecast))


@pytest.mark.slow
async def test_a_restart_goes_on_with_the_seasons(tmp_path: Path) -> None:
    wall = Clock(EPOCH_S)
    life = Life(tmp_path, wall, EPOCH_S - 1000)
    await life.live(2.5 * SEASON_S + 5)  # to the middle of an interval
    life.save()
    again = Life(tmp_path, wall, EPOCH_S + 77)  # another boot of the machine
    assert again.memory.rates == life.memory.rates
    assert again.memory.forecast == pytest.approx(life.memory.forecast)
    assert len(again.memory.forecast) == SEASON
    await again.live(INTERVAL_S)
    assert len(again.memory.rates) == len(life.memory.rates) + 1
    assert again.memory.interval == (life.memory.interval or 0) + 1
    assert peak(again.memory) == (peak(life.memory) - 1) % SEASON
    assert "decode" not in again.learned.history().seasons


@pytest.mark.parametrize("gap", [0, 1, 3, SEASON - 1, SEASON, SEASON + 1, SEASON + 3, 3 * SEASON + 5])
def test_after_a_gap_of_any_length_the_season_is_in_phase(gap: int) -> None:
    pool = PredictivePool(kind="predictive", target_ms=1, season_s=SEASON_S, interval_s=INTERVAL_S)
    begin = 3 * SEASON  # a season begins with this interval
    rates = tuple(100.0 if index % SEASON == 0 else 10.0 for index in range(3 * SEASON))
    memory = PredictiveMemory(interval=begin, rates=rates)
    found = resumed(pool, memory, (begin + gap + 0.5) * INTERVAL_S)
    assert (found.interval, found.covered_s, found.amount) == (begin + gap, 0.0, 0.0)
    assert len(found.rates) <= SEASONS_KEPT * SEASON
    assert peak(found) == -gap % SEASON
    assert all(rate in (10.0, 100.0) for rate in found.rates), "what was not recorded is not 0"


@pytest.mark.parametrize(
    ("policy", "after_s", "kept"),
    [
        (POLICY, (SEASONS_KEPT - 1) * SEASON_S, True),
        (POLICY, SEASONS_KEPT * SEASON_S + 10, False),
        (POLICY.replace("interval_s: 10.0", "interval_s: 20"), 0.0, False),
        (POLICY.replace(POOL, "{target_ms: 1000}"), 0.0, False),
    ],
)
async def test_what_the_policy_cannot_go_on_from_begins_anew(
    tmp_path: Path, policy: str, after_s: float, kept: bool
) -> None:
    wall = Clock(EPOCH_S)
    life = Life(tmp_path, wall, EPOCH_S)
    await life.live(2.5 * SEASON_S)
    life.save()
    wall.now += after_s
    again = Life(tmp_path, wall, EPOCH_S, policy)
    memory = None if again.loop.memory is None else again.loop.memory.prefill.policy
    assert (memory is not None) is kept


async def test_seasons_outlive_the_arrivals_of_a_file(tmp_path: Path) -> None:
    wall, record = Clock(EPOCH_S), 900.0
    policy = POLICY.replace(POOL, POOL.replace(f"{SEASON_S}", "86400").replace(f"{INTERVAL_S}", f"{record}"))
    life = Life(tmp_path, wall, EPOCH_S, policy)
    await life.live(2 * record)
    life.save()
    wall.now += 2 * HISTORY_S
    again = Life(tmp_path, wall, EPOCH_S, policy)
    assert again.memory.rates[0] == life.memory.rates[0]
    assert again.learned.history().arrivals == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rates": [-1.0]},
        {"rates": ["x"]},
        {"rates": [float("inf")]},
        {"rates": [1.0] * (MAX_RATES + 1)},
        {"covered_s": float("nan")},
        {"interval": -1},
        {"interval": int(EPOCH_S)},
        {"seen_until_wall_s": 2 * EPOCH_S},
        {"more": 1},
    ],
)
async def test_a_wrong_season_is_not_used(tmp_path: Path, wrong: dict[str, Any]) -> None:
    wall = Clock(EPOCH_S)
    life = Life(tmp_path, wall, EPOCH_S)
    await life.live(2.5 * SEASON_S)
    life.save()
    path = tmp_path / "history.json"
    content = json.loads(path.read_text())
    content["seasons"]["prefill"] |= wrong
    path.write_text(json.dumps(content))
    assert Life(tmp_path, wall, EPOCH_S).loop.memory is None


def test_the_longest_record_fits_the_file() -> None:
    record = SeasonRecord(
        season_s=1,
        interval_s=1,
        seen_until_wall_s=1,
        interval=1,
        amount=1,
        covered_s=1,
        rates=(1 / 3,) * MAX_RATES,
    )
    assert len(record.model_dump_json()) < 2**20
