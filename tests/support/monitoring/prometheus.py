"""A real Prometheus that scrapes processes on loopback, with the rules that compose/monitoring provisions."""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.monitoring.prometheus import prometheus_folder
from splitserve.errors import UnavailableError
from tests.support.cluster.ports import free_port
from tests.support.waiting import PATIENCE_S

MONITORING = Path(__file__).parents[3] / "compose/monitoring"
RULES = tuple(sorted(str(path) for path in (MONITORING / "rules").glob("*.yaml")))
INTERVAL = "500ms"


def binaries() -> Path:
    """Where `prometheus` and `promtool` are; skips the test where there are none to be had."""
    try:
        return prometheus_folder()
    except UnavailableError as error:
        pytest.skip(error.message)


class Prometheus:
    """The API of a running Prometheus."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query, without those that are no number."""
        answer = await self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return [sample for sample in found if not math.isnan(float(sample["value"][1]))]

    async def rules(self) -> list[dict[str, Any]]:
        """All rules with their health."""
        groups = (await self._get("/api/v1/rules"))["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def ready(self) -> bool:
        """Whether it answers queries; while it starts it refuses them."""

        def ask() -> None:
            urllib.request.urlopen(f"{self.url}/-/ready", timeout=PATIENCE_S).close()

        try:
            await asyncio.to_thread(ask)
        except OSError:  # also an answer with an error's status
            return False
        return True

    async def _get(self, path: str) -> Any:
        def read() -> Any:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
                return json.load(answer)

        try:
            return await asyncio.to_thread(read)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from None


@asynccontextmanager
async def running_prometheus(folder: Path, jobs: Mapping[str, Sequence[int]]) -> AsyncIterator[Prometheus]:
    """A Prometheus with the provisioned configuration, but for its targets: the given ports of each of its jobs."""
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    assert {job["job_name"] for job in config["scrape_configs"]} == jobs.keys()
    config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = list(RULES)
    config["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
        for job, ports in jobs.items()
    ]
    path, port = folder / "prometheus.yaml", free_port()
    path.write_text(yaml.safe_dump(config))
    command = [str(binaries() / "prometheus"), f"--config.file={path}", "--log.level=warn"]
    command += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    log = folder / "prometheus.log"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=said, stderr=said, stdin=asyncio.subprocess.DEVNULL
        )
    try:
        prometheus, deadline = Prometheus(port), time.monotonic() + PATIENCE_S
        while not await prometheus.ready():
            assert process.returncode is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            await asyncio.sleep(0.05)
        yield prometheus
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
