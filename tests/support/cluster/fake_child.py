"""A child of the local cluster that only pretends: `python -m tests.support.cluster.fake_child FOLDER ROLE [OPTION
VALUE ...]`.

Files in FOLDER say how it behaves, looked up at its start: NAME.crash (fail at once), NAME.refuse (a setting),
NAME.slow (never get ready), NAME.stubborn (ignore SIGTERM). It leaves its id in NAME.pid, and its name in `ended` when
it drains.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from splitserve.v1 import inference_pb2
from tests.support.clients.fake_inference import FakeInference, serving


class FolderInference(FakeInference):
    """Sees the workers that left their id and still live."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: object
    ) -> inference_pb2.GetServerInfoResponse:
        self.workers = live_workers(self._folder)
        return await super().GetServerInfo(request, context)


def live_workers(folder: Path) -> list[inference_pb2.WorkerInfo]:
    return [
        inference_pb2.WorkerInfo(
            worker_id=path.stem, role=path.stem.rpartition("-")[0], model="fake-1b", state="ready"
        )
        for path in sorted(folder.glob("*-*.pid"))
        if psutil.pid_exists(int(path.read_text()))
    ]


def tell(event: str, **fields: object) -> None:
    print(json.dumps({"level": "info", "event": event} | fields), file=sys.stderr, flush=True)


async def run(folder: Path, name: str, port: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with AsyncExitStack() as stack:
        if name == "coordinator":
            await stack.enter_async_context(serving(FolderInference(folder), port))
            tell("coordinator.ready", port=port)
        else:
            tell("worker.loading")
        if (folder / f"{name}.slow").exists():
            tell("registry.lost", error="its certificate is refused")
        else:
            pid = folder / f"{name}.new"
            pid.write_text(str(os.getpid()))
            pid.rename(folder / f"{name}.pid")
            if name != "coordinator":
                tell("worker.ready")
        await stop.wait()
        if (folder / f"{name}.stubborn").exists():
            await asyncio.Event().wait()
        with (folder / "ended").open("a") as ended:
            ended.write(f"{name}\n")


def main() -> None:
    folder, role = Path(sys.argv[1]), sys.argv[2]
    options = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
    name = options.get("--worker-id", role)
    if (folder / f"{name}.crash").exists():
        print("error: the weights are broken", file=sys.stderr)
        sys.exit(1)
    if (folder / f"{name}.refuse").exists():
        print("error: a: too large", file=sys.stderr)
        sys.exit(2)
    asyncio.run(run(folder, name, int(options.get("--grpc-port", 50051))))


if __name__ == "__main__":
    main()
