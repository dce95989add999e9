"""Client of a coordinator's scaling service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from splitserve.roles import ROLE_NUMBERS, RoleName
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials, Metadata
from splitserve.rpc.status import error_from_rpc
from splitserve.security.api_keys import key_metadata
from splitserve.v1 import registry_pb2, scaling_pb2
from splitserve.v1.scaling_pb2_grpc import ScalingServiceStub

DEFAULT_TIMEOUT_S = 2.0
DEFAULT_VALID_S = 30.0
MAX_DEMAND_S = 60.0
"""Longest wait of one call for demand."""
MAX_LEASE_S = 600.0
"""Longest lease. Coordinators refuse more than these two."""

T = TypeVar("T")


class ScalingClient:
    """The scaling service of one coordinator at "host:port". Use it on one event loop.

    Every call has a deadline of `timeout_s` seconds. `api_key`, an admin's, is needed where neither a certificate
    nor the cluster token grants access.
    """

    def __init__(
        self,
        target: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        security: ClusterCredentials = UNSECURED,
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
        """Arrivals, latencies and worker states. Raises SplitserveError."""
        request = scaling_pb2.GetSignalsRequest(model=model)
        return await self._answer(self._stub.GetSignals, request)

    async def demand(self, model: str, wait_s: float) -> bool:
        """Whether a request waits for workers: once one does, or after `wait_s` seconds, MAX_DEMAND_S at most.

        Raises SplitserveError."""
        request = scaling_pb2.GetSignalsRequest(model=model)
        request.until_demand.FromNanoseconds(round(wait_s * 1e9))
        signals = await self._answer(self._stub.GetSignals, request, wait_s)
        return any(model.in_progress.waiting_for_workers for model in signals.models)

    async def apply_plan(
        self,
        *,
        standby: Iterable[str] = (),
        active: Iterable[str] = (),
        valid_s: float = DEFAULT_VALID_S,
        lease_number: int = 0,
        decisions: Iterable[scaling_pb2.PoolDecision] = (),
        roles: Mapping[str, RoleName] = MappingProxyType({}),
        on_demand: Iterable[registry_pb2.ServedModel] = (),
    ) -> scaling_pb2.ApplyPlanResponse:
        """Replaces the current plan for `valid_s` seconds, under the lease of that fencing number; `decisions` say why,
        `roles` which roles workers are to take, by their ids, `on_demand` which models' workers are started when
        requests wait for them. Raises SplitserveError; FailedPreconditionError (STALE_LEASE) when another may scale."""
        request = scaling_pb2.ApplyPlanRequest(
            standby_worker_ids=sorted(standby),
            active_worker_ids=sorted(active),
            lease_number=lease_number,
            decisions=decisions,
            roles=[
                scaling_pb2.WorkerRole(worker_id=name, role=ROLE_NUMBERS[role])
                for name, role in sorted(roles.items())
            ],
            on_demand=on_demand,
        )
        request.valid_for.FromNanoseconds(round(valid_s * 1e9))
        return await self._answer(self._stub.ApplyPlan, request)

    async def acquire_lease(
        self, holder: str, *, valid_s: float, model: str = "", number: int = 0
    ) -> scaling_pb2.AcquireLeaseResponse:
        """Takes or extends the right to scale, or with `valid_s` 0 gives it up. Raises SplitserveError."""
        request = scaling_pb2.AcquireLeaseRequest(holder=holder, model=model, number=number)
        request.valid_for.FromNanoseconds(round(valid_s * 1e9))
        return await self._answer(self._stub.AcquireLease, request)

    async def report_ended(self, boots: Iterable[tuple[str, int]]) -> None:
        """Says that the processes of these boots, (worker id, epoch), have certainly ended. Raises SplitserveError."""
        named = [scaling_pb2.WorkerBoot(worker_id=name, epoch=epoch) for name, epoch in boots]
        request = scaling_pb2.ReportEndedRequest(boots=named)
        await self._answer(self._stub.ReportEnded, request)

    async def _answer(self, call: Callable[..., Awaitable[T]], request: Message, wait_s: float = 0.0) -> T:
        """The answer to one call, which the coordinator may hold back for `wait_s` seconds. Raises SplitserveError."""
        try:
            return await call(request, timeout=self._timeout_s + wait_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()
