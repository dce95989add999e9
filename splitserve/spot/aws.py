"""Interruption notices of EC2 spot instances, two minutes ahead, by IMDSv2.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx2
from pydantic import BaseModel, ValidationError

from splitserve.spot.metadata import MetadataServer, malformed
from splitserve.spot.source import NoticeSource, left_until_s

URL = "http://169.254.169.254:80"
TOKEN_PATH, ACTION_PATH = "/latest/api/token", "/latest/meta-data/spot/instance-action"
TOKEN_S = 21_600
MAX_TOKEN_CHARACTERS = 1024


class _InstanceAction(BaseModel):
    """What the server says of an interruption."""

    action: str
    """terminate, stop or hibernate: the worker ends with each of them."""
    time: str


class AwsNotices(NoticeSource):
    """Asks for `spot/instance-action`. A rebalance recommendation is no notice: it takes nothing away."""

    name = "aws"

    def __init__(self, url: str = URL, wall_clock: Callable[[], float] = time.time) -> None:
        self._server = MetadataServer(url)
        self._wall_clock = wall_clock
        self._token = ""

    async def time_left_s(self) -> float | None:
        """See NoticeSource."""
        for _ in range(2):
            if not self._token:
                self._token = await self._new_token()
            headers = {"X-aws-ec2-metadata-token": self._token}
            status, text, _ = await self._server.ask("GET", ACTION_PATH, headers)
            if status != httpx2.codes.UNAUTHORIZED:
                break
            self._token = ""  # it has expired
        if status == httpx2.codes.NOT_FOUND:
            return None
        if status != httpx2.codes.OK:
            raise malformed(f"it answers {status} to GET {ACTION_PATH}")
        try:
            return left_until_s(_InstanceAction.model_validate_json(text).time, self._wall_clock())
        except ValidationError:
            raise malformed(f"{ACTION_PATH} has no action and time") from None

    async def close(self) -> None:
        """See NoticeSource."""
        await self._server.close()

    async def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        status, text, _ = await self._server.ask("PUT", TOKEN_PATH, headers)
        token = text.strip()
        well = 0 < len(token) <= MAX_TOKEN_CHARACTERS and token.isascii() and token.isprintable()
        if status != httpx2.codes.OK or not well:
            raise malformed(f"it answers {status} to PUT {TOKEN_PATH}, and gives no token")
        return token
