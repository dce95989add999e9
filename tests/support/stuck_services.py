"""Services that do not end by themselves: `python -m tests.support.stuck_services exit|start|load COMMAND`.

`exit`: a thread that is no daemon, a call of `asyncio.to_thread` and a hook at the interpreter's end wait for ever, as
in a library. `start`: so does the start of engine vllm, beside a process that it has started. In either case a child
does not end by SIGTERM; the event `test.child` tells its id. `load`: so does the loading of each tokenizer, which the
event `test.loading` tells.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Coroutine
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from coordinator import service
from launcher.cli import services
from launcher.cli.main import main
from splitserve.config import engine
from splitserve.runtime.children_end import remove_at_end
from worker import build

CHILD = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
)
VLLM_START_S = 0.3
_never = threading.Event()


def _say(event: str, **fields: Any) -> None:
    # One write: `print` writes the end of a line by itself, and other threads log in between.
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _start_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    _say("test.child", pid=child.pid)


def _stick_at_exit() -> None:
    atexit.register(_never.wait)
    threading.Thread(target=_never.wait).start()
    run = services.leaving

    async def leaving(service: Coroutine[Any, Any, None]) -> NoReturn:
        stuck = asyncio.create_task(asyncio.to_thread(_never.wait))
        await asyncio.sleep(0)
        await run(service)
        raise AssertionError(stuck)

    services.leaving = leaving
    _start_child()


def _stick_at_start() -> None:
    def start(*_: object) -> NoReturn:
        _start_child()
        remove_at_end(lambda: _say("test.removed"))
        while True:
            _never.wait()

    sys.modules["vllm"] = ModuleType("vllm")  # as if it were installed
    build._vllm = start
    engine.VLLM_START_S = VLLM_START_S


def _stick_at_load() -> None:
    def load(_source: str) -> NoReturn:
        _say("test.loading")
        while True:
            _never.wait()

    service.running_coordinator = partial(service.running_coordinator, load=load)


if __name__ == "__main__":
    {"exit": _stick_at_exit, "start": _stick_at_start, "load": _stick_at_load}[sys.argv.pop(1)]()
    sys.exit(main())
