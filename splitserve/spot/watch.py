"""Hears of spot notices of any source. A source that fails gives no notice; it never ends the worker."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from splitserve.config.worker import SpotNoticeConfig, SpotProvider
from splitserve.errors import SplitserveError
from splitserve.logs import log_event, log_exception
from splitserve.spot.file import FileNotices
from splitserve.spot.source import NoticeSource, SpotNotice

SOONER_S = 0.5
"""What says the same again differs by less."""
LAST_BACKOFF_S = 10.0
"""Longest time between two looks at a source that fails: some give 30 s in all."""


def notice_sources(config: SpotNoticeConfig) -> list[NoticeSource]:
    """The sources that are configured."""
    asked = [] if config.provider is None else [_metadata_source(config.provider, config)]
    file = [] if config.file is None else [FileNotices(config.file, config.notice_s)]
    return [*asked, *file]


def _metadata_source(provider: SpotProvider, config: SpotNoticeConfig) -> NoticeSource:
    # Imported here: the HTTP client takes a tenth of a second that workers elsewhere need not wait for.
    match provider:
        case "aws":
            from splitserve.spot import aws

            return aws.AwsNotices(config.metadata_url or aws.URL)
        case "gcp":
            from splitserve.spot import gcp

            return gcp.GcpNotices(config.notice_s, config.metadata_url or gcp.URL)
        case "azure":
            from splitserve.spot import azure

            return azure.AzureNotices(config.metadata_url or azure.URL)


async def follow_notices(
    config: SpotNoticeConfig,
    sources: Sequence[NoticeSource],
    take: Callable[[SpotNotice], None],
    known: SpotNotice | None = None,
) -> None:
    """Gives `take` the first notice of these sources or of SIGUSR1, and each later one by which the machine ends
    sooner, also than by `known`. Until it is cancelled. Takes over `sources`, and closes them."""

    def on_notice(source: str, left_s: float) -> None:
        nonlocal known
        notice = SpotNotice(source, time.monotonic() + left_s)
        if known is None or notice.ends_s < known.ends_s - SOONER_S:
            known = notice
            take(notice)

    with _on_signal(lambda: on_notice("signal", config.notice_s)):
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(_poll(source, config.poll_s, on_notice))
            await asyncio.Event().wait()


async def _poll(source: NoticeSource, poll_s: float, on_notice: Callable[[str, float], None]) -> None:
    """Looks again and again. Failures are logged once, and again once they are another kind."""
    pause_s, logged = poll_s, ""
    try:
        while True:
            reason = ""
            try:
                left_s = await source.time_left_s()
            except SplitserveError as error:
                reason = error.reason
                if reason != logged:
                    log_event(
                        "spot.unknown",
                        level=logging.WARNING,
                        source=source.name,
                        reason=reason,
                        error=error.message,
                    )
            except Exception as error:
                reason = "FAILED"
                if reason != logged:
                    log_exception("spot.failed", error, source=source.name)
            else:
                if left_s is not None:
                    on_notice(source.name, left_s)
            logged = reason
            pause_s = min(2 * pause_s, max(LAST_BACKOFF_S, poll_s)) if reason else poll_s
            await asyncio.sleep(pause_s)
    finally:
        await source.close()


@contextmanager
def _on_signal(callback: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGUSR1, callback)
    except (NotImplementedError, RuntimeError, ValueError):
        yield  # not on the main thread
        return
    try:
        yield
    finally:
        # Not removed: by default the signal would end the worker, and notices may be given twice.
        loop.add_signal_handler(signal.SIGUSR1, lambda: None)
