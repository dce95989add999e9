"""Files that reload: only what was accepted as a whole comes into force, and what is refused is shown."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from splitserve.errors import ConfigError
from splitserve.metrics import reload_metrics
from splitserve.runtime import reload
from splitserve.runtime.reload import FileWatcher, ReloadedFiles
from tests.support.journal import settled


class Content:
    """A number in a file, in force."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value = 0
        self.file = ReloadedFiles("numbers", lambda: [path], self._load, self._adopt)

    def _load(self) -> int:
        return int(self.path.read_text())

    def _adopt(self, value: int) -> None:
        if value < 0:
            raise ConfigError("must not be negative", field="value")
        self.value = value


def put(path: Path, text: str) -> None:
    """Replaces the file in one go: no half of it is ever there."""
    replacement = path.with_suffix(".new")
    replacement.write_text(text)
    replacement.replace(path)


@pytest.fixture
def content(tmp_path: Path) -> Content:
    path = tmp_path / "number"
    path.write_text("1")
    made = Content(path)
    made.file.start()
    return made


@asynccontextmanager
async def followed(content: Content, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(reload, "POLL_INTERVAL_S", 0.01)
    task = asyncio.create_task(FileWatcher(content.file, None).follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_changes_come_into_force(content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    async with followed(content, monkeypatch):
        put(content.path, "2")
        await settled(lambda: content.value == 2)
        put(content.path, "3")
        await settled(lambda: content.value == 3)
    assert content.file.outcomes == {"adopted": 2, "rejected": 0}


async def test_whatever_is_wrong_keeps_the_old(
    content: Content, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    refused = 0
    async with followed(content, monkeypatch):
        for text in ("not a number", "-5", "9" * 5000, ""):
            put(content.path, text)
            refused += 1
            await settled(lambda: content.file.outcomes["rejected"] == refused)  # noqa: B023
            assert content.file.rejected
            assert content.value == 1
        content.path.unlink()
        await settled(lambda: content.file.outcomes["rejected"] == refused + 1)
        put(content.path, "7")
        await settled(lambda: content.value == 7)
        assert not content.file.rejected
    events = [record for record in caplog.records if record.getMessage() == "file.rejected"]
    assert len(events) == refused + 1
    assert all(event.levelno == logging.ERROR for event in events)
    assert "must not be negative" in str([event.__dict__["event_fields"] for event in events])


async def test_mended_permissions_are_noticed(content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change neither the time of the content nor its size."""
    monkeypatch.setattr(reload, "POLL_INTERVAL_S", 0.01)
    readable = False

    def load() -> int:
        if not readable:
            raise PermissionError(13, "Permission denied")
        return 5

    content.file._load = load
    task = asyncio.create_task(FileWatcher(content.file).follow())
    content.path.write_text("5")
    await settled(lambda: content.file.rejected)
    readable = True
    content.path.chmod(0o600)
    await settled(lambda: content.value == 5)
    task.cancel()


def test_a_file_that_is_still_being_written_waits(content: Content) -> None:
    assert not content.file.is_due()
    content.path.write_text("2")
    assert not content.file.is_due()  # seen for the first time
    content.path.write_text("22")
    assert not content.file.is_due()  # and it is another one already
    assert content.file.is_due()
    assert content.file.reload()
    assert not content.file.is_due()


def test_a_file_that_changes_while_it_is_read_is_read_again(content: Content) -> None:
    def load() -> int:
        value = int(content.path.read_text())
        content.path.write_text("333")
        return value

    content.file._load, before = load, content.file._load
    content.path.write_text("2")
    assert not content.file.reload()
    assert content.value == 1
    content.file._load = before
    assert not content.file.is_due()
    assert content.file.is_due()
    assert content.file.reload()
    assert content.value == 333


def test_the_first_reading_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Content(tmp_path / "nothing").file.start()


def test_metrics(content: Content) -> None:
    content.path.write_text("x")
    os.utime(content.path)
    assert not content.file.reload()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in reload_metrics([content.file])
        for sample in family.samples
    }
    assert samples["splitserve_file_reloads_total", "numbers", "rejected"] == 1
    assert samples["splitserve_file_reloads_total", "numbers", "adopted"] == 0
    assert samples["splitserve_file_rejected", "numbers"] == 1
    assert reload_metrics([]) == []
