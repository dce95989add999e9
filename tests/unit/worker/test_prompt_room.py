"""Two workers that are each full of reservations whose prompts wait at the other: room for prompts ends that wait."""

from __future__ import annotations

import random
from typing import Any

import pytest

from decode_worker.requests import Granted
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError
from splitserve.roles import RoleName
from tests.support.roles.both_rig import BothRig, answer, expected
from worker.role import check_role

pytestmark = pytest.mark.timeout(60)


def prompt(length: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(256) for _ in range(length)]


@pytest.mark.parametrize("engine", [{"num_blocks": 24}, {"num_blocks": 64, "max_running_requests": 4}])
def test_prompts_never_wait_for_reservations(engine: dict[str, Any]) -> None:
    """More requests than both pools, or slots, hold, half of them in each direction, all reserved before any prompt."""
    rig = BothRig(prefix_cache=False, **engine)
    prompts = {f"r{number}": prompt(33, number) for number in range(24)}
    asked = {}
    for number, (name, tokens) in enumerate(prompts.items()):
        sender, receiver = (rig.a, rig.b) if number % 2 else (rig.b, rig.a)
        asked[name] = sender, receiver, receiver.reserve(name, tokens, sender.agent_id)
    started: set[str] = set()
    assert sum(bool(answers) for _, _, answers in asked.values()) >= 4
    for _ in range(60):
        for name, (sender, _, answers) in asked.items():
            if answers and name not in started:
                granted = answers[0]
                assert isinstance(granted, Granted)
                sender.start(name, prompts[name], granted.ticket)
                started.add(name)
        rig.run(10)
    for name, (sender, receiver, _) in asked.items():
        assert answer(sender, receiver, name) == expected(prompts[name]), name
    rig.assert_empty()


def test_without_room_they_would() -> None:
    """The same, with engines that keep none: what the room is for."""
    rig = BothRig(prefix_cache=False, num_blocks=24)
    for node in (rig.a, rig.b):
        node.core.keep_prompt_room(False)
    asked = []
    for number in range(24):
        sender, receiver = (rig.a, rig.b) if number % 2 else (rig.b, rig.a)
        asked.append((sender, receiver.reserve(f"r{number}", prompt(33, number), sender.agent_id)))
    for number, (sender, answers) in enumerate(asked):
        if answers:
            granted = answers[0]
            assert isinstance(granted, Granted)
            sender.start(f"r{number}", prompt(33, number), granted.ticket)
    rig.run(100)
    assert all(not node.first_tokens(f"r{number}") for node in (rig.a, rig.b) for number in range(24))


def test_the_first_reservation_may_take_the_room() -> None:
    rig = BothRig(prefix_cache=False, num_blocks=24)
    rig.hand_off(rig.a, rig.b, "long", prompt(150, 1))  # 19 of B's 24 blocks, and of A's
    (second,) = (rig.b.reserve("short", prompt(9, 2), rig.a.agent_id),)
    assert second == []
    rig.run()
    assert answer(rig.a, rig.b, "long") == expected(prompt(150, 1))
    assert len(second) == 1
    rig.b.consumer.keep_requests(rig.b.core, "c", frozenset(), rig.clock.now)


def test_settings_that_leave_no_room_are_refused() -> None:
    engine = EngineConfig(kind="simulated", max_running_requests=1)
    with pytest.raises(ConfigError, match="max_running_requests") as refused:
        check_role(WorkerConfig(worker_id="w", model="simulated", engine=engine))
    assert refused.value.field == "engine.max_running_requests"


def test_layers_of_a_vllm_worker_that_decodes_lie_in_one_stage() -> None:
    def config(role: RoleName, options: str) -> WorkerConfig:
        engine = EngineConfig(kind="vllm", engine_args=options)
        return WorkerConfig(worker_id="w", model="m", role=role, engine=engine)

    for role, options in (("prefill", "-pp 2"), ("decode", "-pp 1"), ("decode", "-tp 2"), ("both", "-tp 2")):
        check_role(config(role, options))
    for role in ("decode", "both"):
        with pytest.raises(ConfigError, match="--pipeline-parallel-size is for prefill workers") as refused:
            check_role(config(role, "--pipeline-parallel-size=2"))
        assert refused.value.field == "engine.engine_args"
