"""Worker side of the registry: registers with one coordinator, then streams reports until cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

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
from splitserve.runtime.cancellation import is_being_cancelled, raise_if_cancelled
from splitserve.v1 import kv_transfer_pb2, registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceStub

if TYPE_CHECKING:
    from splitserve.v1.registry_pb2_grpc import RegistryServiceAsyncStub

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
LAST_REFUSED_RETRY_S = 15.0
"""A coordinator that refuses the worker is asked again this often: its settings, or its token, may be put right."""
REGISTER_TIMEOUT_S = 5.0
REFUSALS = (FailedPreconditionError, InvalidArgumentError, PermissionDeniedError, UnauthenticatedError)
"""Refusals of a registration: retrying helps only once somebody has changed something."""
MIN_CACHE_REPORT_INTERVAL_S = 0.1
"""Shortest time between two reports that are sent only for prefix cache events."""

PeersCallback = Callable[[str, list[kv_transfer_pb2.TransferEndpoint]], None]
EndedCallback = Callable[[list[str]], None]
LeaningCallback = Callable[[str, registry_pb2.Pool.ValueType], None]
SleepCallback = Callable[[str, registry_pb2.SleepOrder.ValueType], None]


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

    def __init__(self, coordinators: Sequence[str], on_leader: Callable[[], None] = lambda: None) -> None:
        """`on_leader` is called when `leader` has changed."""
        self.refusals = dict.fromkeys(coordinators, 0)
        """Refused registrations since the start, by coordinator."""
        self.registered = dict.fromkeys(coordinators, False)
        """Whether the worker is registered now, by coordinator."""
        self.leader = ""
        """Of the coordinators with which the worker is registered now, the least id; empty without any. That one moves
        the worker's leaning: coordinators do not know each other, but all workers of theirs name the same one."""
        self._ids: dict[str, str] = {}
        self._on_leader = on_leader
        self._ever_accepted = False

    def accepted(self, coordinator: str, coordinator_id: str = "") -> None:
        """A registration succeeded, with the coordinator of that id."""
        self._ever_accepted = self.registered[coordinator] = True
        self._ids[coordinator] = coordinator_id
        self._elect()

    def refused(self, coordinator: str) -> bool:
        """A registration was refused. True if that is the end of the worker: none of its coordinators has ever accepted
        it, and all of them have refused it."""
        self.refusals[coordinator] += 1
        return not self._ever_accepted and all(self.refusals.values())

    def lost(self, coordinator: str) -> None:
        """The worker is not registered there any more, or still not."""
        self.registered[coordinator] = False
        self._ids.pop(coordinator, None)
        self._elect()

    def leads(self, coordinator: str) -> bool:
        """Whether a coordinator with which the worker is registered is the one that moves its leaning."""
        return self._ids.get(coordinator) == self.leader

    def _elect(self) -> None:
        before, self.leader = self.leader, min(self._ids.values(), default="")
        if self.leader != before:
            self._on_leader()


