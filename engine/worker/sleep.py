"""Sleep and wake: a worker out of rotation gives up the memory of its KV, and takes it back, as its coordinators ask.

It wakes up as a new boot: with a transport, hence an agent, and an epoch of its own. So what was issued before it
slept, a ticket, a completion or a write, is of an earlier boot, which every part refuses already, and peers come to
know the new one as they know any. Its process, weights, compiled steps and output streams stay.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from typing import Generic, Protocol, TypeAlias, TypeVar

from engine.core.engine import Engine
from engine.worker.build import EngineParts
from engine.worker.engine_thread import BOOT_S, Activity, EngineThread, KvConnector
from engine.worker.status import is_at_rest
from splitserve.errors import UnavailableError
from splitserve.logs import log_event
from splitserve.v1 import registry_pb2

C = TypeVar("C", bound=KvConnector)
Order: TypeAlias = registry_pb2.SleepOrder.ValueType
RETRY_S = 0.2
"""How soon a worker that is not at rest is looked at again: blocks in quarantine become free without a word."""


def new_epoch() -> int:
    """The number of a boot."""
    return secrets.randbits(63) + 1


class SleepOrders:
    """What each coordinator asks for with which the worker is registered. A value of a later version is no order."""

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}

    def follow(self, coordinator: str, order: Order) -> bool:
        """Takes a coordinator's word; unspecified where it has none, or is lost. Whether that is a change."""
        before = self._orders.get(coordinator, registry_pb2.SLEEP_ORDER_UNSPECIFIED)
        self._orders[coordinator] = order
        return before != order

    @property
    def wake(self) -> bool:
        """Whether one of them wants the worker awake."""
        return registry_pb2.SLEEP_ORDER_WAKE in self._orders.values()

    @property
    def sleep(self) -> bool:
        """Whether one of them wants it asleep, and none awake."""
        return not self.wake and registry_pb2.SLEEP_ORDER_SLEEP in self._orders.values()


class SleepHost(Protocol[C]):
    """The worker that sleeps."""

    epoch: int
    draining: bool
    engine: EngineThread[C]

    @property
    def parts(self) -> EngineParts:
        """The engine's parts."""
        ...

    def busy(self) -> bool:
        """Whether requests are in progress."""
        ...

    def reopen(self, epoch: int) -> None:
        """Opens transport and connector anew, for the boot `epoch`. Called on the engine thread."""

    async def register_anew(self) -> None:
        """Has every coordinator know what the worker is now: its epoch, its endpoint, and whether it sleeps."""

    def report_now(self) -> None:
        """Sends a load report to every coordinator."""


class Sleeper(Generic[C]):
    """Puts a worker to sleep and wakes it up. Used on the event loop."""

    def __init__(self, host: SleepHost[C], worker_id: str) -> None:
        self.asleep = False
        """Whether its memory is given up; until it is registered anew."""
        self.wake_s = 0.0
        """Seconds from the word until it was registered anew, the last time; 0: it has not slept."""
        self._host, self._worker_id = host, worker_id
        self._orders = SleepOrders()
        self._changed = asyncio.Event()
        self.closed = False
        """Whether it takes no requests: from when it waits to be at rest until it is registered anew."""
        self._refusal_logged = False

    def follow(self, coordinator: str, order: Order) -> None:
        """Takes a coordinator's word."""
        if self._orders.follow(coordinator, order):
            self._changed.set()

    async def run(self) -> None:
        """Follows the orders until cancelled. Raises UnavailableError (SLEEP_FAILED, WAKE_FAILED) for a worker that is
        neither asleep nor awake: it must end."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._host.draining:
                continue
            if self.asleep and self._orders.wake:
                await self._wake()
            elif not self.asleep and self._orders.sleep:
                await self._fall_asleep()

    async def _fall_asleep(self) -> None:
        if self._host.parts.sleep is None:
            if not self._refusal_logged:
                self._refusal_logged = True
                why = "its engine keeps its memory: see docs/autoscaling.md"
                log_event("worker.sleep_refused", level=logging.WARNING, worker_id=self._worker_id, why=why)
            return
        self.closed = True
        try:
            while self._orders.sleep and not self._host.draining:
                if not self._host.busy() and await self._give_up():
                    self.asleep = True
                    log_event("worker.asleep", worker_id=self._worker_id)
                    await self._host.register_anew()
                    self._host.report_now()
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            self.closed = self.asleep

    async def _give_up(self) -> bool:
        """Gives the memory up if the engine is at rest; whether it was."""
        sleep = self._host.parts.sleep
        assert sleep is not None

        def give_up(core: Engine, connector: C) -> bool:
            if not connector.at_rest or not is_at_rest(core.load()):
                return False
            connector.fall_asleep()
            sleep.give_up()
            return True

        try:
            return await self._host.engine.call(give_up, Activity("while it falls asleep", BOOT_S))
        except Exception as error:
            message = f"the worker cannot sleep: {type(error).__name__}: {error}"
            raise UnavailableError(message, reason="SLEEP_FAILED") from error

    async def _wake(self) -> None:
        sleep, epoch, began_s = self._host.parts.sleep, new_epoch(), time.monotonic()
        assert sleep is not None

        def take_back(_core: Engine, _connector: C) -> None:
            sleep.take_back()
            self._host.reopen(epoch)

        log_event("worker.waking", worker_id=self._worker_id)
        try:
            await self._host.engine.call(take_back, Activity("while it wakes up", BOOT_S))
        except Exception as error:
            message = f"the worker cannot wake up: {type(error).__name__}: {error}"
            raise UnavailableError(message, reason="WAKE_FAILED") from error
        self._host.epoch = epoch
        self.asleep = self.closed = False
        await self._host.register_anew()
        self.wake_s = time.monotonic() - began_s
        log_event("worker.awake", worker_id=self._worker_id, took_s=round(self.wake_s, 3))
        self._host.report_now()
