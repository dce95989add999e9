"""`splitserve up --autoscale` under traffic: each pool follows its own load, and no request ever fails."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from splitserve.client import AsyncClient
from splitserve.cluster.process_specs import SERVING_STATES
from tests.support.clients.patient import PatientClient
from tests.support.clients.traffic import REPEATS
from tests.support.cluster.processes import services_of
from tests.support.cluster.streams import eventually, tokens
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(180)

SLO = {
    "slow_window_s": 2,
    "fast_window_s": 1,
    "history_s": 5,
    "fade_s": 5,
    "drain_backlog_s": 2,
    "settle_s": 2,
    "trim_after_s": 600,
}
POOL = {
    "min_replicas": 1,
    "max_replicas": 2,
    "gpus_per_replica": 0,
    "drain_s": 10,
    "cold_start_s": 3,
    "start_deadline_cold_starts": PATIENCE_S / 3,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 2}},
    "slo": SLO,
}
POLICY = {
    "interval_s": 0.25,
    "lend_decode": False,
    "prefill": POOL | {"target_ms": 400},
    # Far above a light batch's step, beside a worker that starts on the same cores too.
    "decode": POOL | {"target_ms": 60},
}
ENGINE = {
    "kind": "simulated",
    "prefix_cache": False,
    "num_blocks": 4096,
    "simulated_prefill_token_s": 0.5e-3,
    "simulated_step_s": 4e-3,
    "simulated_sequence_s": 2e-3,
}


class Scaled:
    """A running `up --autoscale` and what its traffic came to."""

    def __init__(self, process: asyncio.subprocess.Process, target: str) -> None:
        self.process = process
        self.target = target
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []

    async def ready(self, client: AsyncClient) -> Counter[str]:
        """Workers that serve, by pool."""
        info = await client.server_info(timeout_s=PATIENCE_S)
        return Counter(worker.pool for worker in info.workers if worker.state in SERVING_STATES)

    async def addresses(self, client: AsyncClient, pool: str) -> set[str]:
        """Of the pool's workers that serve. Each life of a worker has another one."""
        info = await client.server_info(timeout_s=PATIENCE_S)
        return {w.address for w in info.workers if w.pool == pool and w.state in SERVING_STATES}

    async def until(self, holds: Callable[[Counter[str]], bool]) -> Counter[str]:
        """Waits until it holds of the serving workers; the most of each pool that were seen meanwhile."""
        most: Counter[str] = Counter()
        deadline = time.monotonic() + PATIENCE_S
        async with PatientClient(self.target) as client:
            while True:
                now = await self.ready(client)
                most |= now
                if holds(now):
                    return most
                assert time.monotonic() < deadline, (now, self.done, self.failures[:3])
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def traffic(self, kind: str, clients: int, prompt: int, output: int) -> AsyncIterator[None]:
        """So many clients that ask again as soon as they are answered. At the end every answer is awaited."""
        stop = asyncio.Event()
        async with PatientClient(self.target) as client, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._ask(client, kind, number, prompt, output, stop))
            try:
                yield
            finally:
                stop.set()

    async def _ask(
        self, client: AsyncClient, kind: str, seed: int, prompt: int, output: int, stop: asyncio.Event
    ) -> None:
        while True:
            try:
                answer = await client.generate(tokens(prompt, seed), max_tokens=output)
            except Exception as error:
                self.failures.append(f"{kind}: {error!r}")
                return
            assert len(answer.token_ids) == output
            self.done[kind] += 1
            if stop.is_set():
                return
            seed += 1000

    async def grows(self, pool: str, kind: str, clients: int, prompt: int, output: int) -> None:
        """Under such traffic the pool grows, and the other one does not; then it shrinks again. What a load does it
        does again; what the machine did beside it, it does not."""
        for _ in range(REPEATS):
            async with self.traffic(kind, clients, prompt, output):
                most = await self.until(lambda now: now[pool] == 2)
            await self.until(lambda now: now["prefill"] == now["decode"] == 1)
            if sum(most.values()) == 3:
                return
        raise AssertionError(f"more than {pool} grows under {kind}: {most}")

    def children(self) -> list[psutil.Process]:
        """Coordinator and workers."""
        return services_of(self.process.pid)

    def lines(self) -> Iterator[tuple[psutil.Process, list[str]]]:
        """Processes with their command lines: one that is being started has none yet."""
        for child in self.children():
            with suppress(psutil.Error):  # it ends just now
                yield child, child.cmdline()

    async def child(self, name: str) -> psutil.Process:
        """The worker process of this name, once it is there."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [child for child, line in self.lines() if name in line]
            return bool(found)

        await eventually(look, f"{name} runs")
        return found[0]


def rewrite(folder: Path, policy: Mapping[str, object]) -> None:
    """The policy in force, in one step: nobody reads half of it."""
    new = folder / "policy.new"
    new.write_text(yaml.safe_dump(dict(policy)))
    new.replace(folder / "policy.yaml")


@asynccontextmanager
async def running(
    folder: Path, *options: str, policy: Mapping[str, object] = POLICY
) -> AsyncIterator[Scaled]:
    path, settings = folder / "policy.yaml", folder / "up.yaml"
    path.write_text(yaml.safe_dump(dict(policy)))
    # On a busy machine forecasts are high, and no request is to be refused here.
    coordinator = {"admission": {"max_queue_s": 600.0}}
    settings.write_text(
        yaml.safe_dump({"engine": ENGINE, "autoscale_window_s": 5.0, "coordinator": coordinator})
    )
    command = [
        sys.executable,
        "-m",
        "splitserve",
        "up",
        "--autoscale",
        str(path),
        "--config",
        str(settings),
    ]
    with (folder / "up.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            *options,
            "--grpc-port",
            "0",
            "--http-port",
            "off",
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
            assert line.startswith(b"splitserve ready on "), (folder / "up.log").read_text()
            yield Scaled(process, line.decode().split()[3])
        except BaseException:
            print((folder / "up.log").read_text()[-20000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.wait(), PATIENCE_S)


@pytest.mark.slow
async def test_each_pool_follows_its_own_load(tmp_path: Path) -> None:
    async with running(tmp_path, "--prefill", "2", "--decode", "2") as up:
        # Light load throughout: every removal happens under it.
        async with up.traffic("light", 2, 16, 20):
            await up.until(lambda now: now["prefill"] == now["decode"] == 1)
            await up.grows("prefill", "long prompts", 8, 600, 2)
            await up.grows("decode", "long outputs", 40, 8, 120)
        assert not up.failures
        assert min(up.done[kind] for kind in ("light", "long prompts", "long outputs")) > 0
        await eventually(lambda: len(up.children()) == 3, "those that drained have ended")


async def test_a_killed_replica_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path) as up:
        await up.until(lambda now: now["prefill"] == now["decode"] == 1)
        victim = await up.child("decode-0")
        async with PatientClient(up.target) as client:
            before = await up.addresses(client, "decode")
            os.kill(victim.pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                while not (now := await up.addresses(client, "decode")) or now & before:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        await up.until(lambda now: now["prefill"] == now["decode"] == 1)
        async with up.traffic("after", 1, 8, 4):
            pass
        assert up.done["after"] == 1
        assert not up.failures


@pytest.mark.slow
async def test_a_worker_that_never_comes_up_is_replaced(tmp_path: Path) -> None:
    """Its process stands still before it has registered."""
    prefill = POLICY["prefill"] | {"min_replicas": 2, "max_replicas": 3, "drain_s": 1}  # type: ignore[operator]
    policy = POLICY | {"prefill": prefill | {"start_deadline_cold_starts": 5}}
    async with running(tmp_path, "--prefill", "1", policy=policy) as up:
        hung = await up.child("prefill-1")
        hung.suspend()
        await up.until(lambda now: now["prefill"] == 2)
        await eventually(lambda: not hung.is_running(), "what hung has been ended")
        async with up.traffic("after", 1, 8, 4):
            pass
        assert not up.failures


async def test_an_edited_policy_is_taken_without_a_restart_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    async with running(tmp_path) as up:
        await up.until(lambda now: now["prefill"] == now["decode"] == 1)
        rewrite(tmp_path, POLICY | {"decode": POLICY["decode"] | {"min_replicas": 99}})  # type: ignore[operator]
        log = tmp_path / "up.log"
        await eventually(lambda: "decode.max_replicas" in log.read_text(), "the error is said")
        rewrite(tmp_path, POLICY | {"decode": POLICY["decode"] | {"min_replicas": 2}})  # type: ignore[operator]
        most = await up.until(lambda now: now["decode"] == 2)
        assert most["prefill"] == 1


@pytest.mark.slow
async def test_a_notice_is_answered_at_once_by_a_replica_of_its_class(tmp_path: Path) -> None:
    """Of two decode replicas one must be on demand. The other's machine is taken away long before the next decision."""
    spot = {"name": "spot", "price_per_hour": 1, "spot": True, "worker_options": ["--spot-notice", "60"]}
    decode = {
        "kind": "schedule",
        "min_replicas": 2,
        "gpus_per_replica": 0,
        "cold_start_s": 3,
        "start_deadline_cold_starts": PATIENCE_S / 3,
        "classes": [spot, {"name": "plain", "price_per_hour": 3}],
        "on_demand_floor": "50%",
    }
    policy = POLICY | {"decode": decode}
    async with (
        running(tmp_path, policy=policy) as up,
        up.traffic("light", 2, 16, 20),
        PatientClient(up.target) as client,
    ):

        async def classes() -> dict[str, str]:
            info = await client.server_info(timeout_s=PATIENCE_S)
            serve = [w for w in info.workers if w.pool == "decode" and w.state in SERVING_STATES]
            # One that served when the coordinator was asked may have ended since.
            lines = [line for _, line in up.lines() if "--replica-class" in line]
            of = {w.worker_id: line for w in serve for line in lines if w.worker_id in line}
            return {name: line[line.index("--replica-class") + 1] for name, line in of.items()}

        async def until_both(without: str = "") -> dict[str, str]:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    found = await classes()
                    if sorted(found.values()) == ["plain", "spot"] and without not in found:
                        return found
                    await asyncio.sleep(0.1)

        before = await until_both()
        rewrite(tmp_path, policy | {"interval_s": 600})
        log = tmp_path / "up.log"
        await eventually(lambda: "policy.reloaded" in log.read_text(), "no decision is due for ten minutes")
        taken = next(name for name, kind in before.items() if kind == "spot")
        (await up.child(taken)).send_signal(signal.SIGUSR1)
        after = await until_both(without=taken)
        assert before.items() & after.items() == {(n, k) for n, k in before.items() if n != taken}
    assert not up.failures
    assert up.done["light"] > 0


