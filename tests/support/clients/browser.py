"""A real Chromium without a window, which fails a test that sees an error or asks another host."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

from dev.system.chromium import chromium
from splitserve.errors import UnavailableError
from tests.support.waiting import PATIENCE_S

DESKTOP, PHONE = (1280, 900), (390, 844)
AXE = files("axe_playwright_python").joinpath("axe.min.js")
SERIOUS = ("serious", "critical")


def program() -> str:
    """Where Chromium is; skips the test where there is none to be had."""
    try:
        return chromium()
    except UnavailableError as error:
        pytest.skip(error.message)


@asynccontextmanager
async def chromium_browser() -> AsyncIterator[Browser]:
    """Chromium, for as long as the context is open."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program())
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def watched_page(
    browser: Browser,
    base_url: str,
    *,
    size: tuple[int, int] = DESKTOP,
    scheme: Literal["light", "dark"] = "light",
    expected: Collection[str] = (),
) -> AsyncIterator[Page]:
    """A tab. At the end there must have been no error but those that contain a text of `expected`, no dialog, and no
    request to a host other than that of `base_url`."""
    context = await browser.new_context(
        base_url=base_url, viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
    )
    context.set_default_timeout(PATIENCE_S * 1e3)
    page = await context.new_page()
    wrong: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            wrong.append(f"{message.type}: {message.text}")

    def on_request(request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(base_url).netloc:
            wrong.append(f"asked {request.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: wrong.append(f"raised {error}"))
    page.on("dialog", lambda dialog: wrong.append(f"dialog {dialog.message}"))
    page.on("request", on_request)
    try:
        yield page
    finally:
        await context.close()
    assert not [text for text in wrong if not any(known in text for known in expected)]


async def serious_violations(page: Page) -> list[dict[str, Any]]:
    """What axe-core finds wrong with the page as it is now, if it is serious or critical."""
    # Not as a script of the page: its security policy allows none but its own.
    await page.evaluate(f"{AXE.read_text(encoding='utf-8')}\n;0")
    found = json.loads(await page.evaluate("async () => JSON.stringify((await axe.run()).violations)"))
    return [
        {"id": one["id"], "where": [node["html"][:200] for node in one["nodes"]][:5]}
        for one in found
        if one["impact"] in SERIOUS
    ]
