"""An unreachable host is unknown and not gone: nothing is started in place of what it has, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from autoscaler.actuators.actuator import Presence, ReplicaShape, Room
from autoscaler.actuators.hosts.host_watch import HostWatch
from autoscaler.actuators.hosts.hosts_actuator import HostsActuator
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.reconcile import Drain, Start, reconcile
from splitserve.errors import (
    FailedPreconditionError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
)
from splitserve.roles import POOLS
from tests.support.scaling.memory_host import MemoryHost
from tests.support.scaling.signal_sources import with_actual

UNKNOWN_S = 600.0
ANSWER_S = 0.2
PLAN = ScalingPlan(PoolPlan(2), PoolPlan(4))


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Pair:
    """Two hosts, and an autoscaler's loop around them that is driven by hand."""

    def __init__(self, **settings: Any) -> None:
        self.a, self.b = MemoryHost("a"), MemoryHost("b")
        self.clock = Clock()
        self._settings: dict[str, Any] = {
            "answer_s": ANSWER_S,
            "unknown_s": UNKNOWN_S,
            "clock": self.clock,
        } | settings
        self.restart()

    def restart(self) -> None:
        """The autoscaler begins anew and remembers nothing."""
        links = [HostWatch(host.name, host) for host in (self.a, self.b)]
        self.actuator = HostsActuator(links, **self._settings)

    async def tick(self, plan: ScalingPlan = PLAN, serving: Sequence[str] = ()) -> list[SplitserveError]:
        """One decision, which is carried out; the errors. `serving` are those that the coordinators see."""
        pools = with_actual(await self.actuator.replicas(), serving)
        errors = []
        for action in reconcile(plan, pools, dict.fromkeys(POOLS, PoolPolicy(max_replicas=8))):
            try:
                match action:
                    case Start(pool, count):
                        await self.actuator.start(pool, count)
                    case Drain(_, names):
                        await self.actuator.stop(names, 0.0)
            except SplitserveError as error:
                errors.append(error)
        return errors

    @property
    def started(self) -> int:
        return self.a.started + self.b.started


@pytest.fixture
async def pair() -> Pair:
    """With what the plan wants on both hosts: a prefill replica and two decode replicas each."""
    pair = Pair()
    assert await pair.tick() == []
    assert len(pair.a.there) == len(pair.b.there) == 3
    return pair


async def names(actuator: HostsActuator, presence: Presence) -> set[str]:
    return {replica.name for replica in await actuator.replicas() if replica.presence is presence}


@pytest.mark.parametrize("hangs", [False, True])
async def test_nothing_is_started_in_place_of_what_is_unknown(pair: Pair, hangs: bool) -> None:
    lost = set(pair.b.there)
    pair.b.hangs, pair.b.failure = hangs, None if hangs else UnavailableError("gone")
    for _ in range(5):
        assert await pair.tick(serving=list(pair.a.there)) == []
    assert await names(pair.actuator, Presence.UNKNOWN) == lost
    assert pair.actuator.hosts == {"a": True, "b": False}
    pair.b.mend()
    await asyncio.sleep(0)
    for _ in range(3):
        assert await pair.tick() == []
    assert pair.started == 6


async def test_only_hosts_that_answer_are_tidied(pair: Pair) -> None:
    pair.b.hangs = True
    await pair.actuator.replicas()
    await pair.actuator.tidy()
    assert (pair.a.tidied, pair.b.tidied) == (1, 0)


async def test_a_silent_host_delays_no_decision_but_the_first(pair: Pair) -> None:
    pair.b.hangs = True
    await pair.actuator.replicas()
    async with asyncio.timeout(100 * ANSWER_S / 2):  # all of them would wait twice as long
        for _ in range(100):
            await pair.actuator.replicas()


async def test_more_are_started_only_beyond_known_and_unknown_and_not_there(pair: Pair) -> None:
    pair.b.cut()
    assert await pair.tick(ScalingPlan(PoolPlan(2), PoolPlan(5))) == []
    assert len(pair.a.there) == 4
    assert len(pair.b.there) == 3


async def test_after_long_its_places_are_given_up_and_what_comes_back_is_surplus(pair: Pair) -> None:
    pair.b.cut()
    await pair.tick()
    pair.clock.now_s += UNKNOWN_S + 1
    assert await pair.tick(serving=list(pair.a.there)) == []
    assert len(pair.a.there) == 6
    assert len(await names(pair.actuator, Presence.GIVEN_UP)) == 3
    pair.b.mend()
    for _ in range(8):
        await pair.tick(serving=[*pair.a.there, *pair.b.there])
    assert len(pair.a.there) + len(pair.b.there) == 6


async def test_what_still_serves_is_never_given_up(pair: Pair) -> None:
    pair.b.cut()
    serving = [*pair.a.there, *pair.b.there]
    pair.clock.now_s += UNKNOWN_S + 1
    for _ in range(3):
        assert await pair.tick(serving=serving) == []
    assert pair.started == 6


async def test_an_order_without_an_answer_is_not_repeated(pair: Pair) -> None:
    pair.a.lacks = Room(0, "NO_ROOM", "full")
    pair.b.unheard = True
    wanted = ScalingPlan(PoolPlan(2), PoolPlan(5))
    (error,) = await pair.tick(wanted)
    assert error.reason == "DOCKER_UNREACHABLE"
    pair.a.lacks = None
    for _ in range(3):
        assert await pair.tick(wanted) == []
    assert len(pair.a.there) == 3
    pair.b.unheard = False
    pair.b.mend()
    for _ in range(3):
        assert await pair.tick(wanted) == []
    assert pair.started == 7


