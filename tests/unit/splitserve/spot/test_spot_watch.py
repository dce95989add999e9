"""Waiting for the first notice: sources that fail end nothing, and are logged once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from splitserve.config.worker import SpotNoticeConfig, WorkerConfig
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.spot.file import FileNotices
from splitserve.spot.source import NoticeSource
from splitserve.spot.watch import first_notice, notice_sources

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


async def test_the_first_notice_of_any_source_counts() -> None:
    quiet, speaks = Scripted(None), Scripted(None, None, 12.0)
    notice = await first_notice(QUICK, [quiet, speaks])
    assert notice.source == "scripted"
    assert 11 < notice.ends_s - time.monotonic() <= 12
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
    waiting = asyncio.create_task(first_notice(QUICK, []))
    await asyncio.sleep(0)  # it has begun
    os.kill(os.getpid(), signal.SIGUSR1)
    notice = await waiting
    assert notice.source == "signal"
    assert 19 < notice.ends_s - time.monotonic() <= 20


async def test_a_second_signal_ends_nothing() -> None:
    await first_notice(QUICK, [Scripted(5.0)])
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0)  # by default it would have ended this process


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
    waiting = asyncio.create_task(first_notice(QUICK, [quiet]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
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
