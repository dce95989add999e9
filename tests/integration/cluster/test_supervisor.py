"""The supervisor with pretending children: ready, restart, crash loop, drain, kill; no process is ever left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitserve.client import AsyncClient
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("coordinator", "prefill-0", "decode-0", "decode-1")


class Supervised:
    """A running `up` with its children, and everything it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.seen: set[int] = set()

    async def start(self, **settings: Any) -> None:
        document = {"prefill": 1, "decode": 2} | settings
        self.process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "tests.support.cluster.run_fake_cluster",
                str(self.folder),
                json.dumps(document),
            ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )

    def mark(self, name: str, behaviour: str) -> None:
        (self.folder / f"{name}.{behaviour}").touch()

    async def ready(self) -> str:
        """The ready line; the children's ids are then known."""
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), PATIENCE_S)).decode()
        assert line.startswith("splitserve ready on "), (line, await self.rest())
        self.note_children()
        return line

    def note_children(self) -> None:
        self.seen |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}

    async def says(self, part: str) -> str:
        """The next line on stderr that holds this."""
        assert self.process.stderr is not None
        while line := (await asyncio.wait_for(self.process.stderr.readline(), PATIENCE_S)).decode():
            self.said.append(line)
            if part in line:
                return line
        raise AssertionError(f"it never said {part!r}: {self.said}")

    async def rest(self) -> list[str]:
        """All that it said on stderr, to its end."""
        assert self.process.stderr is not None
        self.said += (await asyncio.wait_for(self.process.stderr.read(), PATIENCE_S)).decode().splitlines()
        return self.said

    async def ends(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def ended(self) -> list[str]:
        path = self.folder / "ended"
        return path.read_text().split() if path.exists() else []

    async def assert_nothing_left(self) -> None:
        left = []
        for pid in self.seen:
            with suppress(psutil.NoSuchProcess):
                left.append(psutil.Process(pid))
        _, alive = await asyncio.to_thread(psutil.wait_procs, left, PATIENCE_S)
        assert not alive


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    if supervised.process.returncode is None:
        supervised.process.kill()
        await supervised.process.wait()
    await supervised.assert_nothing_left()


async def test_ready_and_drained_in_order(up: Supervised) -> None:
    await up.start()
    line = await up.ready()
    assert " · fake-1b · 1 prefill + 2 decode · try: splitserve generate " in line
    sessions = {os.getsid(up.pid(name)) for name in NAMES}
    assert sessions == {up.pid(name) for name in NAMES}
    up.process.send_signal(signal.SIGINT)
    assert await up.ends() == 0
    assert up.ended()[0] == "coordinator"
    assert sorted(up.ended()[1:]) == ["decode-0", "decode-1", "prefill-0"]
    said = "".join(await up.rest())
    assert said.index("prefill-0: loading weights") < said.index("prefill-0: ready")
    assert "prefill-0: started, pid " in said
    assert "worker.ready" in (up.folder / "logs" / "prefill-0.log").read_text()


async def test_a_killed_worker_is_started_again(up: Supervised) -> None:
    await up.start()
    await up.ready()
    await up.says("prefill-0: ready")
    before = up.pid("prefill-0")
    os.kill(before, signal.SIGKILL)
    await up.says("prefill-0 was killed by SIGKILL (out of memory?); starting it again")
    await up.says("prefill-0: ready")
    assert up.pid("prefill-0") != before
    up.note_children()
    up.process.send_signal(signal.SIGTERM)
    assert await up.ends() == 0
    assert "prefill-0" in up.ended()


async def test_a_killed_coordinator_is_started_again_on_its_port(up: Supervised) -> None:
    await up.start()
    target = (await up.ready()).split()[3]
    os.kill(up.pid("coordinator"), signal.SIGKILL)
    await up.says("coordinator was killed by SIGKILL (out of memory?); starting it again")
    await up.says("coordinator: started")
    async with AsyncClient(target) as client:
        await client.wait_ready(PATIENCE_S)
    up.note_children()
    up.process.send_signal(signal.SIGTERM)
    assert await up.ends() == 0


@pytest.mark.slow
async def test_a_crash_loop_ends_the_cluster(up: Supervised) -> None:
    await up.start()
    await up.ready()
    up.mark("decode-1", "crash")
    os.kill(up.pid("decode-1"), signal.SIGKILL)
    assert await up.ends() == 1
    said = await up.rest()
    assert said[-1] == "error: decode-1 exited with code 1 again and again: the weights are broken"
    assert sum("decode-1" in line and "starting it again" in line for line in said) == 4
    assert "Traceback" not in "".join(said)


@pytest.mark.parametrize("name", ["prefill-0", "coordinator"])
async def test_a_death_before_ready_ends_the_cluster(up: Supervised, name: str) -> None:
    up.mark(name, "crash")
    await up.start()
    assert await up.ends() == 1
    said = await up.rest()
    expected = f"error: {name} exited with code 1 before the cluster was ready: the weights are broken"
    assert said[-1] == expected


async def test_a_wrong_setting_of_a_child_is_one_of_the_cluster(up: Supervised) -> None:
    up.mark("decode-0", "refuse")
    await up.start()
    assert await up.ends() == 2
    assert (await up.rest())[
        -1
    ] == "error: decode-0 exited with code 2 before the cluster was ready: a: too large"


async def test_a_cluster_that_never_gets_ready(up: Supervised) -> None:
    up.mark("decode-0", "slow")
    await up.start(ready_timeout_s=8)
    assert await up.ends() == 1
    why = "decode-0 last said: its certificate is refused"
    assert (await up.rest())[-1] == f"error: the cluster was not ready within 8 s; {why}"


async def test_interrupted_before_ready(up: Supervised) -> None:
    up.mark("decode-0", "slow")
    await up.start()
    await up.says("prefill-0: ready")
    up.note_children()
    up.process.send_signal(signal.SIGINT)
    assert await up.ends() == 0


async def test_a_second_interrupt_kills(up: Supervised) -> None:
    up.mark("coordinator", "stubborn")
    await up.start()
    await up.ready()
    up.process.send_signal(signal.SIGINT)
    await up.says("draining")
    up.process.send_signal(signal.SIGINT)
    assert await up.ends() == 130
    assert up.ended() == []


async def test_stragglers_are_killed_after_the_drain(up: Supervised) -> None:
    up.mark("decode-0", "stubborn")
    await up.start(coordinator={"drain_s": 0})
    await up.ready()
    up.process.send_signal(signal.SIGTERM)
    assert await up.ends() == 0
    assert "decode-0" not in up.ended()
    assert any("decode-0: did not end within" in line for line in await up.rest())


async def test_children_end_with_a_killed_supervisor(up: Supervised) -> None:
    for name in NAMES:
        up.mark(name, "stubborn")
    await up.start()
    await up.ready()
    assert len(up.seen) == len(NAMES)
    up.process.kill()
    await up.ends()
    await up.assert_nothing_left()
