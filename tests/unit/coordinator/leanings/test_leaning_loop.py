"""The planners of one coordinator, and of several: who rests, and that no two move workers that both have."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission.entry import NOTHING_HELD
from coordinator.leanings.leaning_loop import LeaningLoop
from coordinator.workers.registry import Registry
from coordinator.workers.rotation import checked_plan
from splitserve.client.registry_client import RegistrationStatus
from splitserve.config.coordinator import AdmissionConfig, CoordinatorConfig
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.cluster.registrations import registration

PREFILL, DECODE = registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE
CONFIG = CoordinatorConfig(admission=AdmissionConfig(ttft_slo_s=1.0, tpot_slo_s=0.05))
STREAMS = registry_pb2.WorkerLoad(
    streams=40,
    running_requests=40,
    total_blocks=1000,
    free_blocks=900,
    step_fit=registry_pb2.DecodeStepFit(base_ms=30, sequence_ms=1),
)
"""More than a worker that leans to decode keeps in time."""


@dataclass
class Site:
    """A coordinator, as far as leanings go. `names` are of the form model.number; the last leans to decode at first."""

    registry: Registry = field(default_factory=lambda: Registry(5.0))
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = LeaningLoop(CONFIG, self.registry, lambda model: NOTHING_HELD)

    def take(self, name: str, pool: registry_pb2.Pool.ValueType) -> None:
        request = registration(name, pool, model=name.split(".")[0])
        request.neutral = True
        self.registry.register(request, 0.0)
        self.registry.set_output_open((name, 1), True)
        self.names.append(name)

    def hear(self, name: str, pool: registry_pb2.Pool.ValueType, led_elsewhere: bool = False) -> None:
        worker = self.registry.get((name, 1))
        assert worker is not None
        peers = [endpoint.agent_id for endpoint in self.registry.peers_of(worker)]
        report = registry_pb2.ReportRequest(
            worker_id=name, epoch=1, load=STREAMS, leaning=pool, led_elsewhere=led_elsewhere
        )
        report.connected_agent_ids.extend(peers)
        self.registry.report(report, 1.0)

    def asked(self) -> list[str]:
        """The workers that are asked to lean elsewhere."""
        workers = [worker for name in self.names if (worker := self.registry.get((name, 1))) is not None]
        return [worker.worker_id for worker in workers if self.registry.leaning_asked_of(worker) is not None]


def site(*models: str) -> Site:
    """Three workers of each model, two of which lean to prefill, and all have many streams."""
    found = Site()
    leanings = {f"{model}.{n}": PREFILL if n < 2 else DECODE for model in models for n in range(3)}
    for name, pool in leanings.items():
        found.take(name, pool)
    for _ in range(2):  # all peers are known the second time
        for name, pool in leanings.items():
            found.hear(name, pool)
    return found


def test_a_plan_rests_the_planner_of_its_own_model_only() -> None:
    here = site("a", "b")
    plan = scaling_pb2.ApplyPlanRequest(prefill_leaning_worker_ids=["a.0"])
    here.registry.apply_plan(checked_plan(plan, 0.0))
    for second in range(3):
        here.loop.look(float(second))
    assert here.asked() == ["b.0"]


def test_what_was_asked_before_a_plan_is_not_asked_beside_it() -> None:
    here = site("a", "b")
    for second in range(2):
        here.loop.look(float(second))
    assert here.asked() == ["a.0", "b.0"]
    plan = scaling_pb2.ApplyPlanRequest(prefill_leaning_worker_ids=["a.1"])
    here.registry.apply_plan(checked_plan(plan, 0.0))
    assert here.asked() == ["b.0"]


def test_a_planner_rests_while_another_coordinator_moves_one_of_its_workers() -> None:
    here = site("a", "b")
    here.hear("a.1", PREFILL, led_elsewhere=True)
    for second in range(3):
        here.loop.look(float(second))
    assert here.asked() == ["b.0"]
    here.hear("a.1", PREFILL)
    for second in range(3, 6):
        here.loop.look(float(second))
    assert here.asked() == ["a.0", "b.0"]


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4), st.randoms(use_true_random=False), st.booleans())
def test_coordinators_with_a_worker_in_common_never_move_two_at_once(
    count: int, chance: random.Random, apart: bool
) -> None:
    """Whichever workers reach whichever coordinators, and in whichever order these look."""
    sites, moved = [Site() for _ in range(count)], dict[int, list[str]]()
    reached: dict[str, set[int]] = {}
    for number in range(6):
        name = f"a.{number}"
        reached[name] = {at for at in range(count) if not apart or chance.random() < 0.6} or {0}
        for at in reached[name]:
            sites[at].take(name, PREFILL if number % 3 < 2 else DECODE)
    for _ in range(2):
        for number, (name, those) in enumerate(reached.items()):
            status = RegistrationStatus([str(at) for at in those])
            for at in chance.sample(sorted(those), len(those)):
                status.accepted(str(at), str(at))
            for at in those:
                pool = PREFILL if number % 3 < 2 else DECODE
                sites[at].hear(name, pool, led_elsewhere=not status.leads(str(at)))
    for second in range(3):
        for at in chance.sample(range(count), count):
            sites[at].loop.look(float(second))
            if sites[at].asked():
                moved[at] = sites[at].asked()
    for at, names in moved.items():
        assert len(names) == 1
        for other in moved.keys() - {at}:
            assert not set(sites[at].names) & set(sites[other].names)
    if not apart:
        assert list(moved) == [0]


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_worker_is_moved_by_the_coordinator_of_the_least_id_that_is_there(lost: str) -> None:
    changes: list[str] = []
    status = RegistrationStatus(["a", "b"], lambda: changes.append(status.leader))
    status.accepted("b", "1")
    assert status.leads("b")
    status.accepted("a", "2")
    assert (status.leads("a"), status.leads("b")) == (False, True)
    status.lost(lost)
    left = {"a": "b", "b": "a"}[lost]
    assert status.leads(left)
    assert not status.leads(lost)
    status.lost(left)
    assert changes == (["1", ""] if lost == "a" else ["1", "2", ""])
