"""Spot notices: a notice is heard once, and a file that cannot be read ends nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from splitserve.errors import InvalidArgumentError, UnavailableError
from tests.support.journal import Journal
from tests.support.waiting import SLACK_S
from worker import preemption
from worker.preemption import NoticeFile, SpotNotice, follow_notices

pytestmark = pytest.mark.timeout(10)
NOTICE_S = 20.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "POLL_S", 0.05)


@asynccontextmanager
async def following(
    file: NoticeFile | None, known: SpotNotice | None = None
) -> AsyncIterator[Journal[SpotNotice]]:
    """What is heard, as it comes."""
    notices: Journal[SpotNotice] = Journal()
    watch = asyncio.create_task(follow_notices(file, NOTICE_S, notices.add, known))
    await asyncio.sleep(0)  # it has begun
    try:
        yield notices
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert watch.cancelled()


def write(path: Path, left_s: float) -> None:
    path.write_text(datetime.fromtimestamp(time.time() + left_s, UTC).isoformat(), encoding="utf-8")


async def test_no_notice_then_one(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    file = NoticeFile(path, NOTICE_S)
    assert await file.time_left_s() is None
    write(path, 600.0)
    left_s = await file.time_left_s()
    assert left_s is not None
    assert 600.0 - SLACK_S < left_s <= 600.0


async def test_a_time_that_has_passed_is_zero_and_a_far_one_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    clock = 100.0
    file = NoticeFile(path, NOTICE_S, lambda: clock)
    path.write_text("1970-01-01T00:03:00", encoding="utf-8")
    clock = 200.0
    assert await file.time_left_s() == 0.0
    write(path, 10 * 86_400.0)
    assert await file.time_left_s() == 86_400.0


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"[[[", b"soon", b"2026-99-99T00:00:00Z", b"9" * 100_000]
)
async def test_text_that_is_no_time_is_a_typed_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notice"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError):
        await NoticeFile(path, NOTICE_S).time_left_s()


async def test_failures_are_logged_once_and_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notice"
    path.write_text("soon", encoding="utf-8")
    with caplog.at_level("INFO"):
        async with following(NoticeFile(path, NOTICE_S)) as notices:
            await asyncio.sleep(6 * preemption.POLL_S)
            write(path, 5.0)
            assert (await notices.wait(1)).source == "file"
    assert sum("notice.unknown" in record.message for record in caplog.records) == 1


async def test_a_signal_is_a_notice() -> None:
    async with following(None) as notices:
        began_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGUSR1)
        notice = await notices.wait(1)
    assert notice.source == "signal"
    assert began_s <= notice.ends_s - NOTICE_S <= time.monotonic()


async def test_a_signal_after_the_watch_ends_nothing() -> None:
    async with following(None):
        pass
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0)  # by default it would have ended this process


async def test_a_later_notice_counts_only_if_the_machine_ends_sooner(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    write(path, 100.0)
    async with following(NoticeFile(path, NOTICE_S)) as notices:
        first = await notices.wait(1)
        assert first.ends_s - time.monotonic() <= 100
        write(path, 200.0)
        await asyncio.sleep(3 * preemption.POLL_S)
        write(path, 50.0)
        sooner = await notices.wait(2)
        assert sooner.ends_s - time.monotonic() <= 50
        os.kill(os.getpid(), signal.SIGUSR1)  # 20 s from now
        assert (await notices.wait(3)).source == "signal"
        os.kill(os.getpid(), signal.SIGUSR1)  # the same, a little later
        await asyncio.sleep(3 * preemption.POLL_S)
    assert [notice.source for notice in notices.entries] == ["file", "file", "signal"]


async def test_a_watch_that_begins_again_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    known = SpotNotice("signal", time.monotonic() + 20)
    write(path, 30.0)
    async with following(NoticeFile(path, NOTICE_S), known) as notices:
        await asyncio.sleep(3 * preemption.POLL_S)
        write(path, 10.0)
        assert (await notices.wait(1)).ends_s < known.ends_s - 9


@pytest.mark.parametrize("text", ["", "1970-01-01T00:01:00Z"])
async def test_a_file_that_the_machine_has_outlived_is_no_notice(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now_s = tmp_path / "notice", 100.0
    path.write_text(text)
    os.utime(path, (60.0, 60.0))
    file = NoticeFile(path, 30.0, lambda: now_s)
    for _ in range(3):
        assert await file.time_left_s() is None
    assert sum("notice.outlived" in record.message for record in caplog.records) == 1
    now_s = 101.0
    path.write_text(text.replace("01:00", "02:00"))
    os.utime(path, (now_s, now_s))
    assert await file.time_left_s() == (19.0 if text else 30.0)


async def test_a_worker_that_starts_again_hears_what_is_still_to_come(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.touch()
    os.utime(path, (90.0, 90.0))
    assert await NoticeFile(path, 30.0, lambda: 100.0).time_left_s() == 30.0


async def test_a_file_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    file = NoticeFile(path, 30.0, lambda: 0.0)
    path.touch()
    asked = asyncio.create_task(file.time_left_s())
    await asyncio.to_thread(path.write_text, "1970-01-01T00:00:10Z")
    assert await asked == 10.0


async def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "notice")
    with pytest.raises(UnavailableError, match="no regular file"):
        await NoticeFile(tmp_path / "notice", 30.0).time_left_s()
