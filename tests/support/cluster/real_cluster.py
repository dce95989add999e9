"""A coordinator with prefill and decode workers as real processes on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from bench.tcp_proxy import TcpProxy, tcp_proxy
from launcher.cluster.process_specs import SERVING_STATES
from splitserve.client import AsyncClient
from splitserve.errors import DeadlineExceededError, UnavailableError
from splitserve.security.tls import TlsFiles
from splitserve.v1 import inference_pb2
from tests.support.clients.patient import PatientClient
from tests.support.cluster.forked import Imports
from tests.support.cluster.ports import free_port
from tests.support.cluster.processes import ServiceProcess
from tests.support.waiting import PATIENCE_S

PATIENT = ("--max-queue", "600", "--heartbeat-timeout", "60")
"""On a busy machine forecasts are high, and a process may get no core for seconds; no burst is refused and no worker is
dropped for that where a test says nothing else. A process that ends is noticed by its connections."""

ASK_AGAIN_S = 5.0
"""After which a call that waits for a state is made once more."""

ON_DEVICE = tuple(shlex.split(os.environ.get("SPLITSERVE_TEST_DEVICE", "")))
"""Options of all workers with real weights, as `--device cuda --device-memory-share 0.05`: the tests of clusters then
run there. Such workers are not forked."""

IMPORTS: Mapping[str, Imports] = {"simulated": "simulated", "torch": "torch", "vllm": "vllm"}
"""What a process with this `--engine` is forked from."""


class Cluster:
    """The processes of one cluster, by name: `coordinator`, `prefill-0`, `decode-0`, …"""

    def __init__(
        self,
        log_dir: Path,
        *,
        model: str = "simulated",
        engine: str = "simulated",
        prefill: int = 1,
        decode: int = 1,
        both: int = 0,
        worker_options: Sequence[str] = (),
        coordinator_options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        http: bool = False,
        tls: Path | None = None,
        api_key: str | None = None,
        fresh: bool = False,
        faults: Mapping[str, Any] | None = None,
    ) -> None:
        """`both`: so many workers of role both instead, `worker-0`, …. `fresh`: see ServiceProcess. `faults`: of all
        workers; see `bench.faults.plan`."""
        self.log_dir = log_dir
        self.members: dict[str, ServiceProcess] = {}
        self._common = ["--model", model, "--engine", engine, "--threads", "1", *worker_options]
        if engine == "torch":
            self._common += ON_DEVICE
            fresh = fresh or bool(ON_DEVICE)
        self._counts = {"both": both} if both else {"prefill": prefill, "decode": decode}
        self._environment = dict(environment or {})
        self._imports = IMPORTS[engine]
        self._fresh = fresh
        self._faults = faults
        self._coordinator_options = list(coordinator_options)
        self._tls, self._api_key = tls, api_key
        self._http = http
        self.target = self.parts_target = ""
        self.base_url = ""

    def client(self, **options: Any) -> AsyncClient:
        """A client with the key and the authority that fit this cluster."""
        files = TlsFiles(self._tls / "ca.pem") if self._tls else None
        return PatientClient(self.target, **{"api_key": self._api_key, "tls": files, **options})

    async def start(self, *, wait_ready: bool = True) -> None:
        """Starts everything and, normally, waits until all pairs are connected."""
        options = ["coordinator", "--grpc-port", "0", "--http-port", "0" if self._http else "off"]
        # Tests of handoffs need them, however short their prompts are.
        options += [*PATIENT, "--local-prefill", "never", *self._coordinator_options]
        if self._tls:
            options += ["--tls", str(self._tls), "--cluster-port", "0"]
            self._common += ["--tls", str(self._tls)]
        coordinator = self._process("coordinator", options)
        coordinator.start()
        ready = coordinator.wait_event("coordinator.ready")
        self.target = f"127.0.0.1:{ready['port']}"
        self.parts_target = f"127.0.0.1:{ready['cluster_port']}" if self._tls else self.target
        self.base_url = f"http://127.0.0.1:{ready['http_port']}/v1"
        for role, count in self._counts.items():
            for number in range(count):
                self.add_worker(role, f"worker-{number}" if role == "both" else f"{role}-{number}")
        if wait_ready:
            await self.wait_ready()

    def add_worker(
        self,
        role: str,
        name: str,
        *options: str,
        module: str = "launcher",
        faults: Mapping[str, Any] | None = None,
    ) -> ServiceProcess:
        """Starts one more worker of a role; does not wait for it. `module`: see ServiceProcess. `faults`: in place of
        those of all workers."""
        command = ["worker", "--role", "both"] if role == "both" else [f"{role}-worker"]
        arguments = [*command, "--worker-id", name, "--coordinator", self.parts_target]
        arguments += [*self._common, *options]
        if (planned := faults or self._faults) is not None:
            module, arguments = "bench.faults", [json.dumps(planned), *arguments]
        worker = self._process(name, arguments, module)
        worker.start()
        return worker

    def _process(self, name: str, arguments: Sequence[str], module: str = "launcher") -> ServiceProcess:
        imports = next((IMPORTS[each] for each in reversed(arguments) if each in IMPORTS), self._imports)
        made = ServiceProcess(
            name,
            arguments,
            self.log_dir,
            self._environment,
            imports=imports,
            fresh=self._fresh,
            module=module,
        )
        self.members[name] = made
        return made

    async def wait_ready(
        self, prefill: int | None = None, decode: int | None = None, both: int | None = None
    ) -> None:
        """Waits until so many workers (default: as many as configured) are ready."""
        wanted = dict(self._counts)
        given = {"prefill": prefill, "decode": decode, "both": both}
        wanted |= {role: count for role, count in given.items() if count}
        deadline = time.monotonic() + PATIENCE_S
        async with self.client() as client:
            while True:
                workers = []
                # A busy machine, where it still imports.
                with suppress(DeadlineExceededError, UnavailableError):
                    workers = list((await client.server_info(timeout_s=ASK_AGAIN_S)).workers)
                ready = {
                    role: sum(w.role == role and w.state in SERVING_STATES for w in workers)
                    for role in wanted
                }
                if all(ready[role] >= count for role, count in wanted.items()):
                    return
                ended = [m.name for m in self.members.values() if m.process.poll() not in (None, -9)]
                if ended or time.monotonic() > deadline:
                    raise AssertionError(f"not ready: {ready} of {wanted}, ended: {ended}")
                await asyncio.sleep(0.05)

    def tell_state(self) -> None:
        """Prints what every process is doing and has logged last; pytest shows it with a failure."""
        for member in self.members.values():
            member.dump_stacks()
            print(f"--- {member.name}\n{member.log_tail()}", file=sys.stderr)

    def stop(self) -> dict[str, int]:
        """Ends all processes that still run; exit code by name."""
        codes = {}
        for name, member in reversed(self.members.items()):
            codes[name] = member.terminate()
        return codes

    async def assert_no_leaks(self) -> None:
        """The leak oracle: within a while every count of blocks, calls and sequences is back at zero."""
        deadline = time.monotonic() + PATIENCE_S
        async with self.client() as client:
            while True:
                held = {"coordinator": 1}
                with suppress(DeadlineExceededError):  # a busy machine
                    held = held_resources(await client.server_info(timeout_s=ASK_AGAIN_S))
                if not held:
                    return
                if time.monotonic() > deadline:
                    raise AssertionError(f"leaked: {held}")
                await asyncio.sleep(0.05)


COUNTS = (
    "running_requests",
    "waiting_requests",
    "reserved_blocks",
    "quarantined_blocks",
    "referenced_blocks",
    "open_rpcs",
    "transfers_in_flight",
    "waiting_reservations",
)


def held_resources(info: inference_pb2.GetServerInfoResponse) -> dict[str, int]:
    """Everything that should be zero and is not."""
    held = {
        f"{worker.worker_id}.{count}": getattr(worker, count)
        for worker in info.workers
        for count in COUNTS
        if getattr(worker, count)
    }
    held |= {
        f"{worker.worker_id}.missing_free_blocks": worker.total_blocks - worker.free_blocks
        for worker in info.workers
        if worker.total_blocks != worker.free_blocks
    }
    for count in ("running_requests", "background_tasks"):
        if value := getattr(info, count):
            held[f"coordinator.{count}"] = value
    return held


@asynccontextmanager
async def running(cluster: Cluster, *, wait_ready: bool = True) -> AsyncIterator[Cluster]:
    """Starts the cluster; at the end all processes have stopped, however the test ended."""
    try:
        await cluster.start(wait_ready=wait_ready)
        yield cluster
    except BaseException:  # a test's timeout too
        cluster.tell_state()
        raise
    finally:
        cluster.stop()


@asynccontextmanager
async def echoing(folder: Path, make: Callable[[Path], object]) -> AsyncIterator[Cluster]:
    """A ready pair that says what it is told (`echoing_worker.py`). `make` writes its model into the subfolder `model`;
    a request may bring the chat template of another family. At the end nothing is leaked and all processes have
    stopped."""
    model = folder / "model"
    model.mkdir()
    make(model)
    cluster = Cluster(
        folder,
        model=str(model),
        prefill=0,
        decode=0,
        worker_options=["--simulated-step-s", "0"],
        coordinator_options=["--trust-request-chat-template"],
        environment={"SPLITSERVE_HOME": str(folder / "home")},
        http=True,
    )
    async with running(cluster, wait_ready=False):
        for role in ("prefill", "decode"):
            cluster.add_worker(role, f"{role}-0", module="tests.support.cluster.echoing_worker")
        await cluster.wait_ready(1, 1)
        yield cluster
        await cluster.assert_no_leaks()


@asynccontextmanager
async def proxied(cluster: Cluster) -> AsyncIterator[TcpProxy]:
    """Starts a cluster of one pair, made with `decode=0`, with a proxy between coordinator and decode worker; at
    the end all processes have stopped."""
    port = free_port()
    async with tcp_proxy(port) as proxy:
        try:
            await cluster.start(wait_ready=False)
            far = ["--port", str(port), "--advertise-address", f"127.0.0.1:{proxy.port}"]
            cluster.add_worker("decode", "decode-0", *far)
            await cluster.wait_ready(1, 1)
            yield proxy
        except BaseException:
            cluster.tell_state()
            raise
        finally:
            cluster.stop()
