"""The way of a streamed chat request through the files, traced on a cluster: `python -m dev.docs.request_path`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from splitserve.addresses import claim_port

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("coordinator", "prefill-worker", "decode-worker")
HOST = "127.0.0.1"
WAIT_S = 180.0
MODEL = "simulated"
TRACES = 3
IDLE_S = 7.0
"""How long the idle cluster is watched: longer than its timers' intervals, the longest of which is the five seconds
after which a coordinator sends a worker its peers again."""


REPORT_FILES = frozenset(
    {
        "coordinator/workers/registration.py",
        "coordinator/workers/registry_service.py",
        "coordinator/workers/rotation.py",
    }
)
"""What a worker's report enters on the coordinator. A worker reports what its cache has changed before or after the
last token, and no request waits for it. A request over HTTP enters none of these files."""
BY_CHANCE: Mapping[str, frozenset[str]] = {
    "coordinator": REPORT_FILES | {"splitserve/runtime/waiting.py"},
    "prefill-worker": frozenset({"splitserve/runtime/waiting.py"}),
    "decode-worker": frozenset({"splitserve/runtime/waiting.py"}),
}
"""By service: files that are entered or not, as two messages happen to come. The coordinator waits for the completion
on the process's own time only where the prefill worker reports the handoff sooner than the decode worker."""


@dataclass(frozen=True)
class RequestPath:
    """Files and functions that one request entered, by service, in order of the first call."""

    files: dict[str, list[str]]
    handed_on: list[str]
    """Coordinator files that receive the request from another file."""

    @property
    def different_files(self) -> int:
        """Files entered in any of the three processes."""
        return len(set().union(*self.files.values()))


def traced() -> RequestPath:
    """Serves requests and traces all but the first one: lazy initialization is done by then. What timers do is not on
    the way: neither what they do in the idle cluster, nor what happens in one of the traces only."""
    with tempfile.TemporaryDirectory() as folder, _cluster(Path(folder)) as (processes, http_port):
        _ask(http_port, "The first question makes what is made once.")
        _traced_once(Path(folder), processes, partial(time.sleep, IDLE_S))
        traces = [
            _traced_once(
                Path(folder), processes, partial(_ask, http_port, f"Question {number}, which no cache knows.")
            )
            for number in range(TRACES)
        ]
    first, *others = traces
    for name, trace in first.items():
        for kind in trace:
            trace[kind] = [
                file
                for file in trace[kind]
                if all(file in other[name][kind] for other in others) and file not in BY_CHANCE[name]
            ]
    handed_on = [name for name in first["coordinator"]["handed_on"] if name.startswith("coordinator/")]
    return RequestPath({name: first[name]["files"] for name in SERVICES}, handed_on)


def _traced_once(
    folder: Path, processes: Mapping[str, subprocess.Popen[bytes]], act: Callable[[], None]
) -> dict[str, dict[str, list[str]]]:
    outs = {name: folder / f"{name}.json" for name in SERVICES}
    for name, process in processes.items():
        process.send_signal(signal.SIGRTMIN)
        _wait_for(outs[name].with_suffix(".on"), process)
    act()
    traces = {}
    for name, process in processes.items():
        process.send_signal(signal.SIGRTMIN)
        _wait_for(outs[name], process)
        traces[name] = json.loads(outs[name].read_text(encoding="utf-8"))
        for written in (outs[name], outs[name].with_suffix(".on")):
            written.unlink()
    return traces


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[dict[str, subprocess.Popen[bytes]], int]]:
    grpc_port, http_port = claim_port(HOST, 0), claim_port(HOST, 0)
    # No periodic reports, so that the trace contains the request only. Steps are slow enough that no output waits for
    # the one before it on a busy machine, and is merged with it.
    worker = folder / "worker.yaml"
    worker.write_text(
        "heartbeat_s: 60\nengine: {kind: simulated, simulated_step_s: 0.05}\n", encoding="utf-8"
    )
    coordinator = folder / "coordinator.yaml"
    coordinator.write_text("heartbeat_timeout_s: 60\n", encoding="utf-8")
    ports = ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    join = ["--config", str(worker), "--model", MODEL, "--coordinator", f"127.0.0.1:{grpc_port}"]
    options = dict.fromkeys(SERVICES, join) | {"coordinator": ["--config", str(coordinator), *ports]}
    processes = {}
    try:
        for name in SERVICES:
            command = [
                sys.executable,
                "-m",
                "dev.docs.traced_service",
                str(folder / f"{name}.json"),
                name,
                *options[name],
            ]
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        _wait_ready(http_port, processes["coordinator"])
        yield processes, http_port
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(WAIT_S)


def _ask(http_port: int, question: str) -> None:
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": question}],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{http_port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        if b"[DONE]" not in answer.read():
            raise SystemExit("request_path: the answer did not end")


def _wait_ready(http_port: int, coordinator: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/ready", timeout=WAIT_S):
                return
        except OSError:
            if time.monotonic() > deadline_s or coordinator.poll() is not None:
                raise
            time.sleep(0.1)


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise SystemExit(f"request_path: {path.name} did not come")
        time.sleep(0.02)


def report(path: RequestPath) -> str:
    """Counts, the files that the coordinator hands the request on to, and all files by service."""
    counts = ", ".join(f"{len(path.files[name])} in the {name.replace('-', ' ')}" for name in SERVICES)
    lines = [
        f"A streamed chat request enters {path.different_files} files: {counts}.",
        f"In the coordinator it is handed on {len(path.handed_on)} times:",
        *(f"{number:3}. {name}" for number, name in enumerate(path.handed_on, 1)),
    ]
    for name in SERVICES:
        lines += [
            "",
            f"Files of the {name.replace('-', ' ')}:",
            *(f"  {file}" for file in sorted(path.files[name])),
        ]
    return "\n".join(lines)


def main() -> None:
    """Prints the report."""
    print(report(traced()))


if __name__ == "__main__":
    main()
