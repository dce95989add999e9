"""Plans of several models as one, and the lease that their loops have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from autoscaler.reconcile import PlannedRotation
from autoscaler.sharing.merged_plans import MergedPlans
from autoscaler.sharing.shared_lease import SharedLease
from splitserve.v1 import scaling_pb2
from tests.support.scaling.signal_sources import Clock


class Told:
    def __init__(self) -> None:
        self.plans: list[tuple[list[str], list[str], bool, dict[str, str], list[str]]] = []

    async def apply(self, where: PlannedRotation, decisions: Any) -> None:
        self.plans.append(
            (
                sorted(where.standby),
                sorted(where.active),
                where.lend,
                dict(where.leanings),
                sorted(where.sleeping),
            )
        )


def planned(
    standby: str = "",
    active: str = "",
    lend: bool = False,
    leanings: Mapping[str, Any] = {},
    sleeping: str = "",
) -> PlannedRotation:
    """Names are separated by spaces."""
    names = (frozenset(each.split()) for each in (standby, active, sleeping))
    return PlannedRotation(*names, leanings, lend)


async def test_each_plan_says_what_the_others_said_last() -> None:
    told, clock = Told(), Clock()
    plans = MergedPlans(30.0, clock)
    a, b = plans.rotation("a", told), plans.rotation("b", told)
    await a.apply(planned("a1", "a0", True, {"a0": "prefill"}, "a1"), ())
    await b.apply(planned("", "b0", False, {"b0": "decode"}), ())
    assert told.plans[-1] == (["a1"], ["a0", "b0"], True, {"a0": "prefill", "b0": "decode"}, ["a1"])
    await a.apply(planned("", "a0 a1"), ())
    assert told.plans[-1] == ([], ["a0", "a1", "b0"], False, {"b0": "decode"}, [])
    clock.now += 31
    await a.apply(planned("", "a0"), ())
    assert told.plans[-1] == ([], ["a0"], False, {}, []), "the other's has expired"


class Granting:
    target = "one"

    def __init__(self) -> None:
        self.granted, self.calls, self.at_once = True, 0, 0

    async def acquire_lease(
        self, holder: str, *, valid_s: float, model: str = "", number: int = 0
    ) -> scaling_pb2.AcquireLeaseResponse:
        self.calls += 1
        self.at_once += 1
        assert self.at_once == 1
        assert model == "", "of all models"
        await asyncio.sleep(0)
        self.at_once -= 1
        return scaling_pb2.AcquireLeaseResponse(granted=self.granted, number=7, holder=holder)


async def test_whoever_takes_the_lease_looks_anew() -> None:
    source, taken = Granting(), []
    lease = SharedLease([source], "me", 30.0, lambda: taken.append(1))
    assert await asyncio.gather(lease.renew(), lease.renew()) == [True, True]
    assert taken == [1]
    assert source.calls == 2, "one that began before does not serve"
    assert await asyncio.gather(*(lease.renew() for _ in range(9))) == [True] * 9
    assert source.calls == 4, "the second serves all that came while the first was under way"
    lease.lose()
    await lease.renew()
    assert taken == [1, 1]
