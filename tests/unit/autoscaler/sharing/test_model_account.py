"""One model's part in the account: what counts as its own, and orders of which nobody knows the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoscaler.actuators.actuator import ORDINARY, ActualReplica, ReplicaKind
from autoscaler.decide import make_decide
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.sharing.claims.shares import GPUS, MONEY, of_class
from autoscaler.sharing.model_account import AccountedActuator, ModelAccount
from autoscaler.sharing.shared_account import UNHEARD_S, SharedAccount
from autoscaler.snapshot import PoolName, Replica, ReplicaState
from splitserve.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from tests.support.scaling.fake_actuator import FakeActuator
from tests.support.scaling.signal_sources import Clock
from tests.support.scaling.snapshots import snapshot


def rules(prefill: dict[str, Any], decode: dict[str, Any] | None = None, **more: Any) -> ScalingPolicy:
    pools = {"prefill": prefill, "decode": prefill if decode is None else decode}
    return parse_policy({name: {"target_ms": 100, **pool} for name, pool in pools.items()} | more)


def priced(*names: str) -> dict[str, Any]:
    prices = {"small": 1.0, "large": 5.0}
    return {"classes": [{"name": name, "price_per_hour": prices[name]} for name in names]}


class Failing(FakeActuator):
    """`lists_all` as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.all = True

    @property
    def lists_all(self) -> bool:
        return self.all


class One:
    def __init__(self, policy: ScalingPolicy, may_act: Callable[[], bool] = lambda: True) -> None:
        self.clock, self.policy = Clock(), policy
        self.account = SharedAccount({MONEY: 10.0}, {"a": dict}, clock=self.clock)
        self.own = ModelAccount(self.account, "a", lambda: self.policy)
        self.inner, self.starting = Failing(), asyncio.Lock()
        self.actuator = AccountedActuator(self.inner, self.own, self.starting, may_act)
        self.account.claim("a", {}, worth_moving=False)

    def used(self, name: str = MONEY) -> float:
        return self.account.used["a"].get(name, 0.0)


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (DeadlineExceededError("docker: no answer"), True),
        (UnavailableError("gone", reason="DOCKER_UNREACHABLE"), True),
        (UnavailableError("no such image", reason="DOCKER"), False),
        (UnavailableError("changed", reason="CHANGED_MEANWHILE"), False),
    ],
)
async def test_an_order_that_may_be_carried_out_yet_counts_whatever_is_listed(
    error: UnavailableError, counts: bool
) -> None:
    one = One(rules(priced("small")))
    await one.actuator.replicas()
    one.inner.failure = error
    with pytest.raises(type(error)):
        await one.actuator.start("decode", 2)
    one.inner.failure = None
    await one.actuator.replicas()
    assert one.used() == (2.0 if counts else 0.0)
    one.clock.now += UNHEARD_S
    await one.actuator.replicas()
    assert one.used() == 0.0


async def test_so_does_one_that_was_given_up() -> None:
    one = One(rules(priced("small")))
    await one.actuator.replicas()

    begun = asyncio.Event()

    async def forever(pool: PoolName, count: int, kind: ReplicaKind = ORDINARY) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    one.inner.start = forever  # type: ignore[method-assign]
    task = asyncio.create_task(one.actuator.start("decode", 1))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await one.actuator.replicas()
    assert one.used() == 1.0


async def test_a_list_without_a_host_that_never_answered_says_nothing() -> None:
    one = One(rules(priced("small")))
    one.inner.all = False
    await one.actuator.replicas()
    assert one.account.unknown == ["a"]
    one.inner.all = True
    await one.actuator.replicas()
    assert one.account.unknown == []


async def test_nothing_is_started_once_the_lease_has_ended_while_others_were() -> None:
    held = True
    one = One(rules(priced("small")), lambda: held)
    await one.actuator.replicas()
    await one.starting.acquire()
    task = asyncio.create_task(one.actuator.start("decode", 1))
    await asyncio.sleep(0)
    held = False
    one.starting.release()
    with pytest.raises(FailedPreconditionError) as caught:
        await task
    assert caught.value.reason == "STALE_LEASE"
    assert not one.inner.there
    assert one.used() == 0.0


async def test_a_class_that_the_policy_has_no_more_keeps_its_name_and_price() -> None:
    one = One(rules(priced("small", "large")))
    await one.actuator.replicas()
    await one.actuator.start("decode", 1, ReplicaKind(replica_class="large"))
    await one.actuator.replicas()
    one.policy = rules(priced("small"))
    await one.actuator.replicas()
    assert (one.used(), one.used(of_class("large")), one.used(of_class("small"))) == (5.0, 1.0, 0.0)


def test_a_class_that_was_never_known_takes_of_its_own_limit_too() -> None:
    one = One(rules(priced("small")))
    assert one.own.uses_of("decode", "large") == {
        GPUS: 1.0,
        MONEY: 1.0,
        of_class("small"): 1.0,
        of_class("large"): 1.0,
    }


def test_a_neutral_worker_counts_where_it_leans() -> None:
    policy = rules({"gpus_per_replica": 1}, {"gpus_per_replica": 1}, workers="neutral")
    account = SharedAccount({GPUS: 8.0}, {"a": dict})
    own = ModelAccount(account, "a", lambda: policy)
    own.listed([ActualReplica("n", "prefill", False, 0.0)], account.generation)
    assert account.view("a").live["a", "prefill"] == {GPUS: 1.0}
    seen = snapshot()
    leaning = Replica("n", ReplicaState.READY, 0.0, neutral=True)
    seen = replace(seen, decode=replace(seen.decode, replicas=(leaning,)))
    own.deciding(make_decide(policy))(None, seen)
    live = account.view("a").live
    assert (live["a", "prefill"], live["a", "decode"]) == ({}, {GPUS: 1.0})
