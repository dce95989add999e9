"""The real tritonclient, in a process of its own (tests/support/clients/triton_client.py says why)."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


async def start_triton(address: str, job: dict[str, Any]) -> asyncio.subprocess.Process:
    """Begins a job against the coordinator there; what was seen of it comes on its standard output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.clients.triton_client"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(job | {"address": address}).encode())
    process.stdin.close()
    return process


async def triton(address: str, **job: Any) -> Any:
    """What tritonclient saw of a job."""
    process = await start_triton(address, job)
    output, _ = await process.communicate()
    return json.loads(output.splitlines()[-1])["seen"]
