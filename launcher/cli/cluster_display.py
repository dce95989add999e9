"""Display of a local cluster: lines for people, and a log file per child."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from typing_extensions import override

from launcher.cluster.child_process import ChildSpec, Event
from launcher.cluster.supervisor import ClusterObserver
from splitserve.errors import ConfigError

LOUD_LEVELS = frozenset({"warning", "error", "critical"})


class ClusterDisplay(ClusterObserver):
    """Shows a cluster's life on stderr, and its ready line on stdout. A context manager."""

    def __init__(self, specs: list[ChildSpec], ready_line: str, log_dir: Path | None) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._ready_line = ready_line
        self._log_dir = log_dir
        self._logs: dict[str, IO[str]] = {}
        self._names = [spec.name for spec in specs]
        self._stack = ExitStack()
        self._loses_lines = False

    def __enter__(self) -> Self:
        for name in self._names:
            self._open_log(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # of logs that could not be written
            self._stack.close()

    @override
    def message(self, text: str) -> None:
        self._print(text)

    @override
    def ready(self, model: str) -> None:
        # A reader that left after the ready line must not end the cluster.
        with suppress(BrokenPipeError):
            print(self._ready_line.format(model=model), flush=True)

    @override
    def line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        # The log of a worker that joins while the cluster runs is opened here. With a full disk the cluster runs on.
        try:
            if log := self._logs.get(spec.name) or self._open_log(spec.name):
                log.write(f"{line}\n")
        except (OSError, ConfigError) as error:
            if not self._loses_lines:
                self._print(f"log_dir: lines are lost: {error}")
            self._loses_lines = True
        else:
            self._loses_lines = False
        if event is None or event.get("level") in LOUD_LEVELS:
            self._print(f"[{spec.name}] {line}")

    def _print(self, text: str) -> None:
        # Without a reader the cluster keeps running.
        with suppress(OSError):
            self._console.print(text)

    def _open_log(self, name: str) -> IO[str] | None:
        folder = self._log_dir
        if folder is None:
            return None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.log"
            log = self._stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
        except OSError as error:
            raise ConfigError(
                f"log_dir: cannot write to {folder}: {error.strerror}", field="log_dir"
            ) from None
        self._logs[name] = log
        return log
