"""A pinned worker that trades prefixes: what it registers as, and which requests its other service refuses."""

from __future__ import annotations

from typing import Any

import pytest

from engine.worker.messages import check_wanted
from engine.worker.process import WorkerProcess
from engine.worker.role import WorkerRole
from neutral_worker.composed_role import DECODE, PREFILL
from neutral_worker.neutral_connector import NeutralConnector
from neutral_worker.trading_worker import TradingRole
from prefill_worker.service import PrefillRole
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import FailedPreconditionError
from splitserve.v1 import decode_pb2, prefill_pb2, registry_pb2

pytestmark = pytest.mark.timeout(60)


def role_of(pool: registry_pb2.Pool.ValueType) -> TradingRole:
    made: list[TradingRole] = []

    def make(worker: WorkerProcess[NeutralConnector]) -> TradingRole:
        made.append(TradingRole(worker, pool))
        return made[0]

    WorkerProcess(WorkerConfig(worker_id="w", model="simulated"), make)
    return made[0]


async def test_it_is_a_worker_of_its_pool_with_the_certificate_of_its_pool() -> None:
    for pool, certificate in ((PREFILL, "prefill"), (DECODE, "decode")):
        role = role_of(pool)
        assert (role.pool, role.certificate) == (pool, certificate)
        assert (role.neutral, role.trades_prefixes) == (False, True)
    assert not PrefillRole.trades_prefixes
    assert not WorkerRole.trades_prefixes


async def test_the_service_of_the_other_pool_is_for_prefixes_alone() -> None:
    assert [
        role_of(PREFILL)._prefill._service._prefixes_only,
        role_of(PREFILL)._decode._service._prefixes_only,
    ] == [
        False,
        True,
    ]
    assert [
        role_of(DECODE)._prefill._service._prefixes_only,
        role_of(DECODE)._decode._service._prefixes_only,
    ] == [
        True,
        False,
    ]
    for message in (prefill_pb2.PrefillRequest, decode_pb2.ReserveRequest):
        check_wanted(message(), False)
        check_wanted(message(prefix_only=True), True)
        with pytest.raises(FailedPreconditionError) as refused:
            check_wanted(message(), True)
        assert (refused.value.reason, refused.value.field) == ("PREFIXES_ONLY", "prefix_only")


def test_off_by_default_and_where_the_engine_cannot() -> None:
    def trades(**settings: Any) -> bool:
        return WorkerConfig(worker_id="w", model="simulated", **settings).trades_prefixes

    assert not trades()
    assert trades(peer_fetch="on")
    assert not trades(peer_fetch="on", engine=EngineConfig(prefix_cache=False))
    assert not trades(peer_fetch="on", engine=EngineConfig(kind="vllm"))
