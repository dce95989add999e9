"""Waits for the first spot notice of any source. A source that fails gives no notice; it never ends the worker."""

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


async def first_notice(config: SpotNoticeConfig, sources: Sequence[NoticeSource]) -> SpotNotice:
    """The first notice of these sources, or of SIGUSR1. Takes over `sources`, and closes them."""
    found: asyncio.Future[SpotNotice] = asyncio.get_running_loop().create_future()

    def on_notice(source: str, left_s: float) -> None:
        if not found.done():
            found.set_result(SpotNotice(source, time.monotonic() + left_s))

    with _on_signal(lambda: on_notice("signal", config.notice_s)):
        tasks = [asyncio.ensure_future(_poll(source, config.poll_s, on_notice)) for source in sources]
        try:
            return await found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _poll(source: NoticeSource, poll_s: float, on_notice: Callable[[str, float], None]) -> None:
    """Looks until there is a notice. Failures are logged once, and again once they are another kind."""
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
                    return
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
