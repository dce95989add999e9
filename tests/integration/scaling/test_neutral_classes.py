"""`splitserve up --autoscale` with neutral workers of two classes, under load.

When more is wanted of decode a big worker is started and takes the place of a small one there. When prefill wants more
instead, and decode less, the two that are there change sides, and nothing is started. No request fails meanwhile, all
answers are right, each side has a worker at all times, and the budget holds.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from splitserve.cluster.process_specs import SERVING_STATES
from tests.support.clients.patient import PatientClient
from tests.support.cluster.real_cluster import held_resources
from tests.support.cluster.streams import tokens
from tests.support.waiting import PATIENCE_S

SMALL = {"name": "small", "price_per_hour": 1.0}
BIG = {
    "name": "big",
    "price_per_hour": 1.5,
    "speed": 2,
    "worker_options": ["--simulated-prefill-token-s", "1e-5"],
}
POOL = {
    "kind": "schedule",
    "gpus_per_replica": 0,
    "drain_s": 10,
    "cold_start_s": 2,
    "start_deadline_cold_starts": 60,
    "payback_s": 3600,
    "classes": [SMALL, BIG],
    "max_replicas": 2,
}
BUDGET = 3.5
"""Of two small ones and a big one."""

pytestmark = pytest.mark.timeout(120)


def policy(prefill: int, decode: int) -> str:
    pools = {"prefill": POOL | {"min_replicas": prefill}, "decode": POOL | {"min_replicas": decode}}
    return yaml.safe_dump({"workers": "neutral", "interval_s": 0.2, "budget_per_hour": BUDGET, **pools})


@asynccontextmanager
async def scaled(folder: Path, rules: Path) -> AsyncIterator[str]:
    """The coordinator's address."""
    command = [sys.executable, "-m", "splitserve", "up", "--autoscale", str(rules), "--engine", "simulated"]
    with (folder / "up.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--num-blocks", "4096", "--grpc-port", "0", "--http-port", "off"),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
            assert line.startswith(b"splitserve ready on "), (folder / "up.log").read_text()
            yield line.decode().split()[3]
        except BaseException:
            print((folder / "up.log").read_text()[-20000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.wait(), PATIENCE_S)


class Load:
    """Requests one after the other, and what is seen meanwhile of the workers."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.answered: Counter[str] = Counter()
        """By the worker that decoded."""
        self._stop = asyncio.Event()

    async def ask(self, seed: int) -> None:
        while not self._stop.is_set():
            prompt = tokens(100, seed)
            answer = await self._client.generate(prompt, max_tokens=20, timeout_s=PATIENCE_S)
            assert list(answer.token_ids) == expected_tokens(prompt, 20)
            self.answered[answer.served_by.decode_worker] += 1
            seed += 100

    async def sides(self) -> dict[str, str]:
        """Where those lean that serve. Two that change sides do so one after the other; each serves both meanwhile."""
        info = await self._client.server_info(timeout_s=PATIENCE_S)
        serving = {w.worker_id: w.pool for w in info.workers if w.state in SERVING_STATES}
        assert all(worker.neutral for worker in info.workers)
        assert len(serving) <= 3
        return serving

    async def until(self, wanted: dict[str, str]) -> None:
        """Waits for just these, each on its side; some requests are answered then."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.sides() != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            before = self.answered.total()
            while self.answered.total() < before + 10:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def end(self) -> None:
        self._stop.set()


def rewrite(path: Path, text: str) -> None:
    """In one step: nobody reads half of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@pytest.mark.slow
async def test_the_mix_changes_and_workers_of_both_classes_change_sides(tmp_path: Path) -> None:
    rules = tmp_path / "policy.yaml"
    rules.write_text(policy(1, 1))
    async with scaled(tmp_path, rules) as target, PatientClient(target) as client:
        load = Load(client)
        async with asyncio.TaskGroup() as asking:
            for seed in range(4):
                asking.create_task(load.ask(seed))
            await load.until({"worker-0": "prefill", "worker-1": "decode"})
            rewrite(rules, policy(1, 2))
            await load.until({"worker-0": "prefill", "worker-2": "decode"})
            rewrite(rules, policy(2, 1))
            await load.until({"worker-0": "decode", "worker-2": "prefill"})
            load.end()
        assert set(load.answered) == {"worker-0", "worker-1", "worker-2"}
        async with asyncio.timeout(PATIENCE_S):
            while held_resources(await client.server_info()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert "worker-3" not in (tmp_path / "up.log").read_text(), "nothing is started for a change of sides"
