"""NVIDIA Dynamo's frontend with its engine mocks: one prefill and one decode worker, found through files."""

from __future__ import annotations

import asyncio
import http.client
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.front_door.processes import HOST, Cores, Process, program
from bench.peers.dynamo_setup import FOLDER
from splitserve.addresses import claim_port, join_address

READY_S = 60.0
POLL_S = 0.5
REQUEST_S = 10.0
SETTLE_S = 3.0
"""Wait after the first answer until the prefill worker is discovered, too, seconds."""


def is_installed() -> bool:
    """Whether `bench/peers/dynamo_setup.py` has run."""
    return (FOLDER / "bin" / "python").exists()


@asynccontextmanager
async def dynamo(model_path: Path, speedup: float, cores: Cores) -> AsyncIterator[Process]:
    """Serves chat completions of the model named like its path, where the frontend then finds the tokenizer.

    `speedup` 0: the mocks take no time at all.
    """
    model = str(model_path)
    python = str(FOLDER / "bin" / "python")
    port = claim_port(HOST, 0, "http_port")
    with tempfile.TemporaryDirectory() as folder:
        discovery = ["--discovery-backend", "file"]
        variables = {"DYN_FILE_KV": folder, "HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
        front = [python, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port), *discovery]
        mock = [python, "-m", "dynamo.mocker", "--model-path", model, "--model-name", model]
        mock += ["--speedup-ratio", str(speedup), *discovery]
        async with AsyncExitStack() as stack:
            process = await stack.enter_async_context(program(front, cores.front, variables))
            for mode in ("prefill", "decode"):
                command = [*mock, "--disaggregation-mode", mode]
                await stack.enter_async_context(program(command, cores.rest, variables))
            await _ready(port, model)
            yield Process(process.pid, "", join_address(HOST, port))


async def _ready(port: int, model: str) -> None:
    """Waits for a first complete answer. Raises TimeoutError."""
    async with asyncio.timeout(READY_S):
        while True:
            if await asyncio.to_thread(_answers, port, model):
                break
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(SETTLE_S)


def _answers(port: int, model: str) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_S)
    try:
        headers: dict[str, str] = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
