"""Workers that join and leave a running local cluster: names, crash loops, leaving between two lives."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from splitserve.child_process import ChildSpec
from splitserve.errors import FailedPreconditionError, UnavailableError
from tests.support.actuator_rigs import ProcessRig, open_process

WAIT_S = 20.0
DEAD = (sys.executable, "-I", "-S", "-c", "raise SystemExit('error: no luck')")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ProcessRig]:
    async with open_process(tmp_path, None) as opened:
        assert isinstance(opened, ProcessRig)
        yield opened


async def eventually(rig: ProcessRig, holds: Callable[[list[str]], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds([member.name for member in rig.cluster.members]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_name_is_never_given_again(rig: ProcessRig) -> None:
    await rig.actuator.start("decode", 2)
    await rig.actuator.stop("decode", ["decode-1"], 10.0)
    await eventually(rig, lambda names: names == ["decode-0"])
    await rig.actuator.start("decode", 1)
    await eventually(rig, lambda names: names == ["decode-0", "decode-2"])


async def test_a_worker_that_died_is_started_again_under_its_name(rig: ProcessRig) -> None:
    await rig.actuator.start("decode", 1)
    before = (await rig.actuator.replicas())[0]
    await rig.vanish("decode-0")
    member = rig.cluster.members[0]
    deadline = time.monotonic() + WAIT_S
    while not member.child.running:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    after = (await rig.actuator.replicas())[0]
    assert after.name == before.name
    assert after.created_wall_s > before.created_wall_s


async def test_a_crash_loop_gives_the_worker_up_and_not_the_cluster(rig: ProcessRig) -> None:
    await rig.actuator.start("prefill", 1)
    await rig.cluster.add(ChildSpec("prefill-9", "prefill", DEAD))
    await eventually(rig, lambda names: names == ["prefill-0"])
    assert not rig.cluster.stopping.is_set()


async def test_leaving_between_two_lives(rig: ProcessRig) -> None:
    await rig.cluster.add(ChildSpec("prefill-9", "prefill", DEAD))
    await rig.cluster.members[0].child.wait()
    await rig.actuator.stop("prefill", ["prefill-9"], 10.0)
    await eventually(rig, lambda names: not names)


async def test_a_name_in_use_and_a_cluster_that_ends_are_refused(rig: ProcessRig) -> None:
    await rig.actuator.start("prefill", 1)
    with pytest.raises(FailedPreconditionError) as caught:
        await rig.cluster.add(ChildSpec("prefill-0", "prefill", DEAD))
    assert caught.value.reason == "NAME_TAKEN"
    rig.cluster.request_stop()
    with pytest.raises(UnavailableError) as ended:
        await rig.actuator.start("prefill", 1)
    assert ended.value.reason == "STOPPING"
