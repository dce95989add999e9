"""A worker's side of the registry: register with one coordinator, then report until told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

import grpc

from splitserve.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    SplitserveError,
    UnauthenticatedError,
)
from splitserve.logs import log_event
from splitserve.part_security import UNSECURED, PartSecurity
from splitserve.rpc import error_from_rpc
from splitserve.v1 import kv_transfer_pb2, registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceStub

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
REGISTER_TIMEOUT_S = 5.0
REFUSALS = (FailedPreconditionError, InvalidArgumentError, PermissionDeniedError, UnauthenticatedError)
"""The coordinator does not want this worker as it is; trying again would not help."""
SOON_S = 0.1
"""Least time between two reports that tell of nothing but the prefix cache."""

PeersCallback = Callable[[str, list[kv_transfer_pb2.TransferEndpoint]], None]
EndedCallback = Callable[[list[str]], None]


class CacheReader(Protocol):
    """What one Report stream tells of the worker's prefix cache; made anew for each stream."""

    @property
    def has_more(self) -> bool:
        """Whether there is more to tell at once."""

    def next_events(self) -> registry_pb2.CacheEvents | None:
        """The next message; None: nothing has changed."""

    def resync(self) -> None:
        """The coordinator wants all of it anew."""


class RegistryClient:
    """Keeps one worker known to one coordinator. A lost coordinator is tried again for ever.

    `report` builds the next report; it must be cheap, for it runs on the event loop. `on_peers` gets
    (coordinator address, endpoints) whenever the coordinator sends its list, and an empty list when the
    coordinator is lost. `on_ended` gets the agent ids of writers whose processes have ended. `read_cache` begins to
    read the prefix cache's events from the start, for a new stream.
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
        security: PartSecurity = UNSECURED,
        read_cache: Callable[[], CacheReader] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._registration = registration
        self._report = report
        self._on_peers = on_peers
        self._on_ended = on_ended
        self._heartbeat_s = heartbeat_s
        self._security = security
        self._poke = asyncio.Event()
        self._registered = False
        self._read_cache = read_cache
        self._cache: CacheReader | None = None
        self._sent_s = 0.0
        self._soon: asyncio.TimerHandle | None = None

    def poke(self) -> None:
        """Sends a report now instead of at the next heartbeat."""
        self._poke.set()

    def poke_soon(self) -> None:
        """Sends a report now, or when the last one is `SOON_S` old."""
        if self._soon is None:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_at(self._sent_s + SOON_S, self._poke.set)

    async def run(self) -> None:
        """Runs until cancelled.

        Raises one of `REFUSALS` when the coordinator refuses the worker: trying again would not help.
        """
        retry_s = FIRST_RETRY_S
        lost = False
        while True:
            self._registered = False
            try:
                await self._session()
            except REFUSALS:
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
        metadata = self._security.metadata
        async with self._security.channel(self.coordinator, "coordinator") as channel:
            stub = RegistryServiceStub(channel)
            try:
                await stub.Register(self._registration, timeout=REGISTER_TIMEOUT_S, metadata=metadata)
                self._registered = True
                log_event("registry.registered", coordinator=self.coordinator)
                self._cache = self._read_cache() if self._read_cache else None
                call = stub.Report(self._reports(), metadata=metadata)
                try:
                    async for response in call:
                        self._on_peers(self.coordinator, list(response.peers))
                        if self._on_ended and response.ended_agent_ids:
                            self._on_ended(list(response.ended_agent_ids))
                        if self._cache is not None and response.resync_cache:
                            self._cache.resync()
                            self.poke()
                finally:
                    call.cancel()
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None

    async def _reports(self) -> AsyncIterator[registry_pb2.ReportRequest]:
        loop = asyncio.get_running_loop()
        while True:
            self._poke.clear()
            if self._soon is not None:
                self._soon.cancel()
                self._soon = None
            self._sent_s = loop.time()
            report = self._report()
            if self._cache is not None and (events := self._cache.next_events()) is not None:
                report.cache_events.CopyFrom(events)
            yield report
            if self._cache is not None and self._cache.has_more:
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._poke.wait(), self._heartbeat_s)
