"""vLLM's servers as local processes, loopback only: a prefill and a decode server, or one that does both.

Options as vLLM 0.32 documents them: `--kv-transfer-config` with NixlConnector and `kv_buffer_device: cpu`, the
variables VLLM_CPU_* for cores and cache, VLLM_NIXL_SIDE_CHANNEL_* for the handshake of the two.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.peers.vllm_client import VllmPair
from bench.server_process import HOST, ServerProcess
from splitserve.addresses import claim_port
from splitserve.core_list import format_cores

READY_S = 900.0
"""The first start compiles the model, which takes minutes; later ones find it in the cache."""
SIDE_CHANNEL_PORTS = {"kv_producer": 5600, "kv_consumer": 5601}
"""Fixed, because vLLM compiles the model again for every new one."""


@dataclass(frozen=True)
class Layout:
    """How the servers run. `whole_server`: API server and engine share the cores; else only the compute is bound.

    `cores`: those of the prefill and of the decode server.
    """

    environment: Path
    model: str
    log_dir: Path
    cores: tuple[Sequence[int], Sequence[int]]
    kv_gib: int = 1
    context_tokens: int = 4096
    dtype: str = "bfloat16"
    eager: bool = False
    whole_server: bool = False
    push: bool = False
    """The prefill server writes KV into the decode server's blocks; else the decode server reads."""
    max_streams: int = 64
    """Most sequences in a step of splitserve's workers beside it; vLLM's own bound is higher."""
    gpu_share: float | None = None
    """The share of a GPU's memory that each server takes; None: they compute on cpu."""


class VllmServer(ServerProcess):
    """One API server with its engine. `role` is kv_producer (prefill), kv_consumer (decode) or None (both)."""

    def __init__(self, layout: Layout, role: str | None, cores: Sequence[int]) -> None:
        self.port = claim_port(HOST, 0)
        pin = ("taskset", "--cpu-list", format_cores(cores)) if layout.whole_server else ()
        super().__init__(
            [*pin, *serve_command(layout, role, self.port)],
            layout.log_dir / f"vllm-{role or 'colocated'}.log",
            variables(layout, cores, role),
        )

    async def wait_healthy(self) -> None:
        """Returns when the server answers. Raises RuntimeError with the end of its log when it cannot."""
        await self.wait_ready(self.port, "/health", READY_S)


@dataclass(frozen=True)
class RunningPair:
    """Both servers and their client."""

    client: VllmPair
    servers: Sequence[VllmServer]

    def family(self) -> list[psutil.Process]:
        """All processes of both servers."""
        return [process for server in self.servers for process in server.family()]

    def pause(self) -> None:
        """Pauses all processes (SIGSTOP): their NIXL threads use the cores even when idle."""
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        """Resumes all processes (SIGCONT)."""
        for server in self.servers:
            server.resume()


@asynccontextmanager
async def running_pair(layout: Layout) -> AsyncIterator[RunningPair]:
    """Starts both servers; at the end both have ended."""
    servers: list[VllmServer] = []
    try:
        for role, cores in zip(SIDE_CHANNEL_PORTS, layout.cores, strict=True):
            servers.append(VllmServer(layout, role, cores))
            # Sequentially: the second one reuses what the first has compiled.
            await servers[-1].wait_healthy()
        prefill, decode = servers
        pair = RunningPair(VllmPair(HOST, prefill.port, decode.port, layout.model, _peer(layout)), servers)
        try:
            await asyncio.to_thread(pair.client.shake_hands)
            yield pair
        finally:
            pair.resume()
            pair.client.close()
    finally:
        for server in servers:
            server.stop()


@asynccontextmanager
async def running_colocated(layout: Layout) -> AsyncIterator[VllmServer]:
    """Starts one server on the cores of both; at the end it has ended."""
    server = VllmServer(layout, None, sorted({*layout.cores[0], *layout.cores[1]}))
    try:
        await server.wait_healthy()
        yield server
    finally:
        server.stop()


def serve_command(layout: Layout, role: str | None, port: int) -> Sequence[str]:
    """The program with its options."""
    transfer = {
        "kv_connector": "NixlPushConnector" if layout.push else "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu" if layout.gpu_share is None else "cuda",
        **({"engine_id": role} if layout.push else {}),
    }
    return [
        # Not the `vllm` program: it looks for a package named vllm, and this one is vllm-cpu.
        *(str(layout.environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", layout.model),
        *("--host", HOST, "--port", str(port)),
        *("--dtype", layout.dtype, "--max-model-len", str(layout.context_tokens)),
        *(["--kv-transfer-config", json.dumps(transfer)] if role else []),
        *(["--enforce-eager"] if layout.eager else []),
        *(["--gpu-memory-utilization", str(layout.gpu_share)] if layout.gpu_share is not None else []),
    ]


def _peer(layout: Layout) -> dict[str, Any] | None:
    """What a decode server is told of the prefill server that will write; None where it reads."""
    role = "kv_producer"
    where = {"remote_engine_id": role, "remote_host": HOST, "remote_port": SIDE_CHANNEL_PORTS[role]}
    return {**where, "tp_size": 1, "remote_block_ids": []} if layout.push else None


def variables(layout: Layout, cores: Sequence[int], role: str | None) -> dict[str, str]:
    """The variables of one server's environment: all on loopback, nothing asked of the network."""
    side_channel = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORTS.get(role or "")),
    }
    return {
        "VLLM_CPU_OMP_THREADS_BIND": format_cores(cores),
        "VLLM_CPU_KVCACHE_SPACE": str(layout.kv_gib),
        **(side_channel if role else {}),
        "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(layout.environment / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{layout.environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
