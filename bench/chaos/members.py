"""The processes under attack: two coordinators and two workers of each pool, each started again whenever it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bench.faults.plan import FaultPlan
from bench.tcp_proxy import TcpProxy, tcp_proxy
from launcher.cluster.child_process import ChildProcess, ChildSpec, Event, Role
from launcher.cluster.process_specs import SERVING_STATES, splitserve_command
from splitserve.addresses import claim_port, join_address
from splitserve.client import AsyncClient
from splitserve.errors import SplitserveError
from splitserve.runtime.child_launch import PROGRAM
from splitserve.v1 import inference_pb2

HOST = "127.0.0.1"
RESTART_S = 0.2
READY_S = 300.0
END_S = 60.0
COPIES = 2
WORKER_OPTIONS: tuple[str, ...] = ("--dtype", "float32", "--threads", "1", "--num-blocks", "512")
WORKER_OPTIONS += ("--drain", "10", "--lease", "10", "--heartbeat", "0.25")
COORDINATOR_OPTIONS = ("--http-port", "off", "--heartbeat-timeout", "3", "--max-queue", "120")


class Member:
    """One process of the cluster, behind a proxy. It is started again when it ends, until `stop`."""

    def __init__(self, name: str, role: Role, command: tuple[str, ...], proxy: TcpProxy, log: TextIO) -> None:
        self.name, self.role, self.proxy = name, role, proxy
        self.starts = 0
        self.own_ends = 0
        """How often it ended though no signal of `signal` told it to."""
        self._log, self._stopping, self._told = log, False, False
        self._child = ChildProcess(ChildSpec(name, role, command), self._line)

    async def run(self) -> None:
        """Runs the process again and again."""
        try:
            while not self._stopping:
                self.starts += 1
                self._told = False
                await self._child.start()
                code = await self._child.wait()
                self.own_ends += not self._told
                self._log.write(f"--- {self.name} ended with {code}\n")
                await asyncio.sleep(RESTART_S)
        finally:
            self._child.kill()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if there is one now."""
        self._told = self._told or number in (signal.SIGKILL, signal.SIGTERM)
        if (pid := self._child.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """Ends the process for good."""
        self._stopping = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)

    def lose(self) -> None:
        """Acts as if its machine had ended: the process gets SIGKILL and is not started again."""
        self._stopping = True
        self.signal(signal.SIGKILL)

    def _line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        self._log.write(f"{spec.name}: {line.rstrip()}\n")


@dataclass(frozen=True)
class ChaosCluster:
    """The running cluster. `target` lists both coordinators, `direct` their addresses without a proxy."""

    members: Sequence[Member]
    target: str
    direct: Sequence[str]

    async def info(self, coordinator: str) -> inference_pb2.GetServerInfoResponse | None:
        """What a coordinator knows; None while it does not answer."""
        try:
            async with asyncio.timeout(2), AsyncClient(coordinator) as client:
                return await client.server_info()
        except (SplitserveError, TimeoutError):
            return None

    async def whole(self) -> set[Role]:
        """The roles all of whose members serve now, as every coordinator sees it that answers."""
        infos = [info for address in self.direct if (info := await self.info(address)) is not None]
        roles: set[Role] = set()
        least = COPIES
        pools: tuple[Role, Role] = ("prefill", "decode")
        for pool in pools:
            serving = [
                sum(w.role == pool and w.state in SERVING_STATES for w in info.workers) for info in infos
            ]
            if serving and min(serving) == COPIES:
                roles.add(pool)
            least = min([least, *serving])
        # A coordinator that has just been started serves once workers have registered with it.
        if len(infos) == len(self.direct) and least > 0:
            roles.add("coordinator")
        return roles

    async def until_whole(self) -> None:
        """Waits until everything serves. Raises TimeoutError."""
        async with asyncio.timeout(READY_S):
            while len(await self.whole()) < 3:  # noqa: ASYNC110 (other processes, which are asked)
                await asyncio.sleep(0.2)


@asynccontextmanager
async def running_cluster(
    model: str,
    log_path: Path,
    worker_options: Sequence[str] = (),
    coordinator_options: Sequence[str] = (),
    step_noise: float = 0.0,
    engine: str = "torch",
) -> AsyncIterator[ChaosCluster]:
    """Starts all processes, and ends them with the block. Their output goes to `log_path`. `worker_options` and
    `coordinator_options` come after those that all workers and coordinators of this bench have. `step_noise` is what
    `bench.faults.plan` takes."""
    async with AsyncExitStack() as stack:
        log = stack.enter_context(log_path.open("w", encoding="utf-8"))
        members: list[Member] = []

        async def add_member(name: str, role: Role, options: Sequence[str]) -> int:
            port = claim_port(HOST, 0)
            proxy = await stack.enter_async_context(tcp_proxy(port))
            listen = ["--grpc-port" if role == "coordinator" else "--port", str(port)]
            if role != "coordinator":
                listen += ["--advertise-address", join_address(HOST, proxy.port)]
            command = splitserve_command(role, [*options, *listen])
            if role != "coordinator" and step_noise:
                plan = FaultPlan(step_noise=step_noise)
                program = (sys.executable, "-m", "bench.faults", plan.model_dump_json(exclude_defaults=True))
                command = (*program, *command[len(PROGRAM) :])
            members.append(Member(name, role, command, proxy, log))
            return port

        own = [*COORDINATOR_OPTIONS, *coordinator_options]
        ports = [await add_member(f"coordinator-{n}", "coordinator", own) for n in range(COPIES)]
        direct = [join_address(HOST, port) for port in ports]
        target = ",".join(join_address(HOST, member.proxy.port) for member in members)
        join = [word for address in direct for word in ("--coordinator", address)]
        for role in ("prefill", "decode"):
            for n in range(COPIES):
                name = f"{role}-{n}"
                options = [
                    "--role",
                    role,
                    "--model",
                    model,
                    "--worker-id",
                    name,
                    "--engine",
                    engine,
                    *join,
                    *WORKER_OPTIONS,
                    *worker_options,
                ]
                await add_member(name, role, options)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(member.run()) for member in members]
            try:
                cluster = ChaosCluster(members, target, direct)
                await cluster.until_whole()
                yield cluster
            finally:
                for member in members:
                    member.stop()
                await asyncio.wait(tasks, timeout=END_S)
                for task in tasks:
                    task.cancel()