class RegistryClient:
    """Keeps one worker registered with one coordinator. Retries a lost coordinator indefinitely, and one that refuses
    the worker as well unless that ends the worker, see `RegistrationStatus`.

    `report` builds the next report; it runs on the event loop and must be cheap. `on_peers` is called with
    (coordinator address, endpoints) whenever the coordinator sends its list, and with an empty list when the
    coordinator is lost. `on_ended` is called with the agent ids of writers whose processes have ended, `on_leaning`
    with (coordinator address, pool) whenever the coordinator asks for a leaning, `on_sleep` with (coordinator address,
    order) at each of its messages, and without an order when it is lost. `read_cache` creates the prefix cache reader
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
        on_leaning: LeaningCallback | None = None,
        on_sleep: SleepCallback | None = None,
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
        self._on_leaning = on_leaning
        self._on_sleep = on_sleep
        self._stub: RegistryServiceAsyncStub | None = None
        self._heartbeat_s = heartbeat_s
        self._security = security
        self._wake = asyncio.Event()
        self._replaced = asyncio.Event()
        """Whether the present boot has been registered in place of the one before, as far as that could be done."""
        self._registered, self._epoch = False, registration.epoch
        self._read_cache = read_cache
        self._cache: CacheReader | None = None
        self._sent_s = 0.0
        self._report_timer: asyncio.TimerHandle | None = None

    def renew(self, registration: registry_pb2.RegisterRequest) -> Awaitable[None]:
        """What the worker says of itself from now on. Await it: where the worker is registered, another boot of it
        takes the place of the one before; a coordinator that cannot be reached learns of it when it can."""
        before, self._registration = self._registration, registration
        is_new = registration.epoch != before.epoch
        if is_new:
            self._replaced.clear()
        return self._replace_boot(registration, is_new)

    async def _replace_boot(self, registration: registry_pb2.RegisterRequest, is_new: bool) -> None:
        try:
            if is_new and self._stub is not None:
                metadata = self._security.metadata
                await self._stub.Register(registration, timeout=REGISTER_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError:
            return  # the session ends, and the next one registers it
        except asyncio.CancelledError:  # so does gRPC where the session has ended meanwhile
            if is_being_cancelled():
                raise
        finally:
            self._replaced.set()
            self._wake.set()

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
            self._begin_boot()
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
                if not self._is_another_boot and (
                    self._registered or not lost
                ):  # once per loss, not on every retry
                    self._log_lost(error, logging.INFO)
            except Exception as error:  # what one coordinator sends must not end the worker for the others
                log_exception("registry.failed", error, coordinator=self.coordinator)
            raise_if_cancelled()
            lost = True
            self._status.lost(self.coordinator)
            if self._registered:
                retry_s = FIRST_RETRY_S
                self._on_peers(self.coordinator, [])
            if self._is_another_boot:
                continue  # another boot of the worker registers at once; what was asked of this one still holds
            if self._on_sleep:
                self._on_sleep(self.coordinator, registry_pb2.SLEEP_ORDER_UNSPECIFIED)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, last_retry_s)

    def _begin_boot(self) -> registry_pb2.RegisterRequest:
        self._registered, self._epoch = False, self._registration.epoch
        return self._registration

    @property
    def _is_another_boot(self) -> bool:
        """Whether the worker is another boot now than the one that was registered last, or was going to be."""
        return self._registration.epoch != self._epoch

    def _log_lost(self, error: SplitserveError, level: int) -> None:
        event = "registry.refused" if level == logging.ERROR else "registry.lost"
        where, why = self.coordinator, error.message
        log_event(event, level=level, coordinator=where, reason=error.reason, error=why)

    async def _session(self) -> None:
        """Registers and reports over one connection, boot after boot: another one may bring a renewed certificate, and
        the coordinator knows the boot before by the certificate that it came with."""
        async with self._security.channel(self.coordinator, "coordinator") as channel:
            stub = RegistryServiceStub(channel)
            while True:
                registration = self._begin_boot()
                try:
                    await self._register_and_report(stub, registration)
                except SplitserveError:
                    if not (self._registered and self._is_another_boot):
                        raise
                if not self._is_another_boot:
                    return
                self._on_peers(self.coordinator, [])

    async def _register_and_report(
        self, stub: RegistryServiceAsyncStub, registration: registry_pb2.RegisterRequest
    ) -> None:
        metadata = self._security.metadata
        try:
            terms = await stub.Register(registration, timeout=REGISTER_TIMEOUT_S, metadata=metadata)
            self._stub, self._registered = stub, True
            self._status.accepted(self.coordinator, terms.coordinator_id)
            log_event("registry.registered", coordinator=self.coordinator)
            self._cache = self._read_cache() if self._read_cache else None
            call = stub.Report(self._reports(registration.epoch), metadata=metadata)
            try:
                async for response in call:
                    self._on_response(response)
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            self._stub = None

    def _on_response(self, response: registry_pb2.ReportResponse) -> None:
        self._on_peers(self.coordinator, list(response.peers))
        if self._on_ended and response.ended_agent_ids:
            self._on_ended(list(response.ended_agent_ids))
        if self._on_leaning and response.leaning:
            self._on_leaning(self.coordinator, response.leaning)
        if self._on_sleep:
            self._on_sleep(self.coordinator, response.sleep)
        if self._cache is not None and response.resync_cache:
            self._cache.resync()
            self.report_now()

    async def _reports(self, epoch: int) -> AsyncIterator[registry_pb2.ReportRequest]:
        """The reports of one boot; they end once the next one has taken its place."""
        loop = asyncio.get_running_loop()
        while self._registration.epoch == epoch:
            self._wake.clear()
            if self._report_timer is not None:
                self._report_timer.cancel()
                self._report_timer = None
            self._sent_s = loop.time()
            report = self._report()
            report.led_elsewhere = not self._status.leads(self.coordinator)
            if self._cache is not None and (events := self._cache.next_events()) is not None:
                report.cache_events.CopyFrom(events)
            yield report
            if self._cache is not None and self._cache.has_more:
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._heartbeat_s)
        await self._replaced.wait()
