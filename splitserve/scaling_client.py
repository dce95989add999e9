"""Calls the scaling service of one coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import grpc

from splitserve.api_keys import key_metadata
from splitserve.part_security import UNSECURED, Metadata, PartSecurity
from splitserve.rpc import error_from_rpc
from splitserve.v1 import scaling_pb2
from splitserve.v1.scaling_pb2_grpc import ScalingServiceStub

DEFAULT_TIMEOUT_S = 2.0
DEFAULT_VALID_S = 30.0


class ScalingClient:
    """One coordinator, "host:port". Use it on one event loop; every call has a deadline of `timeout_s`.

    `api_key`: an admin's, where neither a certificate nor the cluster token opens the service.
    """

    def __init__(
        self,
        target: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        security: PartSecurity = UNSECURED,
        api_key: str | None = None,
    ) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._channel = security.channel(target, "coordinator")
        self._metadata: Metadata = (*security.metadata, *key_metadata(api_key))
        self._stub = ScalingServiceStub(self._channel)

    async def __aenter__(self) -> ScalingClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def signals(self, model: str = "") -> scaling_pb2.GetSignalsResponse:
        """What arrived, how long it took, how the workers are. Raises SplitserveError."""
        request = scaling_pb2.GetSignalsRequest(model=model)
        try:
            return await self._stub.GetSignals(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    async def apply_plan(
        self,
        *,
        standby: Iterable[str] = (),
        active: Iterable[str] = (),
        lend: bool = False,
        valid_s: float = DEFAULT_VALID_S,
    ) -> scaling_pb2.ApplyPlanResponse:
        """Replaces the plan in force, for `valid_s` seconds. Raises SplitserveError."""
        request = scaling_pb2.ApplyPlanRequest(
            standby_worker_ids=sorted(standby),
            active_worker_ids=sorted(active),
            lend_decode_to_prefill=lend,
        )
        request.valid_for.FromNanoseconds(round(valid_s * 1e9))
        try:
            return await self._stub.ApplyPlan(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()