async def test_a_host_that_refuses_orders_does_not_take_all_of_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(pool: str, count: int, kind: ReplicaShape) -> None:
        raise UnavailableError("could not select device driver", reason="DOCKER")

    monkeypatch.setattr(pair.a, "start", broken)
    assert await pair.tick(ScalingPlan(PoolPlan(3), PoolPlan(5))) == []
    assert (len(pair.a.there), len(pair.b.there)) == (3, 5)
    assert pair.actuator.hosts == {"a": True, "b": True}
    monkeypatch.setattr(pair.b, "start", broken)
    (error,) = await pair.tick(ScalingPlan(PoolPlan(3), PoolPlan(6)))
    assert "could not select device driver" in error.message


async def test_an_order_that_never_arrived_is_given_again_once_the_host_has_said_so(pair: Pair) -> None:
    wanted = ScalingPlan(PoolPlan(2), PoolPlan(5))
    pair.a.lacks = Room(0, "NO_ROOM", "full")
    pair.b.unheard = True
    await pair.tick(wanted)
    newest = list(pair.b.there)[-1]
    del pair.b.there[newest]
    pair.b.unheard = False
    pair.b.mend()
    for _ in range(3):
        assert await pair.tick(wanted) == []
    assert len(pair.b.there) == 4


async def test_a_restarted_autoscaler_starts_nothing_until_all_hosts_have_answered(pair: Pair) -> None:
    pair.b.cut()
    pair.restart()
    errors = await pair.tick()
    assert {error.reason for error in errors} == {"HOST_UNKNOWN"}
    assert "b has not answered since the autoscaler began" in errors[0].message
    pair.b.mend()
    for _ in range(3):
        assert await pair.tick() == []
    assert pair.started == 6


async def test_a_restarted_autoscaler_does_not_wait_for_ever(pair: Pair) -> None:
    pair.b.cut()
    pair.restart()
    await pair.tick()
    pair.clock.now_s += UNKNOWN_S + 1
    assert await pair.tick() == []
    assert len(pair.a.there) == 6


async def test_ends_are_told_again_when_the_host_is_back(pair: Pair) -> None:
    pair.b.cut()
    fewer = ScalingPlan(PoolPlan(2), PoolPlan(3))
    serving = list(pair.a.there)
    for _ in range(3):
        (error,) = await pair.tick(fewer, serving)
        assert error.reason == "HOST_UNKNOWN"
    assert not any(replica.stopping for replica in pair.a.there.values()), "what serves stays"
    pair.b.mend()
    for _ in range(3):
        await pair.tick(fewer, [*pair.a.there, *pair.b.there])
    assert len(pair.a.there) + len(pair.b.there) == 5


async def test_two_hosts_with_one_worker_id_are_refused(pair: Pair) -> None:
    name, replica = next(iter(pair.a.there.items()))
    pair.b.there[name] = replica
    with pytest.raises(FailedPreconditionError, match="on the hosts a, b") as caught:
        await pair.actuator.replicas()
    assert caught.value.reason == "SAME_WORKER_ID"


async def test_a_host_that_lacks_image_or_model_is_no_place() -> None:
    pair = Pair()
    pair.b.lacks = Room(0, "NO_IMAGE", "the image x is not there")
    await pair.tick()
    assert len(pair.a.there) == 6
    pair = Pair()
    pair.b.lacks = Room(0, "NO_MODEL", "its model is still being fetched")
    await pair.tick()
    assert len(pair.a.there) == 6
    pair.a.lacks = pair.b.lacks
    with pytest.raises(
        ResourceExhaustedError, match=r"a: its model is still.*b: its model is still"
    ) as caught:
        await pair.actuator.start("decode", 1)
    assert caught.value.reason == "NO_ROOM"


async def test_gpus_of_hosts_that_were_given_up_do_not_count() -> None:
    clock = Clock()
    hosts = [MemoryHost("a", 4), MemoryHost("b", 2)]
    actuator = HostsActuator([HostWatch(host.name, host) for host in hosts], unknown_s=UNKNOWN_S, clock=clock)
    await actuator.replicas()
    hosts[1].cut()
    await actuator.replicas()
    assert actuator.gpu_inventory == 6
    clock.now_s += UNKNOWN_S + 1
    assert actuator.gpu_inventory == 4


async def test_a_replica_goes_to_the_host_that_has_its_kind_of_gpu() -> None:
    hosts = [
        MemoryHost("a", listed="L40S=GPU-a,GPU-b,GPU-c"),
        MemoryHost("b", listed="H100=GPU-d;L40S=GPU-e"),
    ]
    actuator = HostsActuator([HostWatch(host.name, host) for host in hosts])
    await actuator.start("decode", 1, ReplicaShape(gpu="H100"))
    await actuator.start("prefill", 4, ReplicaShape(gpu="L40S"))
    gpus = {host.name: sorted(one.gpu or "" for one in host.there.values()) for host in hosts}
    assert gpus == {"a": ["GPU-a", "GPU-b", "GPU-c"], "b": ["GPU-d", "GPU-e"]}
    with pytest.raises(ResourceExhaustedError) as full:
        await actuator.start("decode", 1, ReplicaShape(gpu="H100"))
    assert full.value.reason == "NO_GPU"
    with pytest.raises(FailedPreconditionError, match="'B200'") as none:
        await actuator.start("decode", 1, ReplicaShape(gpu="B200"))
    assert (none.value.reason, none.value.field) == ("GPU_KIND", "gpu")
    hosts[0].cut()
    with pytest.raises(ResourceExhaustedError, match="a: does not answer"):
        await actuator.start("decode", 1, ReplicaShape(gpu="B200"))
