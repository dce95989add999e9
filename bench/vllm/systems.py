"""splitserve's pair with engine vllm and one vLLM server, side by side: one serves while the other stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil

from bench.cluster import pin
from bench.goodput.wire import ServedAt
from bench.peers.vllm_server import Layout, running_colocated
from bench.server_process import ServerProcess, running_up

OWN, VLLM = "splitserve", "vllm"
DECODE_WORKER = "decode-0"


@dataclass(frozen=True)
class System:
    """A running system. `parts`: its processes whose CPU time is told apart, by name."""

    name: str
    at: ServedAt
    server: ServerProcess
    parts: Mapping[str, Sequence[psutil.Process]]

    def cpu_s(self) -> dict[str, float]:
        """The CPU time of each part since its start, user and system, seconds."""
        return {
            part: sum(sum(process.cpu_times()[:2]) for process in processes)
            for part, processes in self.parts.items()
        }


@asynccontextmanager
async def both_systems(layout: Layout) -> AsyncIterator[Sequence[System]]:
    """Runs both, each with its decode engine on the second of the layout's cores; all standing still at first."""
    alone = replace(layout, cores=(layout.cores[1], layout.cores[1]))
    async with running_up(own_settings(layout), OWN, layout.log_dir) as cluster:
        cluster.server.pause()
        async with running_colocated(alone) as server:
            for process in server.family()[1:] if layout.gpu_share is None else ():
                pin(process.pid, layout.cores[1][0])
            server.pause()
            try:
                yield (
                    System(
                        OWN, ServedAt(cluster.http_port), cluster.server, own_parts(cluster.server.family())
                    ),
                    System(VLLM, ServedAt(server.port, layout.model), server, vllm_parts(server.family())),
                )
            finally:
                server.resume()


def own_settings(layout: Layout) -> dict[str, Any]:
    """The cluster's file: one prefill and one decode worker, on one GPU or each on a core of its own where there are
    two."""
    on_gpu = {} if layout.gpu_share is None else {"device_memory_share": 2 * layout.gpu_share}
    engine = {"kind": "vllm", "dtype": layout.dtype, "context_tokens": layout.context_tokens, **on_gpu}
    return {
        "model": layout.model,
        "prefill": 1,
        "decode": 1,
        "replicas_per_gpu": 2,
        "engine": engine | {"max_running_requests": layout.max_streams},
        "coordinator": {"local_prefill": "never"},
    }


def own_parts(family: Sequence[psutil.Process]) -> dict[str, Sequence[psutil.Process]]:
    """`front`: the decode worker, `engine`: what it has started, `coordinator`."""
    front = _with_arguments(family, lambda words: DECODE_WORKER in words)
    coordinator = _with_arguments(family, lambda words: "coordinator" in words)
    return {"front": [front], "engine": front.children(recursive=True), "coordinator": [coordinator]}


def vllm_parts(family: Sequence[psutil.Process]) -> dict[str, Sequence[psutil.Process]]:
    """`front`: the API server, `engine`: what it has started."""
    front, *engine = family
    return {"front": [front], "engine": engine}


def _with_arguments(
    family: Sequence[psutil.Process], wanted: Callable[[Sequence[str]], bool]
) -> psutil.Process:
    return next(process for process in family if wanted(process.cmdline()))
