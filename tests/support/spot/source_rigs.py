"""Each source of spot notices with its other end, for the contract suite."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from splitserve.spot.aws import AwsNotices
from splitserve.spot.azure import AzureNotices
from splitserve.spot.file import FileNotices
from splitserve.spot.gcp import GcpNotices
from splitserve.spot.source import NoticeSource
from tests.support.spot.metadata_server import Answer, FakeMetadataServer, metadata_server

NOTICE_S = 600.0
"""Much longer than a busy machine takes to hear of it."""


class Rig(ABC):
    """A source, and the hand that gives notices to it."""

    source: NoticeSource
    server: FakeMetadataServer | None = None
    says_time = True
    """Whether a notice has a time."""

    @abstractmethod
    def give(self, left_s: float) -> None:
        """From now on there is a notice of so many seconds from now."""

    @abstractmethod
    def garble(self, answer: bytes) -> None:
        """From now on the answer is this."""

    @abstractmethod
    def mend(self) -> None:
        """There is no notice, and the answer is right."""


class ServerRig(Rig):
    """One that asks a server. Subclasses answer as their cloud does."""

    def __init__(self) -> None:
        self.ends_wall_s: float | None = None
        self.garbled: bytes | None = None

    def give(self, left_s: float) -> None:
        self.ends_wall_s = time.time() + left_s

    def garble(self, answer: bytes) -> None:
        self.garbled = answer

    def mend(self) -> None:
        self.garbled = None

    @abstractmethod
    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """Answers a request."""


class AwsRig(ServerRig):
    """EC2, with IMDSv2 only: a token is asked for, and good for two requests."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens = 0
        self._uses = 0

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if (method, path) == ("PUT", "/latest/api/token"):
            assert int(headers["x-aws-ec2-metadata-token-ttl-seconds"]) <= 21_600
            self._tokens, self._uses = self._tokens + 1, 0
            return 200, {}, f"token-{self._tokens}".encode()
        assert (method, path) == ("GET", "/latest/meta-data/spot/instance-action")
        self._uses += 1
        if headers.get("x-aws-ec2-metadata-token") != f"token-{self._tokens}" or self._uses > 2:
            return 401, {}, b""
        if self.garbled is not None:
            return 200, {}, self.garbled
        if self.ends_wall_s is None:
            return 404, {}, b"<html>Not Found</html>"
        moment = datetime.fromtimestamp(self.ends_wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return 200, {}, json.dumps({"action": "terminate", "time": moment}).encode()


class GcpRig(ServerRig):
    """Compute Engine."""

    says_time = False

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        assert (method, path) == ("GET", "/computeMetadata/v1/instance/preempted")
        if headers.get("metadata-flavor") != "Google":
            return 403, {}, b""
        right = b"FALSE\n" if self.ends_wall_s is None else b"TRUE\n"
        return 200, {"Metadata-Flavor": "Google"}, right if self.garbled is None else self.garbled


class AzureRig(ServerRig):
    """Azure, with events of another machine and of another kind beside."""

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        assert method == "GET"
        if headers.get("metadata") != "true":
            return 400, {}, b""
        if path.startswith("/metadata/instance/compute/name?"):
            return 200, {}, b"vm-7"
        assert path.startswith("/metadata/scheduledevents?")
        if self.garbled is not None:
            return 200, {}, self.garbled
        soon = _http_time(time.time() + 1)
        events = [_event("Preempt", "vm-8", soon), _event("Reboot", "vm-7", soon)]
        if self.ends_wall_s is not None:
            events.append(_event("Preempt", "vm-7", _http_time(self.ends_wall_s)))
        return 200, {}, json.dumps({"DocumentIncarnation": 1, "Events": events}).encode()


def _http_time(wall_s: float) -> str:
    return format_datetime(datetime.fromtimestamp(wall_s, UTC).replace(microsecond=0), usegmt=True)


def _event(kind: str, machine: str, moment: str) -> dict[str, object]:
    return {
        "EventId": f"{kind}-{machine}",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [machine],
        "EventStatus": "Scheduled",
        "NotBefore": moment,
    }


class FileRig(Rig):
    """A file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "notice"
        self.source = FileNotices(self._path, NOTICE_S, since_wall_s=0.0)

    def give(self, left_s: float) -> None:
        self._path.write_text(datetime.fromtimestamp(time.time() + left_s, UTC).isoformat(), encoding="utf-8")

    def garble(self, answer: bytes) -> None:
        self._path.write_bytes(answer)

    def mend(self) -> None:
        self._path.unlink()


@asynccontextmanager
async def _served(rig: ServerRig, source: Callable[[str], NoticeSource]) -> AsyncIterator[Rig]:
    async with metadata_server(rig.answer) as server:
        rig.server, rig.source = server, source(server.url)
        try:
            yield rig
        finally:
            await rig.source.close()


@asynccontextmanager
async def _file_rig(folder: Path) -> AsyncIterator[Rig]:
    yield FileRig(folder)


RIGS: Mapping[str, Callable[[Path], AbstractAsyncContextManager[Rig]]] = {
    "aws": lambda _: _served(AwsRig(), AwsNotices),
    "gcp": lambda _: _served(GcpRig(), lambda url: GcpNotices(NOTICE_S, url)),
    "azure": lambda _: _served(AzureRig(), AzureNotices),
    "file": _file_rig,
}
