"""A program that imports splitserve once and forks services from itself, so that a test's service starts in
milliseconds instead of seconds. Tests only: `splitserve up` executes its services.

Run as `python -m tests.support.cluster.fork_server FD OWNER IMPORTS`; `tests.support.cluster.forked` holds the other
end of the socket. A request is one byte with two files: the service's output, and a stream socket over which its
arguments and environment come, see `_become`. The service becomes a child of the test process, which must be a
subreaper: the service is forked twice, and the process between the two forks ends at once.

Only a process with a single thread may fork: a thread's locks would stay locked in the child.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as splitserve's own program does before it imports gRPC

from kv_transfer.transports.nixl.binding import load_nixl
from splitserve.runtime.child_launch import end_with_parent

IMPORTS = (
    "uvloop",
    "launcher.cli.main",
    "launcher.cli.services",
    "splitserve.rpc.server",
    "splitserve.models.hf_tokenizer",
    "prefill_worker.service",
    "decode_worker.service",
    "autoscaler.service",
    "coordinator.entrypoints.openai.app",
    "coordinator.service",
)
EMBEDDED = "smollm2-135m-instruct"
BESIDE: Mapping[str, tuple[str, ...]] = {
    "simulated": (),
    "torch": ("engine.runner.torch_runner", "transformers.models.llama.modeling_llama"),
    "vllm": ("tests.integration.vllm.vllm_imports",),
}
GO = b"g"
ADOPTION_POLL_S = 0.001


def serve(control: socket.socket, owner: int) -> list[str] | None:
    """Forks a service for each request. Returns the service's module and arguments in the service, and None in the
    server once `owner` has closed its end."""
    while True:
        kind, files, _, _ = socket.recv_fds(control, 1, 2)
        if not kind:
            return None
        output, answer = files
        if _fork():
            control.close()
            return _become(owner, output, answer)
        os.close(output)
        os.close(answer)


def _load_ucx() -> None:
    """Loads NIXL's plugin for UCX: as it is loaded, UCX measures the processor's clock for 0.4 s."""
    for plugin in Path(str(load_nixl().__file__)).parents[1].glob(".nixl*/plugins/libplugin_UCX.so"):
        ctypes.CDLL(str(plugin))


def _fork() -> bool:
    """Forks a process that is no child of this one; True in that process, and False in this one."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads does not fork"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.freeze()  # a collection in the child would write to, and so copy, all pages with objects
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(ADOPTION_POLL_S)
    return True


def _become(owner: int, output: int, answer: int) -> list[str]:
    """Gives this process a session, output and environment of its own; returns its module and arguments.

    The socket `answer` brings a JSON line of `arguments` and `environment`. The process says its id there, and waits
    for GO. It ends if the owner has gone.
    """
    os.setsid()
    end_with_parent(owner)
    with socket.socket(fileno=answer) as peer, peer.makefile("rb") as lines:
        try:
            asked = json.loads(lines.readline())
            peer.sendall(b"%d\n" % os.getpid())
        except (OSError, ValueError):
            os._exit(1)
        if lines.read(len(GO)) != GO:
            os._exit(1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(asked["environment"])
    return [str(argument) for argument in asked["arguments"]]


def main() -> int:
    """The server's exit code, and in a forked process that of the program, unless that exits itself."""
    control, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for name in (*IMPORTS, *BESIDE[sys.argv[3]]):
        importlib.import_module(name)
    _load_ucx()
    arguments = serve(control, owner)
    if arguments is None:
        return 0
    module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
