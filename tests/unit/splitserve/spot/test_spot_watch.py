"""Waiting for the first notice: sources that fail end nothing, and are logged once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from splitserve.config.worker import SpotNoticeConfig, WorkerConfig
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.spot.file import FileNotices
from splitserve.spot.source import NoticeSource, SpotNotice
from splitserve.spot.watch import follow_notices, notice_sources
from tests.support.journal import Journal

pytestmark = pytest.mark.timeout(10)
QUICK = SpotNoticeConfig(poll_s=0.05, notice_s=20.0)


class Scripted(NoticeSource):
    """Answers what it was given, one after the other; the last one again and again."""

    name = "scripted"

    def __init__(self, *answers: float | Exception | None) -> None:
        self.answers = list(answers)
        self.closed = False

    async def time_left_s(self) -> float | None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


async def first_notice(config: SpotNoticeConfig, sources: Sequence[NoticeSource]) -> SpotNotice:
    """The first of these; the watch is over with it."""
    async with following(config, sources) as notices:
        return await notices.wait(1)


@asynccontextmanager
async def following(
    config: SpotNoticeConfig, sources: Sequence[NoticeSource], known: SpotNotice | None = None
) -> AsyncIterator[Journal[SpotNotice]]:
    """What is heard, as it comes."""
    notices: Journal[SpotNotice] = Journal()
    watch = asyncio.create_task(follow_notices(config, sources, notices.add, known))
    await asyncio.sleep(0)  # it has begun
    try:
        yield notices
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert watch.cancelled()


async def test_the_first_notice_of_any_source_counts() -> None:
    quiet, speaks, began_s = Scripted(None), Scripted(None, None, 12.0), time.monotonic()
    notice = await first_notice(QUICK, [quiet, speaks])
    assert notice.source == "scripted"
    assert began_s <= notice.ends_s - 12 <= time.monotonic()
    assert quiet.closed
    assert speaks.closed


async def test_failures_are_logged_once_and_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    gone, bug = UnavailableError("it is gone", reason="METADATA_UNAVAILABLE"), RuntimeError("a bug")
    with caplog.at_level("INFO"):
        notice = await first_notice(QUICK, [Scripted(gone, gone, bug, bug, None, 5.0)])
    assert notice.source == "scripted"
    said = [record.message for record in caplog.records]
    assert [sum(event in line for line in said) for event in ("spot.unknown", "spot.failed")] == [1, 1]


async def test_a_signal_is_a_notice() -> None:
    async with following(QUICK, []) as notices:
        began_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGUSR1)
        notice = await notices.wait(1)
    assert notice.source == "signal"
    assert began_s <= notice.ends_s - 20 <= time.monotonic()


async def test_a_second_signal_ends_nothing() -> None:
    await first_notice(QUICK, [Scripted(5.0)])
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0)  # by default it would have ended this process


async def test_a_later_notice_counts_only_if_the_machine_ends_sooner() -> None:
    says, began_s = Scripted(100.0, 100.0, 200.0, 99.9, 50.0), time.monotonic()
    async with following(QUICK, [says]) as notices:
        first, sooner = await notices.wait(1), await notices.wait(2)
        assert began_s <= sooner.ends_s - 50 <= time.monotonic()
        assert began_s <= first.ends_s - 100 <= time.monotonic()
        os.kill(os.getpid(), signal.SIGUSR1)  # 20 s from now
        assert (await notices.wait(3)).source == "signal"
        os.kill(os.getpid(), signal.SIGUSR1)  # the same, a little later
        await asyncio.sleep(3 * QUICK.poll_s)
    assert [notice.source for notice in notices.entries] == ["scripted", "scripted", "signal"]


async def test_a_watch_that_begins_again_repeats_nothing() -> None:
    known = SpotNotice("signal", time.monotonic() + 20)
    async with following(QUICK, [Scripted(30.0, 20.0, 10.0)], known) as notices:
        assert (await notices.wait(1)).ends_s < known.ends_s - 9


@pytest.mark.parametrize("text", ["", "1970-01-01T00:01:00Z"])
async def test_a_file_that_the_machine_has_outlived_is_no_notice(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now_s = tmp_path / "notice", 100.0
    path.write_text(text)
    os.utime(path, (60.0, 60.0))
    source = FileNotices(path, 30.0, lambda: now_s)
    for _ in range(3):
        assert await source.time_left_s() is None
    assert sum("spot.outlived" in record.message for record in caplog.records) == 1
    now_s = 101.0
    path.write_text(text.replace("01:00", "02:00"))
    os.utime(path, (now_s, now_s))
    assert await source.time_left_s() == (19.0 if text else 30.0)


async def test_a_worker_that_starts_again_hears_what_is_still_to_come(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.touch()
    os.utime(path, (90.0, 90.0))
    assert await FileNotices(path, 30.0, lambda: 100.0).time_left_s() == 30.0


async def test_a_file_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = FileNotices(path, 30.0, lambda: 0.0)
    path.touch()
    asked = asyncio.create_task(source.time_left_s())
    await asyncio.to_thread(path.write_text, "1970-01-01T00:00:10Z")
    assert await asked == 10.0


async def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "notice")
    with pytest.raises(UnavailableError, match="no regular file"):
        await FileNotices(tmp_path / "notice", 30.0).time_left_s()


async def test_cancelling_closes_the_sources() -> None:
    quiet = Scripted(None)
    async with following(QUICK, [quiet]):
        await asyncio.sleep(0)
    assert quiet.closed


async def test_sources_of_a_config() -> None:
    assert notice_sources(SpotNoticeConfig()) == []
    for provider in ("aws", "gcp", "azure"):
        config = SpotNoticeConfig.model_validate({"provider": provider, "file": "notice"})
        made = notice_sources(config)
        assert [source.name for source in made] == [provider, "file"]
        for source in made:
            await source.close()


@pytest.mark.parametrize("url", ["169.254.169.254", "https://a:1", "http://a/x", "http://a@b", "http://a:0"])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises((ValueError, SplitserveError), match=r"spot\.metadata_url|http://HOST:PORT"):
        SpotNoticeConfig(metadata_url=url)


def test_a_port_may_be_left_out() -> None:
    config = WorkerConfig.model_validate(
        {"worker_id": "w", "model": "m", "spot": {"metadata_url": "http://a", "file": Path("x")}}
    )
    assert config.spot.metadata_url == "http://a:80"
