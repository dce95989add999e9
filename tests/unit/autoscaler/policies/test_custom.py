"""Policies of one's own: where they are found, what is refused at the start, what happens when they fail later."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autoscaler.decide import make_decide
from autoscaler.plan import ScalingPlan
from autoscaler.policies import custom
from autoscaler.policies.custom import BoundedFunction
from autoscaler.policies.policy_file import parse_policy
from autoscaler.policies.recommendation import PoolStatus, Recommendation
from autoscaler.policy_in_force import PolicyFile, PolicyInForce
from autoscaler.signals.observer import Observer
from autoscaler.snapshot import Snapshot
from splitserve.errors import ConfigError
from tests.support.scaling.snapshots import snapshot

MODULE = "tests.support.scaling.custom_policy:by_queue"
GOOD = """
from autoscaler.policies.recommendation import Recommendation

def mine(memory, snapshot, status, wanted=3):
    return Recommendation(wanted, "as I like"), memory
"""


HELD: list[threading.Event] = []


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """What functions wait for that do not return before the test ends."""
    HELD.append(threading.Event())
    yield HELD[-1]
    HELD.pop().set()


def decided(function: str, seen: Snapshot | None = None, **options: Any) -> ScalingPlan:
    pool = {"kind": "custom", "function": function, "options": options}
    rules = parse_policy({"prefill": pool, "decode": {"target_ms": 50}})
    return make_decide(rules)(None, seen or snapshot())[0]


def test_a_function_of_a_module() -> None:
    assert decided(MODULE, snapshot(metrics={"queue_depth": 60.0})).prefill.desired == 6
    assert decided(MODULE, snapshot(metrics={"queue_depth": 40.0}), each=5).prefill.desired == 8


def test_a_function_of_a_file_beside_the_policy(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    path = tmp_path / "policy.yaml"
    path.write_text("prefill: {kind: custom, function: 'mine.py:mine'}\ndecode: {target_ms: 50}\n")
    loaded = PolicyFile(path).value
    assert make_decide(loaded.rules, loaded.functions)(None, snapshot(prefill=1))[0].prefill.desired == 3
    assert not list(tmp_path.glob("__pycache__"))


def test_a_name_alone_names_no_function() -> None:
    with pytest.raises(ConfigError, match="write module:function"):
        decided("nobody")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = (", "line 1: '(' was never closed"),
        ("\nimport nowhere_at_all", "line 2: No module named 'nowhere_at_all'"),
        ("mine = 3", "is not a function"),
        ("", "has no attribute 'mine'"),
        ("def mine():\n    pass", "takes 0 positional arguments but 3 were given"),
        ("def mine(memory, snapshot, status):\n    return 3", "must return (Recommendation, memory), not 3"),
        (
            "def mine(memory, snapshot, status):\n\n    return snapshot.nothing",
            "line 3: 'Snapshot' object has no",
        ),
        (GOOD.replace("wanted,", "-1,"), "wanted must be a whole number from 0 on, not -1"),
        (GOOD.replace("wanted,", "2.5,"), "wanted must be a whole number from 0 on, not 2.5"),
        (GOOD.replace("as I like", ""), "reason must say why"),
        (GOOD.replace('like")', 'like", float("nan"))'), "need must be a finite number"),
        ("import sys\nsys.exit('no')", "line 2: no"),
        ("\nclass Panic(BaseException):\n    pass\nraise Panic", "line 4: Panic"),
        ("raise KeyboardInterrupt", "line 1: KeyboardInterrupt"),
        ("raise TimeoutError('no answer')", "line 1: no answer"),
        (GOOD.replace("wanted,", "next(numbers),") + "\nnumbers = iter(range(9))", "to the same snapshot"),
    ],
)
def test_what_breaks_the_contract_is_refused_at_the_start(tmp_path: Path, code: str, words: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(ConfigError) as caught:
        decided(f"{path}:mine")
    assert words in caught.value.message
    assert caught.value.field == "prefill.function"
    assert len(caught.value.message.splitlines()) == 1


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'eech'"):
        decided(MODULE, eech=5)


@pytest.mark.parametrize(
    "error", ["KeyError('x')", "SystemExit('x')", "BaseException('x')", "GeneratorExit('x')"]
)
def test_one_that_fails_later_keeps_the_count_and_says_where(tmp_path: Path, error: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD.replace("    return", f"    if snapshot.now_s:\n        raise {error}\n    return"))
    plan = decided(f"{path}:mine", snapshot(prefill=5))
    assert plan.prefill.desired == 5
    assert plan.prefill.error.startswith(f"line 6: {error.partition('(')[0]}: ")
    assert plan.decode.error == ""


def test_not_even_an_interrupt_of_its_own_ends_a_decision(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    raising = "    if snapshot.now_s:\n        raise KeyboardInterrupt\n    return"
    path.write_text(GOOD.replace("    return", raising))
    with ThreadPoolExecutor() as pool:
        plan = pool.submit(decided, f"{path}:mine", snapshot(prefill=5)).result()
    assert plan.prefill.desired == 5
    assert plan.prefill.error.startswith("line 6: KeyboardInterrupt")


def test_one_that_does_not_return_is_refused_at_the_start(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"from {__name__} import HELD\nHELD[-1].wait()\n" + GOOD)
    monkeypatch.setattr(custom, "LOAD_S", 0.05)
    with pytest.raises(ConfigError) as caught:
        decided(f"{path}:mine")
    assert re.search(r"mine\.py:mine: has not returned for \d+ s$", caught.value.message)


def test_one_that_does_not_return_later_keeps_the_count_and_is_not_called_twice(
    held: threading.Event,
) -> None:
    calls: list[Any] = []

    def slow(memory: Any, snapshot: Snapshot, status: PoolStatus) -> tuple[Recommendation, str]:
        calls.append(memory)
        if len(calls) == 2:
            held.wait()
        return Recommendation(7, "as I like"), "learned"

    bounded, status = BoundedFunction(slow, "decode", limit_s=60), PoolStatus(4, 4, 0)
    assert bounded(None, snapshot(), status) == (Recommendation(7, "as I like"), "learned")
    bounded._limit_s = 0.05  # from here on it does not return
    for _ in range(3):
        kept, memory = bounded("learned", snapshot(), status)
        assert (kept.wanted, memory) == (4, None)
        assert kept.error.startswith("decode.function: has not returned for ")
    assert calls == [None, "learned"]
    held.set()
    patient = BoundedFunction(slow, "decode", limit_s=60)
    assert patient(None, snapshot(), status)[0].wanted == 7
    # The one that was overdue is asked again once it has returned.
    overdue = bounded._overdue
    assert overdue is not None
    overdue.result(60)
    bounded._limit_s = 60
    assert bounded(None, snapshot(), status)[0].wanted == 7


def test_a_running_autoscaler_bounds_its_functions(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("prefill: {kind: custom, function: mine.py:mine}\ndecode: {target_ms: 50}\n")
    waits = f"from {__name__} import HELD; HELD[-1].wait()"
    (tmp_path / "mine.py").write_text(
        GOOD.replace("    return", f"    if snapshot.now_s:\n        {waits}\n    return")
    )
    monkeypatch.setattr(custom, "CALL_S", 0.05)
    change = PolicyInForce(PolicyFile(path), Observer([], None)).first()
    plan, _ = change.decide(None, snapshot(prefill=5))
    assert plan.prefill.desired == 5
    assert "has not returned" in plan.prefill.error
    assert plan.decode.error == ""
