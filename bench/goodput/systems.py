"""The systems that are compared, and how each is started, on the same cores; one table, one line a system."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaler.simulation.scenario import Slo
from bench.asking import HIGHEST_TOKEN
from bench.goodput.wire import ServedAt
from bench.peers.vllm_server import Layout, running_colocated, running_pair
from bench.server_process import running_up
from launcher.cluster.placement import available_cores
from splitserve.models.sources import resolve_model

SIMULATED_MODEL, SIMULATED_VOCABULARY = "simulated", 257


@dataclass(frozen=True)
class OwnSystem:
    """splitserve as `splitserve up` serves it, with these settings of the cluster's file.

    `targets`: the time a token is set (`admission.tpot_slo_s`), and requests name both targets. `all_cores`: every
    worker may use all cores, with a thread for each.
    """

    settings: Mapping[str, Any]
    targets: bool = True
    all_cores: bool = False


@dataclass(frozen=True)
class VllmSystem:
    """vLLM in its own environment: one server on all cores, or a prefill and a decode server on half of them each."""

    pair: bool


_SPLIT = {"prefill": 1, "decode": 1}
_COLOCATED = {
    **_SPLIT,  # a cluster has a prefill worker; here it stands idle
    "pin_cores": False,
    "coordinator": {"local_prefill": "always", "admission": {"mode": "off"}},
}
SYSTEMS: Mapping[str, OwnSystem | VllmSystem] = {
    "default": OwnSystem(_SPLIT),
    "split": OwnSystem({**_SPLIT, "coordinator": {"local_prefill": "never"}}),
    "colocated": OwnSystem(_COLOCATED, all_cores=True),
    "colocated-plain": OwnSystem(_COLOCATED, targets=False, all_cores=True),
    "vllm": VllmSystem(pair=False),
    "vllm-pair": VllmSystem(pair=True),
}
OWN = tuple(name for name, system in SYSTEMS.items() if isinstance(system, OwnSystem))
FIXED_OWN = ("split", "colocated", "colocated-plain")
"""Systems of splitserve that never change how they work. The default must be no worse than the best of them."""


@dataclass(frozen=True)
class ServingOptions:
    """What all systems share. `environment`: vLLM's; `log_dir`: of all servers."""

    model: str
    slo: Slo
    environment: Path
    log_dir: Path

    @property
    def vocabulary(self) -> int:
        """Prompts are made of tokens below this."""
        return SIMULATED_VOCABULARY if self.model == SIMULATED_MODEL else HIGHEST_TOKEN + 1


@asynccontextmanager
async def served(name: str, options: ServingOptions) -> AsyncIterator[ServedAt]:
    """Starts a system and yields when it is ready; all of its processes end with the block. Raises RuntimeError."""
    system = SYSTEMS[name]
    if isinstance(system, OwnSystem):
        async with _own(name, system, options) as at:
            yield at
        return
    cores = available_cores()
    half = (len(cores) + 1) // 2
    model = str(resolve_model(options.model).path)
    layout = Layout(
        options.environment.resolve(), model, options.log_dir, (cores[:half], cores[half:] or cores)
    )
    if system.pair:
        async with running_pair(layout) as pair:
            prefill, decode = pair.servers
            yield ServedAt(decode.port, model, prefill.port)
    else:
        async with running_colocated(layout) as server:
            yield ServedAt(server.port, model)


@asynccontextmanager
async def _own(name: str, system: OwnSystem, options: ServingOptions) -> AsyncIterator[ServedAt]:
    settings = own_settings(system, options, len(available_cores()))
    async with running_up(settings, name, options.log_dir) as cluster:
        yield ServedAt(cluster.http_port, names_targets=system.targets)


def own_settings(system: OwnSystem, options: ServingOptions, cores: int) -> dict[str, Any]:
    """The cluster's settings file."""
    settings: dict[str, Any] = {"model": options.model, **system.settings}
    engine: dict[str, Any] = {"kind": SIMULATED_MODEL} if options.model == SIMULATED_MODEL else {}
    if system.all_cores:
        engine["threads"] = cores
    if engine:
        settings["engine"] = engine | settings.get("engine", {})
    if system.targets:
        coordinator = settings.get("coordinator", {})
        targets = {"tpot_slo_s": options.slo.tpot_s} | coordinator.get("admission", {})
        settings["coordinator"] = coordinator | {"admission": targets}
    return settings
