"""A server that a bench starts as it is started in production, and that ends with the bench."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from splitserve.addresses import claim_port

HOST = "127.0.0.1"
READY_POLL_S = 0.5
HEALTH_TIMEOUT_S = 2.0
END_S = 20.0
LOG_TAIL_LINES = 30
CLUSTER_READY_S = 300.0


class ServerProcess:
    """One HTTP server with all processes that it starts, in a session of their own; their output goes to `log_path`."""

    def __init__(
        self, command: Sequence[str], log_path: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | dict(variables or {}),
                start_new_session=True,
            )

    async def wait_ready(self, port: int, path: str, timeout_s: float) -> None:
        """Returns when GET `path` is answered with 200. Raises RuntimeError with the end of the log."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._process.poll() is None:
                    if await asyncio.to_thread(answers_ok, HOST, port, path):
                        return
                    await asyncio.sleep(READY_POLL_S)
        lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise RuntimeError("\n".join([f"not ready: {self._log_path}", *lines]))

    def family(self) -> list[psutil.Process]:
        """The server and every process that it started; empty once it has ended."""
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._process.pid)
            return [server, *server.children(recursive=True)]
        return []

    def pause(self) -> None:
        """Stops all of its processes where they are (SIGSTOP), so that they use no core."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Lets all of its processes go on (SIGCONT)."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Asks the server to end; what is left of it and its children after that, or END_S, is killed."""
        family = self.family()[1:]
        if self._process.poll() is None:
            self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        with suppress(ProcessLookupError):  # children that its end made orphans
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True)
class RunningCluster:
    """splitserve as `splitserve up` runs it, and its ports."""

    server: ServerProcess
    http_port: int
    grpc_port: int


@asynccontextmanager
async def running_up(settings: Mapping[str, Any], name: str, log_dir: Path) -> AsyncIterator[RunningCluster]:
    """Runs `splitserve up` with these settings of a cluster's file until the block ends; file and log go to `log_dir`.

    Raises RuntimeError with the end of the log when it does not become ready.
    """
    http_port, grpc_port = claim_port(HOST, 0), claim_port(HOST, 0)
    file = log_dir / f"{name}.yaml"
    file.write_text(yaml.safe_dump(dict(settings)))
    command = [sys.executable, "-m", "launcher", "up", "--config", str(file)]
    command += ["--grpc-port", str(grpc_port), "--http-port", str(http_port), "--drain", "0"]
    server = ServerProcess(command, log_dir / f"{name}.log")
    try:
        await server.wait_ready(http_port, "/ready", CLUSTER_READY_S)
        yield RunningCluster(server, http_port, grpc_port)
    finally:
        server.resume()
        server.stop(signal.SIGTERM)


def answers_ok(host: str, port: int, path: str) -> bool:
    """Whether a server answers GET `path` there with 200."""
    connection = http.client.HTTPConnection(host, port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
