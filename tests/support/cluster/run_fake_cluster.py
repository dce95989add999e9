"""`splitserve up` with pretending children: `python -m tests.support.cluster.run_fake_cluster FOLDER
SETTINGS-AS-JSON`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.main import exit_code_of
from launcher.cli.up import run_cluster
from launcher.cluster.child_process import RestartPolicy, Role
from splitserve.addresses import claim_port
from splitserve.config.base import merge_settings
from splitserve.config.cluster import ClusterConfig


def main() -> int:
    folder = Path(sys.argv[1])

    def command(role: Role, options: Sequence[str]) -> tuple[str, ...]:
        return (sys.executable, "-m", "tests.support.cluster.fake_child", str(folder), role, *options)

    def action() -> int:
        settings = json.loads(sys.argv[2])
        settings.setdefault("coordinator", {})["grpc_port"] = claim_port("127.0.0.1", 0)
        settings["coordinator"]["http_port"] = None
        config = merge_settings(ClusterConfig, {"model": "simulated"}, settings)
        policy = RestartPolicy(first_delay_s=0.05, last_delay_s=0.1)
        return 130 if asyncio.run(run_cluster(config, folder / "logs", command=command, policy=policy)) else 0

    return exit_code_of(action)


if __name__ == "__main__":
    sys.exit(main())
