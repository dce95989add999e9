"""An edited policy file: taken without a restart, or refused with its line while the one before stays in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoscaler.control_loop import ControlLoop, PolicyChange
from autoscaler.decide import PlanMemory, PoolState, carried
from autoscaler.loop_metrics import loop_metrics
from autoscaler.policies.policy_file import parse_policy
from autoscaler.policies.predictive import PredictiveMemory
from autoscaler.policies.recommendation import TrimMemory
from autoscaler.policy_in_force import PolicyFile, PolicyInForce
from autoscaler.reconcile import PlannedRotation
from autoscaler.signals.observer import Observer
from tests.support.policy_files import reread
from tests.support.scaling.fake_actuator import FakeActuator
from tests.support.scaling.signal_sources import Clock, FakeSource, worker

POLICY = """\
interval_s: 5
prefill:
  target_ms: 1000
  min_replicas: {least}
decode:
  target_ms: 50
"""


class Edited:
    """A loop that follows a policy file. The coordinators see one ready replica in each pool."""

    def __init__(self, folder: Path, text: str = POLICY.format(least=1)) -> None:
        self.path = folder / "policy.yaml"
        self.path.write_text(text)
        self.clock, self.actuator = Clock(), FakeActuator()
        source = FakeSource("c:1", self.clock)
        source.workers = [worker("prefill-9"), worker("decode-9")]
        self.observer = Observer([source], self.actuator.replicas, clock=self.clock)
        self.policy = PolicyInForce(PolicyFile(self.path), self.observer)
        first = self.policy.first()
        self.loop = ControlLoop(
            self.observer.observe,
            first.decide,
            self,
            self.actuator,
            first.policy,
            changed_policy=self.changed,
        )

    def changed(self) -> PolicyChange | None:
        reread(self.policy.file)
        return self.policy.poll()

    async def apply(self, where: PlannedRotation, decisions: Any, valid_s: float) -> None:
        pass

    async def tick(self) -> tuple[int, float, float]:
        """Prefill replicas wanted after a round; whether the file is current, and how often it was not."""
        self.clock.now += 5
        await self.loop.tick()
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for metric in loop_metrics(self.loop.status)
            for sample in metric.samples
        }
        errors = found["splitserve_autoscaler_errors_total", "policy"]
        return (
            self.loop.status.plans["prefill"].desired,
            found["splitserve_autoscaler_policy_current",],
            errors,
        )


async def test_an_edit_is_taken_at_the_next_tick_and_nothing_is_forgotten(tmp_path: Path) -> None:
    edited = Edited(tmp_path)
    assert await edited.tick() == (1, 1, 0)
    await edited.tick()
    before = edited.loop.memory
    edited.path.write_text(POLICY.format(least=3))
    assert await edited.tick() == (3, 1, 0)
    assert edited.loop.status.policy_reloads == 1
    assert edited.loop.policy.prefill.min_replicas == 3
    after = edited.loop.memory
    assert before.decode.behavior.recommendations[0] in after.decode.behavior.recommendations
    assert len((await edited.observer.observe()).arrivals) == 2, "what arrived before the edit still counts"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (POLICY.format(least=99), "policy.yaml, line 2: prefill.max_replicas (8) must be"),
        (POLICY.format(least=-1), "policy.yaml, line 4: prefill.min_replicas: "),
        (POLICY.format(least=1).replace("50", "fast"), "policy.yaml, line 6: decode.target_ms: "),
        (POLICY.format(least=1) + "speed: 3\n", "policy.yaml, line 7: speed: "),
        ("prefill: [1\ndecode: {", "policy.yaml, line 2: not valid YAML: "),
        (POLICY.format(least=1) + "gpu_budget: 1\n", "policy.yaml, line 7: gpu_budget (1) must hold"),
        (
            "prefill: {kind: custom, function: 'nowhere:f'}\ndecode: {target_ms: 5}",
            "line 1: prefill.function: ",
        ),
        ("- 1", "policy.yaml"),
    ],
)
async def test_a_bad_edit_keeps_the_old_one_in_force_and_says_the_line(
    tmp_path: Path, text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    edited = Edited(tmp_path)
    edited.path.write_text(POLICY.format(least=2))
    assert await edited.tick() == (2, 1, 0)
    edited.path.write_text(text)
    for _ in range(3):
        assert await edited.tick() == (2, 0, 1), "reported once, and in the gauge for as long as it lasts"
    said = [
        record.__dict__["event_fields"] for record in caplog.records if record.message == "scaling.failed"
    ]
    assert [fields["hop"] for fields in said] == ["policy"]
    assert words in said[0]["error"]
    edited.path.write_text(POLICY.format(least=4))
    assert await edited.tick() == (4, 1, 1)


async def test_a_right_version_after_a_refused_one_is_all_that_is_told(tmp_path: Path) -> None:
    edited = Edited(tmp_path)
    for text in ("speed: 3", POLICY.format(least=2)):
        edited.path.write_text(text)
        reread(edited.policy.file)
    assert await edited.tick() == (2, 1, 0)


async def test_the_same_again_after_a_refused_one_is_current(tmp_path: Path) -> None:
    edited = Edited(tmp_path)
    for _ in range(2):
        edited.path.write_text("speed: 3")
        assert (await edited.tick())[1] == 0
        edited.path.write_text(POLICY.format(least=1))
        assert (await edited.tick())[:2] == (1, 1)
    reloads = edited.loop.status.policy_reloads
    edited.path.touch()
    await edited.tick()
    assert edited.loop.status.policy_reloads == reloads, "a touch is no change"


async def test_an_edit_between_ticks_is_not_in_force_before_the_next_one(tmp_path: Path) -> None:
    """The file is read by its watcher, not by the loop: what is only half of it there is nobody's policy."""
    edited = Edited(tmp_path)
    edited.path.write_text(POLICY.format(least=2))
    edited.loop.changed_policy = edited.policy.poll
    assert await edited.tick() == (1, 1, 0)
    assert not edited.policy.file.files.is_due(), "it has not stood still yet"
    assert edited.policy.file.files.is_due()
    reread(edited.policy.file)
    assert await edited.tick() == (2, 1, 0)


