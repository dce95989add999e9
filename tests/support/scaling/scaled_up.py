"""`splitserve up --autoscale` as a process of its own: where it serves, and what runs below it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from launcher.cluster.process_specs import SERVING_STATES
from splitserve.client import AsyncClient
from tests.support.cluster.processes import ServiceProcess, services_of
from tests.support.cluster.streams import eventually
from tests.support.waiting import PATIENCE_S


@dataclass
class ScaledUp:
    """A local cluster that is ready."""

    process: ServiceProcess
    target: str

    async def serving(self, client: AsyncClient, pool: str) -> dict[str, str]:
        """The pool's workers in rotation: their names with their addresses, which each life has anew."""
        info = await client.server_info(timeout_s=PATIENCE_S)
        return {
            worker.worker_id: worker.address
            for worker in info.workers
            if worker.role == pool and worker.state in SERVING_STATES
        }

    def children(self) -> list[psutil.Process]:
        """Coordinator and workers."""
        return services_of(self.process.process.pid)


@asynccontextmanager
async def scaled_up(
    folder: Path, policy: Mapping[str, object], settings: Mapping[str, object], *options: str
) -> AsyncIterator[ScaledUp]:
    """Runs it with this policy, `policy.yaml` in the folder, until the context ends; its log is `up.log` there."""
    for name, values in (("policy", policy), ("up", settings)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(values)))
    files = ["--autoscale", str(folder / "policy.yaml"), "--config", str(folder / "up.yaml")]
    process = ServiceProcess("up", ["up", *files, *options, "--grpc-port", "0", "--http-port", "off"], folder)
    process.start()

    def target() -> str:
        lines = (line.split() for line in process.log_path.read_text().splitlines())
        return next((words[3] for words in lines if words[:3] == ["splitserve", "ready", "on"]), "")

    try:
        await eventually(lambda: target() != "", "it is ready")
        yield ScaledUp(process, target())
    except BaseException:
        print(process.log_tail(400))
        raise
    finally:
        assert process.terminate() == 0
