"""Chooses the next fault, and does it."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from bench.chaos.members import ChaosCluster, Member
from launcher.cluster.child_process import Role

FaultKind = Literal["kill", "pause", "reset", "drain", "kill coordinator"]
KINDS: tuple[FaultKind, ...] = ("kill", "pause", "reset", "drain", "kill coordinator")
LEAST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0


@dataclass(frozen=True)
class Fault:
    """A fault to be done to one of the two members of a role. `pause_s`: how long a pause lasts."""

    kind: FaultKind
    role: Role
    number: int
    pause_s: float = 0.0


def next_fault(pick: random.Random, whole: Collection[Role]) -> Fault | None:
    """A random fault to a role of which everything serves, so that one of two members is left. Pure but for `pick`.

    None while there is no such role for the kind that was drawn.
    """
    kind = pick.choice(KINDS)
    if kind == "kill coordinator":
        roles: list[Role] = ["coordinator"]
    elif kind in ("kill", "drain"):
        roles = ["prefill", "decode"]
    else:
        roles = ["coordinator", "prefill", "decode"]
    role = pick.choice(roles)
    number, pause_s = pick.randrange(2), pick.uniform(LEAST_PAUSE_S, LONGEST_PAUSE_S)
    if role not in whole:
        return None
    return Fault(kind, role, number, pause_s if kind == "pause" else 0.0)


async def do(fault: Fault, member: Member) -> None:
    """Does the fault to the member. Returns when the fault is over; a process that ended may still be starting."""
    match fault.kind:
        case "kill" | "kill coordinator":
            member.signal(signal.SIGKILL)
        case "drain":
            member.signal(signal.SIGTERM)
        case "reset":
            member.proxy.reset()
        case "pause":
            member.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.pause_s)
            finally:
                member.signal(signal.SIGCONT)


async def attack(
    cluster: ChaosCluster, seconds: float, every_s: float, seed: int, tell: Callable[[Fault], None]
) -> Counter[str]:
    """A fault each `every_s`, for `seconds`; how many of each kind there were."""
    pick, done = random.Random(seed), Counter[str]()
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    while (began_s := loop.time()) < end_s:
        fault = next_fault(pick, await cluster.whole())
        if fault is None:
            await asyncio.sleep(0.2)
            continue
        name = f"{fault.role}-{fault.number}"
        member = next(member for member in cluster.members if member.name == name)
        tell(fault)
        await do(fault, member)
        done[fault.kind] += 1
        await asyncio.sleep(max(0.0, min(began_s + every_s, end_s) - loop.time()))
    return done
