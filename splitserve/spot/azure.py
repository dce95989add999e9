"""Eviction of Azure spot machines, 30 s ahead or more, by Scheduled Events.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import httpx2
from pydantic import BaseModel, Field, ValidationError

from splitserve.spot.metadata import MetadataServer, malformed
from splitserve.spot.source import NoticeSource, left_until_s

URL = "http://169.254.169.254:80"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}
_MACHINE = re.compile(r"[\w.-]{1,128}", re.ASCII)


class _Event(BaseModel):
    """One event. It may be about other machines of the same scale set."""

    kind: str = Field(alias="EventType")
    resources: list[str] = Field(alias="Resources")
    not_before: str = Field(alias="NotBefore", default="")
    """Empty once the event has begun."""


class _ScheduledEvents(BaseModel):
    """The answer."""

    events: list[_Event] = Field(alias="Events")


class AzureNotices(NoticeSource):
    """Asks for events of the type Preempt that name this machine."""

    name = "azure"

    def __init__(self, url: str = URL, wall_clock: Callable[[], float] = time.time) -> None:
        self._server = MetadataServer(url)
        self._wall_clock = wall_clock
        self._machine = ""

    async def time_left_s(self) -> float | None:
        """See NoticeSource."""
        if not self._machine:
            name = (await self._get(NAME_PATH)).strip()
            if not _MACHINE.fullmatch(name):
                raise malformed(f"{NAME_PATH} is no machine's name")
            self._machine = name
        try:
            found = _ScheduledEvents.model_validate_json(await self._get(EVENTS_PATH))
        except ValidationError:
            raise malformed(f"{EVENTS_PATH} has no list of events") from None
        ours = [one for one in found.events if one.kind == "Preempt" and self._machine in one.resources]
        now = self._wall_clock()
        return min(
            (left_until_s(one.not_before, now) if one.not_before else 0.0 for one in ours), default=None
        )

    async def close(self) -> None:
        """See NoticeSource."""
        await self._server.close()

    async def _get(self, path: str) -> str:
        status, text, _ = await self._server.ask("GET", path, HEADERS)
        if status != httpx2.codes.OK:
            raise malformed(f"it answers {status} to GET {path}")
        return text