async def test_classes_share_gpus_and_a_standby_of_the_cheapest_joins_at_once(tmp_path: Path) -> None:
    """Of five GPUs decode has four: for three units and a standby of small ones, and not for four and one."""
    small = {"name": "small", "price_per_hour": 1, "gpus_per_replica": 1}
    large = {"name": "large", "price_per_hour": 5, "gpus_per_replica": 2, "speed": 3}
    pool = {"kind": "schedule", "cold_start_s": 3, "drain_s": 10, "max_replicas": 6}
    pool |= {"start_deadline_cold_starts": PATIENCE_S / 3}
    decode = pool | {"classes": [small, large], "min_replicas": 3, "warm_standby": 1}
    policy = {"interval_s": 0.25, "lend_decode": False, "gpu_budget": 5, "decode": decode}
    policy |= {"prefill": pool | {"min_replicas": 1, "classes": [small]}}
    async with running(tmp_path, policy=policy) as up, PatientClient(up.target) as client:

        async def until(**wanted: int) -> set[str]:
            """The decode workers that serve, once so many are in each state, and no more than may be."""
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    there = [w for w in (await client.server_info()).workers if w.pool == "decode"]
                    assert len(there) <= 4, there
                    states = Counter("ready" if w.state in SERVING_STATES else w.state for w in there)
                    if states == wanted:
                        return {w.worker_id for w in there if w.state in SERVING_STATES}
                    await asyncio.sleep(0.05)

        async with up.traffic("light", 2, 16, 20):
            before = await until(ready=3, standby=1)
            more = policy | {"decode": decode | {"min_replicas": 4}}
            rewrite(tmp_path, more)
            after = await until(ready=4)
            assert before < after
            assert "decode-4" not in after, "nothing was started for it"
            log = (tmp_path / "up.log").read_text()
            assert "4 small for 4 an hour; none on standby" in log
    assert not up.failures
    assert up.done["light"] > 0
