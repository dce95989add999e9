"""Workers that sleep: what a plan asks of them, who may send them requests, and who may write to them."""

from __future__ import annotations

import pytest

from coordinator.workers.registry import Registry
from coordinator.workers.registry_service import weights_holders
from coordinator.workers.rotation import NO_PLAN, checked_plan
from coordinator.workers.snapshot import Isolation, Worker
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.cluster.registrations import registration

PREFILL, DECODE = registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE
NONE, SLEEP, WAKE = (
    registry_pb2.SLEEP_ORDER_UNSPECIFIED,
    registry_pb2.SLEEP_ORDER_SLEEP,
    registry_pb2.SLEEP_ORDER_WAKE,
)


class World:
    """A registry with a prefill worker p that is connected to the decode worker d."""

    def __init__(self, *, standby: bool = False) -> None:
        self.registry = Registry(1000.0)
        self.standby = standby
        self.join("p", PREFILL)
        self.join("d", DECODE)

    def join(
        self, name: str, pool: registry_pb2.Pool.ValueType, epoch: int = 1, sleeping: bool = False
    ) -> None:
        request = registration(name, pool, epoch=epoch)
        request.standby, request.sleeping = self.standby, sleeping
        worker = self.registry.register(request, 0.0)
        self.registry.set_output_open(worker.key, True)
        if not sleeping:
            for there in self.registry.snapshot().workers:
                self.report(there.worker_id)

    def report(self, name: str, *, sleeping: bool | None = None, wake_s: float = 0.0) -> Worker:
        worker = self.worker(name)
        sleeping = worker.sleeping if sleeping is None else sleeping
        agents = [w.agent_id for w in self.registry.snapshot().workers if w.decodes] if name == "p" else []
        report = registry_pb2.ReportRequest(
            worker_id=name,
            epoch=worker.epoch,
            load=registry_pb2.WorkerLoad(total_blocks=8, free_blocks=8),
            connected_agent_ids=[] if sleeping else agents,
            sleeping=sleeping,
            wake_seconds=wake_s,
        )
        return self.registry.report(report, 0.0)

    def worker(self, name: str) -> Worker:
        (found,) = [w for w in self.registry.snapshot().workers if w.worker_id == name]
        return found

    def plan(self, now: float = 0.0, **lists: list[str]) -> None:
        request = scaling_pb2.ApplyPlanRequest(**{f"{name}_worker_ids": ids for name, ids in lists.items()})
        self.registry.apply_plan(checked_plan(request, now, self.registry.plan))

    def order(self, name: str) -> int:
        return self.registry.sleep_asked_of(self.worker(name))

    def state(self, name: str) -> str:
        state = self.registry.snapshot().state_of(self.worker(name))
        return scaling_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()


def test_what_is_in_rotation_is_to_be_awake_and_what_a_plan_lets_sleep_is_not() -> None:
    world = World()
    assert (world.order("p"), world.order("d")) == (WAKE, WAKE)
    world.plan(standby=["p", "d"], sleeping=["d"])
    assert (world.order("p"), world.order("d")) == (WAKE, SLEEP)
    world.plan(standby=["p"], active=["d"])
    assert world.order("d") == WAKE


def test_who_is_expected_to_compute_a_prompt_or_is_isolated_stays_awake() -> None:
    world = World()
    coming = world.registry.loads.expect(("p", 1), 100)
    assert coming is not None
    world.plan(standby=["p", "d"], sleeping=["p", "d"])
    assert (world.order("p"), world.order("d")) == (NONE, SLEEP)
    coming.withdraw()
    assert world.order("p") == SLEEP
    world.registry.set_isolations({world.worker("d").key: Isolation(worker=True)})
    assert (world.order("p"), world.order("d")) == (SLEEP, WAKE)


def test_without_a_plan_a_worker_that_registered_as_standby_stays_as_it_is() -> None:
    """As after a restart of the coordinator: it wakes nobody up whom it does not need."""
    world = World(standby=True)
    assert world.order("d") == NONE
    world.plan(standby=["d"], sleeping=["d"])
    assert (world.order("p"), world.order("d")) == (NONE, SLEEP)
    world.plan(standby=["d"])
    assert world.order("d") == WAKE
    world.registry.expire(100.0)
    assert world.order("d") == NONE


def test_when_the_autoscaler_is_gone_those_that_it_put_to_sleep_serve_again() -> None:
    world = World()
    world.plan(standby=["d"], sleeping=["d"])
    world.report("d", sleeping=True)
    assert world.order("d") == SLEEP
    world.registry.expire(100.0)
    assert world.registry.plan is NO_PLAN
    assert world.order("d") == WAKE


