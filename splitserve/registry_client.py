"""A worker's side of the registry: register with one coordinator, then report until told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc

from splitserve.errors import FailedPreconditionError, InvalidArgumentError, SplitserveError
from splitserve.logs import log_event
from splitserve.rpc import error_from_rpc, make_channel
from splitserve.v1 import kv_transfer_pb2, registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceStub

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
REGISTER_TIMEOUT_S = 5.0

PeersCallback = Callable[[str, list[kv_transfer_pb2.TransferEndpoint]], None]
EndedCallback = Callable[[list[str]], None]


class RegistryClient:
    """Keeps one worker known to one coordinator. A lost coordinator is tried again for ever.

    `report` builds the next report; it must be cheap, for it runs on the event loop. `on_peers` gets
    (coordinator address, endpoints) whenever the coordinator sends its list, and an empty list when the
    coordinator is lost. `on_ended` gets the agent ids of writers whose processes have ended.
    """

    def __init__(
        self,
        coordinator: str,
        registration: registry_pb2.RegisterRequest,
        *,
        report: Callable[[], registry_pb2.ReportRequest],
        on_peers: PeersCallback,
        heartbeat_s: float,
        on_ended: EndedCallback | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._registration = registration
        self._report = report
        self._on_peers = on_peers
        self._on_ended = on_ended
        self._heartbeat_s = heartbeat_s
        self._poke = asyncio.Event()
        self._registered = False

    def poke(self) -> None:
        """Sends a report now instead of at the next heartbeat."""
        self._poke.set()

    async def run(self) -> None:
        """Runs until cancelled.

        Raises FailedPreconditionError or InvalidArgumentError when the coordinator refuses the worker:
        trying again would not help.
        """
        retry_s = FIRST_RETRY_S
        lost = False
        while True:
            self._registered = False
            try:
                await self._session()
            except (FailedPreconditionError, InvalidArgumentError):
                raise
            except SplitserveError as error:
                if self._registered or not lost:  # once, not at every try
                    why = error.message
                    log_event("registry.lost", coordinator=self.coordinator, reason=error.reason, error=why)
            lost = True
            if self._registered:
                retry_s = FIRST_RETRY_S
                self._on_peers(self.coordinator, [])
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _session(self) -> None:
        async with make_channel(self.coordinator) as channel:
            stub = RegistryServiceStub(channel)
            try:
                await stub.Register(self._registration, timeout=REGISTER_TIMEOUT_S)
                self._registered = True
                log_event("registry.registered", coordinator=self.coordinator)
                call = stub.Report(self._reports())
                try:
                    async for response in call:
                        self._on_peers(self.coordinator, list(response.peers))
                        if self._on_ended and response.ended_agent_ids:
                            self._on_ended(list(response.ended_agent_ids))
                finally:
                    call.cancel()
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None

    async def _reports(self) -> AsyncIterator[registry_pb2.ReportRequest]:
        while True:
            self._poke.clear()
            yield self._report()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._poke.wait(), self._heartbeat_s)
