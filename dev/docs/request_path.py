"""The way of a streamed chat request through the files, traced on a running cluster; `make docs` writes it down."""

from __future__ import annotations

import json
import re
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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- request path: written by `make docs` -->", "<!-- end of the request path -->"
_SECTION = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
SERVICES = ("coordinator", "prefill-worker", "decode-worker")
HOST = "127.0.0.1"
WAIT_S = 180.0
MODEL = "simulated"
TRACES = 3
IDLE_S = 7.0
"""How long the idle cluster is watched: longer than its timers' intervals, the longest of which is the five seconds
after which a coordinator sends a worker its peers again."""


BY_CHANCE = {
    "coordinator/workers/prefix_index/gaps.py",
    "coordinator/workers/prefix_index/lost_blocks.py",
    "coordinator/workers/registration.py",
    "coordinator/workers/registry_service.py",
    "splitserve/runtime/own_clock.py",
}
"""Entered or not, as two messages happen to come. A worker's report of what its cache has changed comes before or after
the last token, and nobody waits for it; the completion is waited for on the process's own time only where the prefill
worker's word of the handoff is faster than the decode worker's."""


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
    for name, found in first.items():
        for kind in found:
            found[kind] = [
                file
                for file in found[kind]
                if all(file in other[name][kind] for other in others) and file not in BY_CHANCE
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
    found = {}
    for name, process in processes.items():
        process.send_signal(signal.SIGRTMIN)
        _wait_for(outs[name], process)
        found[name] = json.loads(outs[name].read_text(encoding="utf-8"))
        for written in (outs[name], outs[name].with_suffix(".on")):
            written.unlink()
    return found


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
                processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=PAGE.parent.parent)
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


def section(path: RequestPath) -> str:
    """The section for docs/architecture.md."""
    lines = [
        BEGIN,
        f"A streamed chat request enters {path.different_files} files: "
        + ", ".join(f"{len(path.files[name])} in the {name.replace('-', ' ')}" for name in SERVICES)
        + ". What an idle process does too, such as polling and answering health checks, is left out. "
        + f"In the coordinator the request is handed on {len(path.handed_on)} times:",
        "",
        *(f"{number}. `{name}`" for number, name in enumerate(path.handed_on, 1)),
        "",
    ]
    for name in SERVICES:
        lines += [
            f"All files of the {name.replace('-', ' ')}: "
            + ", ".join(f"`{file}`" for file in sorted(path.files[name]))
            + ".",
            "",
        ]
    return "\n".join([*lines, END])


def documented(text: str) -> list[str]:
    """The files that the page says a request is handed on to."""
    return re.findall(r"^\d+\. `([\w/]+\.py)`$", _SECTION.findall(text)[0], flags=re.MULTILINE)


def main() -> None:
    """Writes the section."""
    text, new = PAGE.read_text(encoding="utf-8"), section(traced())
    PAGE.write_text(_SECTION.sub(lambda _: new, text), encoding="utf-8")


if __name__ == "__main__":
    main()
