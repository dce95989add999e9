"""Starting and ending splitserve's real processes, with their logs in files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.cluster.forked import Imports, Process, fork_server
from tests.support.waiting import PATIENCE_S

POLL_S = 0.02


class ServiceProcess:
    """One `python -m launcher …` process. Its log is one JSON object a line in `log_path`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log_dir: Path,
        environment: Mapping[str, str] | None = None,
        *,
        imports: Imports = "simulated",
        fresh: bool = False,
        module: str = "launcher",
    ) -> None:
        """`fresh`: in a new interpreter, as users start it, instead of forked from one that has the imports.

        `module`: a program of the tests' own that is run in place of `launcher`.
        """
        self.name = name
        # Libraries read some variables when they are loaded.
        self._module = module
        self._fresh = fresh or bool(environment) or sys.platform != "linux"
        self._imports = imports
        self._environment = dict(environment or {})
        self.arguments = list(arguments)
        self.log_path = log_dir / f"{name}.log"
        self._process: Process | None = None
        self._read_from = 0

    def start(self) -> None:
        """Starts the process; its log is appended to."""
        self._read_from = self.log_path.stat().st_size if self.log_path.exists() else 0
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | self._environment
        self.log_path.touch()
        if not self._fresh:
            server = fork_server(self._imports)
            self._process = server.start(self.arguments, environment, self.log_path, self._module)
            return
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, *self.arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    @property
    def process(self) -> Process:
        """The running process."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to this process alone."""
        self.process.send_signal(number)

    def dump_stacks(self) -> None:
        """Lets the process write what its threads are doing to its log, if it still runs."""
        if self.process.poll() is not None:
            return
        size = self.log_path.stat().st_size
        self.signal(signal.SIGUSR2)
        deadline = time.monotonic() + 1.0
        while self.log_path.stat().st_size == size and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.dump_stacks()
            self.kill()
            raise AssertionError(f"{self.name} did not end on SIGTERM:\n{self.log_tail()}") from None

    def wait_event(self, event: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The first log event of this name since the last start."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for entry in self.events():
                if entry.get("event") == event:
                    return entry
            if self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.log_tail()}")
            time.sleep(POLL_S)
        raise AssertionError(f"{self.name}: no {event} within {timeout_s} s:\n{self.log_tail()}")

    def events(self) -> list[dict[str, Any]]:
        """All whole JSON log lines since the last start."""
        with self.log_path.open("rb") as log:
            log.seek(self._read_from)
            lines = log.read().decode(errors="replace").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]

    def log_tail(self, lines: int = 100) -> str:
        """The end of the log, for messages."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def services_of(up: int) -> list[psutil.Process]:
    """The coordinator and workers of a running `splitserve up`, given its process id."""
    return psutil.Process(up).children()
