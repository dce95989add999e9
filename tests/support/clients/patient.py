"""Clients whose calls may take as long as tests wait: what a busy machine answers late is no failure."""

from __future__ import annotations

from typing import Any

from splitserve.client import AsyncClient
from splitserve.client.scaling_client import ScalingClient
from splitserve.v1 import inference_pb2, records_pb2
from tests.support.waiting import PATIENCE_S


class PatientClient(AsyncClient):
    """An AsyncClient; its calls end after PATIENCE_S where a test names no other time."""

    def __init__(self, target: str, *, timeout_s: float = PATIENCE_S, **options: Any) -> None:
        super().__init__(target, timeout_s=timeout_s, **options)

    async def models(self, *, timeout_s: float = PATIENCE_S) -> list[inference_pb2.ModelInfo]:
        return await super().models(timeout_s=timeout_s)

    async def server_info(self, *, timeout_s: float = PATIENCE_S) -> inference_pb2.GetServerInfoResponse:
        return await super().server_info(timeout_s=timeout_s)

    async def request_record(
        self, request_id: str, *, timeout_s: float = PATIENCE_S
    ) -> records_pb2.RequestRecord:
        return await super().request_record(request_id, timeout_s=timeout_s)

    async def request_records(
        self, *, slow: bool = False, failed: bool = False, limit: int = 20, timeout_s: float = PATIENCE_S
    ) -> list[records_pb2.RequestSummary]:
        return await super().request_records(slow=slow, failed=failed, limit=limit, timeout_s=timeout_s)

    async def wait_ready(self, timeout_s: float = PATIENCE_S, *, model: str = "") -> inference_pb2.ModelInfo:
        return await super().wait_ready(timeout_s, model=model)


class PatientScalingClient(ScalingClient):
    """A ScalingClient; its calls end after PATIENCE_S."""

    def __init__(self, target: str, timeout_s: float = PATIENCE_S, **options: Any) -> None:
        super().__init__(target, timeout_s, **options)
