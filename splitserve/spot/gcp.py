"""Preemption of Compute Engine spot instances, 30 s ahead.

https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
"""

from __future__ import annotations

import httpx2

from splitserve.spot.metadata import MetadataServer, malformed
from splitserve.spot.source import NoticeSource

URL = "http://metadata.google.internal:80"
PATH = "/computeMetadata/v1/instance/preempted"
FLAVOR = {"Metadata-Flavor": "Google"}


class GcpNotices(NoticeSource):
    """Asks for `instance/preempted`. It says no time: `notice_s` from when it is seen first."""

    name = "gcp"

    def __init__(self, notice_s: float, url: str = URL) -> None:
        self._server = MetadataServer(url)
        self._notice_s = notice_s

    async def time_left_s(self) -> float | None:
        """See NoticeSource."""
        status, text, headers = await self._server.ask("GET", PATH, FLAVOR)
        answer = text.strip().upper()
        if status != httpx2.codes.OK or headers.get("Metadata-Flavor") != "Google":
            raise malformed(f"it answers {status} to GET {PATH}, or is not Google's")
        if answer not in ("TRUE", "FALSE"):
            raise malformed(f"{PATH} is {answer[:64]!r}, neither TRUE nor FALSE")
        return self._notice_s if answer == "TRUE" else None

    async def close(self) -> None:
        """See NoticeSource."""
        await self._server.close()
