"""What the services of a local cluster have in common, made once: modules and a model, and which service needs them.

Why processes are forked here and nowhere else: docs/decisions/0056-services-are-forked.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from splitserve.cluster.child_process import ChildSpec, Role
from splitserve.cluster.compute_threads import set_spins
from splitserve.cluster.forking.owner import AdoptedProcess, ForkServer
from splitserve.cluster.forking.server import Step
from splitserve.config.cluster import ClusterConfig
from splitserve.host_facts import read_host_facts
from splitserve.runtime.children.launch import PROGRAM
from splitserve.runtime.library_ahead import finish_loading, load_ahead

SHARED = ("uvloop", "splitserve.cli.services", "splitserve.rpc.server", "splitserve.models.hf_tokenizer")
"""What a coordinator and the workers import; the former imports the rest by itself, at the same time."""
WORKERS = ("prefill_worker.service", "decode_worker.service", "neutral_worker.service")
WEIGHTS = "engine.runner.weights"
VOCABULARY = "engine.worker.kept_vocabulary"
TORCH = ("engine.model.lean_torch", "engine.runner.torch_runner")


@dataclass(frozen=True)
class ServiceForks:
    """The fork server of a cluster, and how many of its steps a process of each role needs."""

    server: ForkServer
    needs: Mapping[Role, int]

    async def __call__(
        self, spec: ChildSpec, environment: Mapping[str, str], output: int, files: Sequence[int]
    ) -> AdoptedProcess | None:
        """See ForkServer.fork; None too for another program, and for a role that is not forked."""
        needed = self.needs.get(spec.role)
        if needed is None or spec.command[: len(PROGRAM)] != PROGRAM:
            return None
        arguments = spec.command[len(PROGRAM) :]
        return await self.server.fork(arguments, environment, output, files=files, steps=needed)


def fork_services(config: ClusterConfig, run: Callable[[list[str]], int]) -> ServiceForks | None:
    """Starts the fork server of a cluster with these settings; see ForkServer.start.

    Workers that compute with another engine than this project's, or may on a GPU, are not forked: those engines start
    processes of their own, and a driver's state does not survive a fork.
    """
    steps: list[Step] = [partial(set_spins, pinned=config.pin_cores), *SHARED]
    kind = config.engine.kind
    needs: dict[Role, int] = {"coordinator": len(steps)}
    on_cpu = config.engine.device == "cpu" or not read_host_facts().gpus
    if kind == "simulated" or (kind == "torch" and on_cpu):
        if kind == "torch":
            steps += [load_ahead, *WORKERS, finish_loading, *TORCH, partial(_keep_model, config)]
        else:
            steps += WORKERS
        needs |= {"prefill": len(steps), "decode": len(steps), "worker": len(steps)}
    server = ForkServer.start(steps, run)
    return None if server is None else ServiceForks(server, needs)


def _keep_model(config: ClusterConfig) -> None:
    # The engine is above this package; a worker's own code is what loads its model.
    facts = importlib.import_module(WEIGHTS).keep_weights(config.engine, config.model, config.wire_dtype)
    if facts is not None:
        importlib.import_module(VOCABULARY).keep_vocabulary(config.model, facts)
