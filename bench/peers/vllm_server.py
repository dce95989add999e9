"""vLLM's prefill and decode servers as local processes: loopback only, one core each.

Options as vLLM 0.32 documents them: `--kv-transfer-config` with NixlConnector and `kv_buffer_device: cpu`, the
variables VLLM_CPU_* for cores and cache, VLLM_NIXL_SIDE_CHANNEL_* for the handshake of the two.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.peers.vllm_client import VllmPair, is_healthy
from splitserve.addresses import claim_port

HOST = "127.0.0.1"
READY_S = 900.0
"""The first start compiles the model, which takes minutes; later ones find it in the cache."""
READY_POLL_S = 0.5
SIDE_CHANNEL_PORTS = {"kv_producer": 5600, "kv_consumer": 5601}
"""Fixed, because vLLM compiles the model again for every new one."""
END_S = 20.0
LOG_TAIL_LINES = 30


@dataclass(frozen=True)
class Layout:
    """How the servers run. `whole_server`: API server and engine share the core; else only the compute is bound."""

    environment: Path
    model: str
    log_dir: Path
    cores: tuple[int, int]
    kv_gib: int = 1
    context_tokens: int = 4096
    eager: bool = False
    whole_server: bool = False


class VllmServer:
    """One API server with its engine. `role` is kv_producer (prefill) or kv_consumer (decode)."""

    def __init__(self, layout: Layout, role: str, core: int) -> None:
        self.port = claim_port(HOST, 0)
        self._log_path = layout.log_dir / f"vllm-{role}.log"
        pin = ("taskset", "--cpu-list", str(core)) if layout.whole_server else ()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*pin, *serve_command(layout, role, self.port)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | variables(layout, core, SIDE_CHANNEL_PORTS[role]),
                start_new_session=True,
            )

    async def wait_ready(self) -> None:
        """Returns when the server answers. Raises RuntimeError with the end of its log when it cannot."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while self._process.poll() is None:
                    if await asyncio.to_thread(is_healthy, HOST, self.port):
                        return
                    await asyncio.sleep(READY_POLL_S)
        lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise RuntimeError("\n".join([f"not ready: {self._log_path}", *lines]))

    def family(self) -> list[psutil.Process]:
        """The server and every process that it started."""
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]

    def stop(self) -> None:
        """Ends the server and all its children."""
        if self._process.poll() is not None:
            return
        family = self.family()[1:]
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


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
        for process in self.family():
            process.suspend()

    def resume(self) -> None:
        """Resumes them (SIGCONT)."""
        for process in self.family():
            process.resume()


@asynccontextmanager
async def running_pair(layout: Layout) -> AsyncIterator[RunningPair]:
    """Starts both servers; at the end both have ended."""
    servers: list[VllmServer] = []
    try:
        for role, core in zip(("kv_producer", "kv_consumer"), layout.cores, strict=True):
            servers.append(VllmServer(layout, role, core))
            # Sequentially: the second one reuses what the first has compiled.
            await servers[-1].wait_ready()
        prefill, decode = servers
        pair = RunningPair(VllmPair(HOST, prefill.port, decode.port, layout.model), servers)
        try:
            await asyncio.to_thread(pair.client.shake_hands)
            yield pair
        finally:
            with suppress(psutil.NoSuchProcess):
                pair.resume()
            pair.client.close()
    finally:
        for server in servers:
            server.stop()


def serve_command(layout: Layout, role: str, port: int) -> Sequence[str]:
    """The program with its options."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return [
        # Not the `vllm` program: it looks for a package named vllm, and this one is vllm-cpu.
        *(str(layout.environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", layout.model),
        *("--host", HOST, "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", str(layout.context_tokens)),
        *("--kv-transfer-config", json.dumps(transfer)),
        *(["--enforce-eager"] if layout.eager else []),
    ]


def variables(layout: Layout, core: int, side_channel_port: int) -> dict[str, str]:
    """The variables of one server's environment: all on loopback, nothing asked of the network."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": str(layout.kv_gib),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(layout.environment / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{layout.environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