def test_each_change_of_who_is_to_sleep_reaches_the_workers() -> None:
    world = World(standby=True)
    world.plan(standby=["p", "d"])
    version = world.registry.version
    world.plan(standby=["p", "d"], sleeping=["d"])
    assert world.registry.version > version
    version = world.registry.version
    world.plan(standby=["p", "d"], sleeping=["d"])
    assert world.registry.version == version, "the same again wakes nobody"
    world.plan(standby=["p", "d"])
    assert world.registry.version > version


@pytest.mark.parametrize(
    "lists", [{"sleeping": ["d"]}, {"active": ["d"], "sleeping": ["d"], "standby": ["p"]}]
)
def test_only_standbys_may_sleep(lists: dict[str, list[str]]) -> None:
    world = World()
    with pytest.raises(InvalidArgumentError, match="'d'") as refused:
        world.plan(**lists)
    assert refused.value.field == "sleeping_worker_ids"
    assert world.registry.plan is NO_PLAN


def test_nobody_sends_to_one_that_sleeps_or_writes_to_it() -> None:
    world = World()
    assert world.state("d") == "ready"
    assert [peer.agent_id for peer in world.registry.peers_of(world.worker("p"))] == [
        world.worker("d").agent_id
    ]
    version = world.registry.version
    world.report("d", sleeping=True)
    assert world.registry.version > version
    assert world.state("d") == "sleeping"
    assert not world.worker("d").usable
    assert world.registry.snapshot().lacks_workers("words")
    assert world.registry.peers_of(world.worker("p")) == []
    world.report("p", sleeping=True)
    assert world.registry.peers_of(world.worker("p")) == []
    assert world.state("p") == "sleeping", "connected to nobody, and not starting"


def test_one_whose_peers_all_sleep_misses_none() -> None:
    """Else a replica that is started meanwhile would start for ever."""
    world = World(standby=True)
    world.report("d", sleeping=True)
    world.join("q", PREFILL)
    assert (world.state("p"), world.state("q")) == ("standby", "standby")
    world.join("e", DECODE)
    assert world.state("q") == "starting", "there is one to connect to, and it is not connected"


def test_a_writer_that_has_fallen_asleep_writes_no_more() -> None:
    """Blocks that were reserved for its KV come back, also where its worker is asked for it too late."""
    world = World()
    assert world.registry.ended_writers_for(world.worker("d")) == []
    world.report("p", sleeping=True)
    version = world.registry.version
    world.report("p", sleeping=True)
    assert world.registry.version == version
    assert world.registry.ended_writers_for(world.worker("d")) == [world.worker("p").agent_id]


def test_it_wakes_up_as_another_boot_where_it_had_been_put() -> None:
    world = World(standby=True)
    world.plan(standby=["d"], active=["p"], sleeping=["d"])
    world.report("d", sleeping=True)
    world.plan(active=["p", "d"])
    assert world.order("d") == WAKE
    world.plan(active=["p"])  # the next one may not name it: the autoscaler sees it start
    before = world.worker("d")
    world.join("d", DECODE, epoch=2)
    after = world.report("d", wake_s=0.4)
    assert after.agent_id != before.agent_id
    assert after.in_rotation
    assert after.wake_s == 0.4
    assert world.state("d") == "ready"


def test_one_that_sleeps_when_a_coordinator_meets_it_is_no_peer_from_the_first_moment() -> None:
    world = World()
    world.join("e", DECODE, sleeping=True)
    assert world.state("e") == "sleeping"
    assert len(world.registry.peers_of(world.worker("p"))) == 1


def test_another_boot_of_one_that_did_not_sleep_begins_as_it_registers() -> None:
    world = World(standby=True)
    world.plan(active=["p", "d"])
    world.plan()
    world.join("d", DECODE, epoch=2)
    assert not world.worker("d").in_rotation


def test_who_gives_weights() -> None:
    world = World()
    for name, running in (("g1", 2), ("g2", 0), ("g3", 0)):
        request = registration(name, DECODE)
        request.gives_weights = True
        world.registry.set_output_open(world.registry.register(request, 0.0).key, True)
        worker = world.report(name)
        report = registry_pb2.ReportRequest(
            worker_id=name,
            epoch=worker.epoch,
            load=registry_pb2.WorkerLoad(total_blocks=8, free_blocks=8, running_requests=running),
        )
        world.registry.report(report, 0.0)
    model = world.worker("g1").model.name

    def holders(asking: str = "new", name: str = model) -> list[str]:
        return [each.worker_id for each in weights_holders(world.registry.snapshot(), name, asking)]

    assert holders() == ["g2", "g3", "g1"]
    assert holders("g2") == ["g3", "g1"]
    assert holders(name="other") == []
    world.report("g2", sleeping=True)
    assert holders() == ["g3", "g1"]
