"""Engine processes: how each is started, its KV memory, and the error when it ends."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from launcher.cluster.placement import available_cores
from launcher.cluster.process_specs import HUGE_PAGES
from splitserve.errors import UnavailableError

GIB = 2**30
MOST_KV_GIB = 8
BESIDE_GIB = 1
"""An engine's code and working memory, apart from its weights and KV."""
ENGINES = Path(str(files("bench.engine.processes")))
LOG_LINES = 20


@dataclass(frozen=True)
class EngineCommand:
    """Command line of an engine. `environment` is added to this process's environment."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    cores: Sequence[int]


def kv_gib(available_bytes: int, needed_bytes: int, weight_bytes: int, engines: int) -> int:
    """GiB of KV for each of `engines` engines on cpu: 8, or an equal share of the free memory.

    `needed_bytes` is the KV of the largest case. Raises UnavailableError where the share does not hold it.
    """
    beside = BESIDE_GIB * GIB + 2 * weight_bytes  # as loaded, and packed for the kernels
    share = int(available_bytes / engines - beside) // GIB
    needed = max(1, math.ceil(needed_bytes / GIB))
    if share < needed:
        raise UnavailableError(
            f"{engines} engine(s) need {engines * (needed + beside / GIB):.1f} GiB of memory, {needed} GiB of it each "
            f"for KV; {available_bytes / GIB:.1f} GiB are free. Choose smaller cases with --batch and --context"
        )
    return min(MOST_KV_GIB, share)


def engine_command(
    name: str, folder: str, threads: int, options: Sequence[str] = (), kv_space_gib: int = MOST_KV_GIB
) -> EngineCommand:
    """Command of an engine on the first `threads` cores. `options` apply to splitserve, `kv_space_gib` to vLLM."""
    cores = available_cores()[:threads]
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **HUGE_PAGES}
    arguments = [sys.executable, "-m", "bench.engine.processes.own", folder, str(threads), *options]
    if name == "transformers":
        arguments = [sys.executable, "-m", "bench.engine.processes.transformers_loop", folder, str(threads)]
    elif name == "vllm":
        home = Path(".peers/vllm").resolve()
        arguments = [str(home / "bin" / "python"), str(ENGINES / "vllm_steps.py"), folder]
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(kv_space_gib),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(home / "cache"),
            "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }
    return EngineCommand(name, arguments, environment, cores)


class EngineProcess:
    """One engine process, queried over its standard streams."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self._process, self._log = name, process, log
        self._read()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises UnavailableError, with the end of its log, when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> UnavailableError:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return UnavailableError(
            "\n".join([f"{self.name} ended with {code}; the end of {self._log}:", *lines])
        )


@contextmanager
def engine_process(command: EngineCommand, log: Path) -> Iterator[EngineProcess]:
    """Starts an engine and waits until it is ready; ends it after use. Makes the log's folder.

    Raises UnavailableError when it ends before.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as written:
        process = subprocess.Popen(
            list(command.arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
            env=os.environ | dict(command.environment),
            preexec_fn=lambda: os.sched_setaffinity(0, command.cores),  # noqa: PLW1509 - no threads here
        )
    try:
        yield EngineProcess(command.name, process, log)
    finally:
        process.kill()
        with suppress(BrokenPipeError), process:  # a question that it never read
            pass