async def test_a_file_that_is_gone_for_a_moment_changes_nothing(tmp_path: Path) -> None:
    edited = Edited(tmp_path)
    await edited.tick()
    text = edited.path.read_text()
    edited.path.unlink()
    assert await edited.tick() == (1, 0, 1)
    edited.path.write_text(text.replace("min_replicas: 1", "min_replicas: 2"))
    assert await edited.tick() == (2, 1, 1)


async def test_an_edit_of_the_code_that_the_policy_names(tmp_path: Path) -> None:
    code = (
        "from autoscaler.policies.recommendation import Recommendation\n"
        "def mine(memory, snapshot, status):\n"
        "    return Recommendation({wanted}, 'why'), memory\n"
    )
    (tmp_path / "mine.py").write_text(code.format(wanted=2))
    pool = "{kind: custom, function: 'mine.py:mine'}"
    edited = Edited(tmp_path, f"prefill: {pool}\ndecode: {pool}\n")
    assert await edited.tick() == (2, 1, 0)
    (tmp_path / "mine.py").write_text(code.format(wanted="oh dear"))
    assert await edited.tick() == (2, 0, 1)
    (tmp_path / "mine.py").write_text(code.format(wanted=5))
    assert await edited.tick() == (5, 1, 1)


SLO, TARGET = {"target_ms": 100}, {"kind": "target", "metric": "m", "target": 1}
PREDICTIVE = {"target_ms": 100, "kind": "predictive", "interval_s": 900}
HISTORY = PredictiveMemory(inner="trend", rates=(1.0, 2.0))


@pytest.mark.parametrize(
    ("before", "after", "memory", "kept"),
    [
        (SLO, SLO | {"target_ms": 200}, TrimMemory(), TrimMemory()),
        (PREDICTIVE, PREDICTIVE | {"target_ms": 200}, HISTORY, HISTORY),
        (PREDICTIVE, PREDICTIVE | {"interval_s": 600}, HISTORY, None),
        (PREDICTIVE, SLO, HISTORY, None),
        (SLO, PREDICTIVE, TrimMemory(), None),
        (SLO, TARGET, TrimMemory(), None),
        (TARGET, SLO, None, None),
    ],
)
def test_forecasts_survive_as_far_as_the_new_policy_understands_them(
    before: dict[str, Any], after: dict[str, Any], memory: Any, kept: Any
) -> None:
    old, new = (parse_policy({"prefill": pool, "decode": SLO}) for pool in (before, after))
    found = carried(PlanMemory(prefill=PoolState(7, policy=memory)), old, new)
    assert (found.prefill.desired, found.prefill.policy) == (7, kept)
