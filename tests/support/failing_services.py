"""Services whose decode workers fail on request: `python -m tests.support.failing_services FOLDER COMMAND`.

Once FOLDER/hang or FOLDER/break exists, the first decode worker that computes removes it, and its step never ends or
raises as a lost device does. COMMAND is one of splitserve's, or `cluster SETTINGS-AS-JSON`: `splitserve up` with these
services.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from engine.core.model_runner import SampledToken, ScheduledSequence
from engine.runner.simulated_runner import SimulatedRunner
from launcher.cli.main import exit_code_of, main
from launcher.cli.up import run_cluster
from launcher.cluster.child_process import Role
from launcher.cluster.process_specs import splitserve_command
from splitserve.addresses import claim_port
from splitserve.config.base import merge_settings
from splitserve.config.cluster import ClusterConfig


def fail_on_request(folder: Path) -> None:
    """Lets the simulated device of this process fail once a mark is in `folder`."""
    execute = SimulatedRunner.execute

    def failing(self: SimulatedRunner, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        if taken(folder / "hang"):
            threading.Event().wait()
        if taken(folder / "break"):
            raise RuntimeError("the device is lost")
        return execute(self, batch)

    SimulatedRunner.execute = failing  # type: ignore[method-assign]


def taken(mark: Path) -> bool:
    """Whether this process is the one that removed the mark."""
    try:
        mark.unlink()
    except FileNotFoundError:
        return False
    return True


def run_up(folder: Path, settings: str) -> int:
    """`splitserve up`, whose children are started through this module."""

    def command(role: Role, options: Sequence[str]) -> tuple[str, ...]:
        python, _, _, *rest = splitserve_command(role, options)
        return (python, "-m", "tests.support.failing_services", str(folder), *rest)

    def action() -> int:
        given = json.loads(settings)
        given["coordinator"] = {"grpc_port": claim_port("127.0.0.1", 0), "http_port": None}
        config = merge_settings(ClusterConfig, {"model": "simulated"}, given)
        return 130 if asyncio.run(run_cluster(config, folder, command=command)) else 0

    return exit_code_of(action)


if __name__ == "__main__":
    place, arguments = Path(sys.argv[1]), sys.argv[2:]
    if arguments[0] == "cluster":
        sys.exit(run_up(place, arguments[1]))
    if arguments[0] == "worker" and "decode" in arguments:  # --role decode
        fail_on_request(place)
    sys.exit(main(arguments))
