"""The product's fork server with all of splitserve imported, as a program of its own: a test process has threads.

Run as `python -m tests.support.cluster.fork_server FD OWNER IMPORTS`; `tests.support.cluster.forked` holds the other
end of the socket.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as splitserve's own program does before it imports gRPC

from splitserve.cluster.forking.server import serve
from splitserve.cluster.forking.services import SHARED, TORCH, WORKERS

ALL = (
    *SHARED,
    *WORKERS,
    "splitserve.cli.main",
    "autoscaler.service",
    "coordinator.entrypoints.openai.app",
    "coordinator.service",
)
BESIDE: Mapping[str, tuple[str, ...]] = {
    "simulated": (),
    "torch": (*TORCH, "transformers.models.llama.modeling_llama"),
    "vllm": ("tests.integration.vllm.vllm_imports",),
}


def modules_of(imports: str) -> tuple[str, ...]:
    """What a server with these imports brings; every process waits for all of it."""
    return (*ALL, *BESIDE[imports])


def main() -> int:
    """The server's exit code, and in a forked process that of the command."""
    control, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    arguments = serve(control, owner, modules_of(sys.argv[3]))
    if arguments is None:
        return 0
    from splitserve.cli.main import main as splitserve

    return splitserve(arguments)


if __name__ == "__main__":
    sys.exit(main())
