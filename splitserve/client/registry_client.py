"""Worker side of the registry: registers with one coordinator, then streams reports until cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
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
from splitserve.logs import log_event, log_exception
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials
from splitserve.rpc.status import error_from_rpc
from splitserve.runtime.cancellation import raise_if_cancelled
from splitserve.v1 import kv_transfer_pb2, registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceStub

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
LAST_REFUSED_RETRY_S = 15.0
"""Longest time between two registrations at a coordinator that refuses the worker: an operator may mend the
settings."""
REGISTER_TIMEOUT_S = 5.0
REFUSALS = (FailedPreconditionError, InvalidArgumentError, PermissionDeniedError, UnauthenticatedError)
"""Refusals of a registration: retrying helps only once somebody has changed something."""
MIN_CACHE_REPORT_INTERVAL_S = 0.1
"""Shortest time between two reports that are sent only for prefix cache events."""

PeersCallback = Callable[[str, list[kv_transfer_pb2.TransferEndpoint]], None]
EndedCallback = Callable[[list[str]], None]
RoleCallback = Callable[[str, registry_pb2.Role.ValueType], None]


class CacheReader(Protocol):
    """Source of the prefix cache events of one Report stream; a new one is created for each stream."""

    @property
    def has_more(self) -> bool:
        """Whether more events are pending."""

    def next_events(self) -> registry_pb2.CacheEvents | None:
        """The next events to send; None if nothing has changed."""

    def resync(self) -> None:
        """Starts over with the whole cache, as requested by the coordinator."""


class RegistrationStatus:
    """What the registry clients of one worker know of each other. Label values are the configured coordinators."""

    def __init__(self, coordinators: Sequence[str]) -> None:
        self.refusals = dict.fromkeys(coordinators, 0)
        """Refused registrations since the start, by coordinator."""
        self.registered = dict.fromkeys(coordinators, False)
        """Whether the worker is registered now, by coordinator."""
        self._ever_accepted = False

    def accepted(self, coordinator: str) -> None:
        """A registration succeeded."""
        self._ever_accepted = self.registered[coordinator] = True

    def refused(self, coordinator: str) -> bool:
        """A registration was refused. Returns whether the worker must end: none of its coordinators has ever accepted
        it, and all have refused it."""
        self.refusals[coordinator] += 1
        return not self._ever_accepted and all(self.refusals.values())

    def lost(self, coordinator: str) -> None:
        """The worker is not registered at this coordinator now."""
        self.registered[coordinator] = False


class RegistryClient:
    """Keeps one worker registered with one coordinator.

    Retries without end, also after a refusal, unless the refusal ends the worker; see `RegistrationStatus.refused`.

    `report` builds the next report; it runs on the event loop and must be cheap. `on_peers` is called with
    (coordinator address, endpoints) whenever the coordinator sends its list, and with an empty list when the
    coordinator is lost. `on_ended` is called with the agent ids of writers whose processes have ended, `on_role`
    with (coordinator address, role) whenever the coordinator asks for one. `read_cache` creates the prefix cache reader
    of a new stream.
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
        on_role: RoleCallback | None = None,
        security: ClusterCredentials = UNSECURED,
        read_cache: Callable[[], CacheReader] | None = None,
        status: RegistrationStatus | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._status = status or RegistrationStatus([coordinator])
        self._registration = registration
        self._report = report
        self._on_peers = on_peers
        self._on_ended = on_ended
        self._on_role = on_role
        self._heartbeat_s = heartbeat_s
        self._security = security
        self._wake = asyncio.Event()
        self._registered = False
        self._read_cache = read_cache
        self._cache: CacheReader | None = None
        self._sent_s = 0.0
        self._report_timer: asyncio.TimerHandle | None = None

    def report_now(self) -> None:
        """Sends a report now instead of at the next heartbeat."""
        self._wake.set()

    def report_soon(self) -> None:
        """Sends a report as soon as the last one is `MIN_CACHE_REPORT_INTERVAL_S` old."""
        if self._report_timer is None:
            loop = asyncio.get_running_loop()
            self._report_timer = loop.call_at(self._sent_s + MIN_CACHE_REPORT_INTERVAL_S, self._wake.set)

    async def run(self) -> None:
        """Runs until cancelled. Raises one of `REFUSALS` if no coordinator accepts the worker."""
        retry_s = FIRST_RETRY_S
        lost = False
        while True:
            self._registered = False
            last_retry_s = LAST_RETRY_S
            try:
                await self._session()
            except REFUSALS as error:
                if not self._registered:
                    if self._status.refused(self.coordinator):
                        raise
                    last_retry_s = LAST_REFUSED_RETRY_S
                self._log_lost(error, logging.ERROR)
            except SplitserveError as error:
                if self._registered or not lost:  # once per loss, not on every retry
                    self._log_lost(error, logging.INFO)
            except Exception as error:  # what one coordinator sends must not end the worker for the others
                log_exception("registry.failed", error, coordinator=self.coordinator)
            raise_if_cancelled()
            lost = True
            self._status.lost(self.coordinator)
            if self._registered:
                retry_s = FIRST_RETRY_S
                self._on_peers(self.coordinator, [])
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, last_retry_s)

    def _log_lost(self, error: SplitserveError, level: int) -> None:
        event = "registry.refused" if level == logging.ERROR else "registry.lost"
        where, why = self.coordinator, error.message
        log_event(event, level=level, coordinator=where, reason=error.reason, error=why)

    async def _session(self) -> None:
        """Registers and reports over one connection. Each session makes a new one, which reads renewed certificates."""
        metadata = self._security.metadata
        async with self._security.channel(self.coordinator, "coordinator") as channel:
            stub = RegistryServiceStub(channel)
            try:
                await stub.Register(self._registration, timeout=REGISTER_TIMEOUT_S, metadata=metadata)
                self._registered = True
                self._status.accepted(self.coordinator)
                log_event("registry.registered", coordinator=self.coordinator)
                self._cache = self._read_cache() if self._read_cache else None
                call = stub.Report(self._reports(), metadata=metadata)
                try:
                    async for response in call:
                        self._on_response(response)
                finally:
                    call.cancel()
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None

    def _on_response(self, response: registry_pb2.ReportResponse) -> None:
        self._on_peers(self.coordinator, list(response.peers))
        if self._on_ended and response.ended_agent_ids:
            self._on_ended(list(response.ended_agent_ids))
        if self._on_role and response.role:
            self._on_role(self.coordinator, response.role)
        if self._cache is not None and response.resync_cache:
            self._cache.resync()
            self.report_now()

    async def _reports(self) -> AsyncIterator[registry_pb2.ReportRequest]:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            if self._report_timer is not None:
                self._report_timer.cancel()
                self._report_timer = None
            self._sent_s = loop.time()
            report = self._report()
            if self._cache is not None and (events := self._cache.next_events()) is not None:
                report.cache_events.CopyFrom(events)
            yield report
            if self._cache is not None and self._cache.has_more:
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._heartbeat_s)
