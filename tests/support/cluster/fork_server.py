"""The product's fork server with all of splitserve imported, as a program of its own: a test process has threads.

Run as `python -m tests.support.cluster.fork_server FD OWNER IMPORTS`; `tests.support.cluster.forked` holds the other
end of the socket.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as splitserve's own program does before it imports gRPC

from splitserve.cluster.forking.server import Step, serve
from splitserve.cluster.forking.services import SHARED, TORCH, WORKERS
from splitserve.errors import NotFoundError

ALL = (
    *SHARED,
    *WORKERS,
    "splitserve.cli.main",
    "autoscaler.service",
    "coordinator.entrypoints.openai.app",
    "coordinator.service",
)
EMBEDDED = "smollm2-135m-instruct"


def keep_embedded() -> None:
    """Most workers with real weights have these, and those of a cluster share them (decision 61)."""
    from engine.runner.weights import keep_weights
    from engine.worker.kept_vocabulary import keep_vocabulary
    from splitserve.config.engine import EngineConfig
    from splitserve.models.sources import resolve_model

    with suppress(NotFoundError):  # the tests say so
        model = resolve_model(EMBEDDED).path
        if (facts := keep_weights(EngineConfig(dtype="float32"), model)) is not None:
            keep_vocabulary(model, facts)


BESIDE: Mapping[str, tuple[Step, ...]] = {
    "simulated": (),
    "torch": (*TORCH, "transformers.models.llama.modeling_llama", keep_embedded),
    "vllm": ("tests.integration.vllm.vllm_imports",),
}


def steps_of(imports: str) -> tuple[Step, ...]:
    """What a server with these imports brings; every process waits for all of it."""
    return (*ALL, *BESIDE[imports])


def main() -> int:
    """The server's exit code, and in a forked process that of the command."""
    control, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    arguments = serve(control, owner, steps_of(sys.argv[3]))
    if arguments is None:
        return 0
    from splitserve.cli.main import main as splitserve

    return splitserve(arguments)


if __name__ == "__main__":
    sys.exit(main())
