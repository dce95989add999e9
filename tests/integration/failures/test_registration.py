"""Workers that do not fit those that serve already (failure case 11), and reports that cannot be."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from engine.runner.simulated_runner import EOS_TOKEN_ID, VOCABULARY_SIZE, SimulatedRunner
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.client import AsyncClient
from splitserve.config.engine import EngineConfig
from splitserve.errors import FailedPreconditionError
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceStub
from tests.support.cluster.fake_cluster import expected, fake_cluster
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with running(Cluster(tmp_path_factory.mktemp("logs"))) as cluster:
        yield cluster


LAYOUTS: list[tuple[str, dict[str, Any], int]] = [
    ("model_fingerprint", {"model_fingerprint": "ab" * 32}, 256),
    ("dtype", {"dtype": "float32"}, 1024),
    ("block_size_tokens", {"block_size_tokens": 24}, 384),
    ("axis_order", {"axis_order": "kv,layer,head,token,dim"}, 256),
    ("num_layers", {"num_layers": 2}, 512),
    ("num_kv_heads", {"num_kv_heads": 2}, 512),
    ("head_dim", {"head_dim": 16}, 512),
    ("engine_version", {"engine_version": "0"}, 256),
]


@pytest.mark.parametrize(("field", "changed", "block_bytes"), LAYOUTS, ids=lambda value: str(value)[:24])
async def test_an_unequal_layout_is_refused_naming_the_field(
    cluster: Cluster, field: str, changed: dict[str, Any], block_bytes: int
) -> None:
    pool = SimulatedRunner(EngineConfig(kind="simulated", num_blocks=64)).pool_memory
    endpoint = TransferEndpoint("0" * 8 + "-0000" * 3 + "-" + "0" * 12, "nixl", b"m", pool).to_proto()
    for name, value in changed.items():
        setattr(endpoint.layout, name, value)
    endpoint.block_bytes = block_bytes
    request = registry_pb2.RegisterRequest(
        worker_id="odd",
        epoch=1,
        role=registry_pb2.ROLE_DECODE,
        address="127.0.0.1:1",
        model=registry_pb2.ServedModel(
            name="simulated",
            tokenizer_source="simulated",
            context_tokens=1024,
            vocabulary_size=VOCABULARY_SIZE,
            eos_token_ids=[EOS_TOKEN_ID],
        ),
        endpoint=endpoint,
        max_step_tokens=64,
        max_running_requests=4,
    )
    async with make_channel(cluster.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await RegistryServiceStub(channel).Register(request, timeout=PATIENCE_S)
    error = error_from_rpc(raised.value)
    assert isinstance(error, FailedPreconditionError)
    assert (error.reason, error.field) == ("LAYOUT_MISMATCH", field)
    await _still_serves(cluster)


async def test_workers_of_another_model_end_with_one_line(cluster: Cluster, short_smollm2: str) -> None:
    other = [
        "--engine",
        "torch",
        "--model",
        short_smollm2,
        "--served-model-name",
        "simulated",
        "--num-blocks",
        "64",
    ]
    odd = cluster.add_worker("decode", "odd-model", *other)
    assert await asyncio.to_thread(odd.process.wait, PATIENCE_S) != 0
    assert "model_fingerprint" in odd.log_tail()
    assert "Traceback" not in odd.log_tail()
    await _still_serves(cluster)


async def _still_serves(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:
        answer = await client.generate("hello", model="simulated", max_tokens=3)
        assert len(answer.token_ids) == 3
        info = await client.server_info()
        assert not any(worker.worker_id.startswith("odd") for worker in info.workers)
    await cluster.assert_no_leaks()


async def test_a_worker_that_reports_nonsense_is_passed_over_until_it_reports_sense() -> None:
    async with fake_cluster(prefill=2) as cluster:
        first, second = cluster.prefills
        first.load = {"latency": {"prefill": {"token_ms": math.nan}}}
        first.registry.report_now()
        registry = cluster.coordinator.registry
        while any(
            worker.worker_id == first.worker_id and worker.usable for worker in registry.snapshot().workers
        ):
            await registry.wait_change(registry.version)
        for _ in range(3):
            assert (await cluster.answer()).token_ids == expected(6)
        assert (len(first.calls.entries), len(second.calls.entries)) == (0, 3)
        first.load = {}
        await cluster.all_ready()
