"""What a coordinator's process holds once it has served the embedded model's chats."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from splitserve.client import AsyncClient
from tests.support.cluster.fake_workers import FakeDecode, FakePrefill
from tests.support.cluster.processes import ServiceProcess
from tests.support.waiting import PATIENCE_S

RESIDENT_BYTES = 150e6


@pytest.mark.timeout(180)
async def test_a_coordinator_stays_small(smollm2: str, log_dir: Path) -> None:
    """A real process with the model's own tokenizer; the workers are scripted."""
    options = ["coordinator", "--grpc-port", "0", "--http-port", "0"]
    process = ServiceProcess("coordinator", options, log_dir)
    process.start()
    async with AsyncExitStack() as stack:
        stack.callback(process.terminate)
        ready = process.wait_event("coordinator.ready")
        target = f"127.0.0.1:{ready['port']}"
        served: dict[str, Any] = {"model": "m", "tokenizer_source": smollm2}
        served |= {"context_tokens": 2048, "vocabulary_size": 50_000}
        decode = FakeDecode("decode", target, **served)
        prefill = FakePrefill("prefill", target, lambda _agent: decode, **served)
        for worker in (decode, prefill):
            stack.push_async_callback(worker.stop)
            await worker.start()
            worker.let_go()
        client = await stack.enter_async_context(AsyncClient(target))
        await client.wait_ready()
        base_url = f"http://127.0.0.1:{ready['http_port']}/v1"
        web = await stack.enter_async_context(httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S))
        for number in range(40):
            turns = [{"role": "user", "content": f"Hello, {number} times. " * (1 + number)}]
            body = {"model": "m", "messages": turns, "max_tokens": 8}
            reply = await web.post("/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
        resident = psutil.Process(process.process.pid).memory_info().rss
        print(f"resident: {resident / 1e6:.1f} MB")
        assert resident < RESIDENT_BYTES
