"""Runs a service of splitserve and records which of its files a request enters: `python -m dev.docs.traced_service OUT
COMMAND ...`.

SIGRTMIN begins a recording, and `OUT.on` says that it has begun. The next SIGRTMIN ends it and writes OUT: a JSON
object of `files`, those whose functions were called, in order of the first call, and `handed_on`, those of them that
were given the request or a part of it by another file. The first recording is of the idle process: the ways by which
its timers call functions do not count in those that follow, however long these take.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("splitserve", "coordinator", "prefill_worker", "decode_worker", "worker", "kv_transfer", "engine")
GENERATED = ("splitserve/v1/", "splitserve/kserve/")
REQUEST_PROTOS = ("inference_pb2", "generation_pb2", "decode_pb2", "prefill_pb2")
REQUEST_MODULES = (
    "coordinator.request.",
    "coordinator.entrypoints.openai.",
    "coordinator.entrypoints.http.exchange",
    "starlette.requests",
    "splitserve.models.tokenizer",
)


CallChain = tuple[tuple[str, str], ...]
"""File and name of the functions of this repository on the stack, the called one first."""


class Recorder:
    """A profile function for all threads of the process."""

    def __init__(self) -> None:
        self.on = False
        self.files: dict[str, None] = {}
        self.handed_on: dict[str, None] = {}
        self._idle: set[CallChain] | None = None
        self._chains: set[CallChain] = set()
        self._names: dict[str, str | None] = {}

    def begin(self) -> None:
        """Begins a recording."""
        self.files.clear()
        self.handed_on.clear()
        self._chains.clear()
        self.on = True

    def end(self) -> None:
        """Ends the recording. The first recording says what an idle process does."""
        self.on = False
        if self._idle is None:
            self._idle = set(self._chains)

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """The interpreter calls this at each call and return, as `sys.setprofile` declares; calls are recorded."""
        if event != "call" or not self.on:
            return
        name = self._name(frame)
        if name is None:
            return
        chain = tuple(
            (own, caller.f_code.co_qualname) for caller in _stack(frame) if (own := self._name(caller))
        )
        self._chains.add(chain)
        if self._idle is not None and chain in self._idle:
            return
        self.files[name] = None
        # The caller through the event loop, decorators and libraries.
        if (len(chain) == 1 or chain[1][0] != name) and carries_request(frame):
            self.handed_on[name] = None

    def _name(self, frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        if path not in self._names:
            short = path.removeprefix(f"{ROOT}/")
            ours = short != path and short.startswith(PACKAGES) and not short.startswith(GENERATED)
            self._names[path] = short if ours else None
        return self._names[path]


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def carries_request(frame: FrameType) -> bool:
    """Whether the function receives the request, or an object that represents it."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(is_request(frame.f_locals.get(name)) for name in names if name != "self")


def is_request(value: Any) -> bool:
    """Whether a value is the request of a client in any of its forms: as received, as understood, as its answer."""
    module: str = type(value).__module__
    return module.startswith(REQUEST_MODULES) or module.rpartition(".")[2] in REQUEST_PROTOS


def main() -> None:
    """Runs the command line of splitserve in this process."""
    out, recorder = Path(sys.argv[1]), Recorder()

    def toggle(_number: int, _frame: FrameType | None) -> None:
        if not recorder.on:
            recorder.begin()
            out.with_suffix(".on").touch()
        else:
            recorder.end()
            trace = {"files": list(recorder.files), "handed_on": list(recorder.handed_on)}
            part = out.with_suffix(".part")
            part.write_text(json.dumps(trace), encoding="utf-8")
            part.rename(out)

    signal.signal(signal.SIGRTMIN, toggle)
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    sys.argv = ["splitserve", *sys.argv[2:]]
    from launcher.cli.main import main as splitserve

    sys.exit(splitserve())


if __name__ == "__main__":
    main()
