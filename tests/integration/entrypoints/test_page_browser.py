"""The page in a real Chromium: light, dark, on a phone, by keyboard, locked, with hostile names, with real weights."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest
from playwright.async_api import Browser, Page, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.entrypoints.http.server import serving_http
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.clients.browser import (
    DESKTOP,
    PHONE,
    chromium_browser,
    program,
    serious_violations,
    watched_page,
)
from tests.support.clients.patient import PatientScalingClient
from tests.support.cluster.fake_cluster import ask, fake_cluster
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
TOKEN = "a-token-of-more-than-16-characters"
GONE = "Failed to load resource"
MILLISECONDS = 1e3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
expect.set_options(timeout=PATIENCE_S * MILLISECONDS)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    program()
    async with chromium_browser() as made:
        yield made


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two pairs of simulated engines that have answered, all of it slow, and an autoscaler's plan."""
    program()
    made = Cluster(
        tmp_path_factory.mktemp("logs"),
        prefill=2,
        decode=2,
        coordinator_options=["--slow-ttft", "0.000001"],
        http=True,
    )
    async with running(made):
        async with made.client() as client:
            for number in range(3):
                await client.generate(list(range(5, 85)), max_tokens=4, request_id=f"before-{number}")
        decisions = [
            scaling_pb2.PoolDecision(pool=pool, desired=3, ready=2, starting=1, cause="policy", reason="busy")
            for pool in (registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE)
        ]
        async with PatientScalingClient(made.target) as scaling:
            await scaling.apply_plan(valid_s=3600.0, decisions=decisions)
        yield made
        await made.assert_no_leaks()


def url_of(cluster: Cluster) -> str:
    return cluster.base_url.removesuffix("/v1")


async def opened(page: Page, workers: int = 4, at: str = "/") -> None:
    """Waits until the page is live and shows so many workers."""
    await page.goto(at)
    await expect(page.locator("#status")).to_contain_text("Live")
    await expect(page.locator(".worker.ready")).to_have_count(workers)


@pytest.mark.parametrize(
    ("scheme", "size"), [("light", DESKTOP), ("dark", DESKTOP), ("light", PHONE), ("dark", PHONE)]
)
async def test_it_shows_the_cluster_and_axe_finds_nothing_serious(
    cluster: Cluster, browser: Browser, scheme: Literal["light", "dark"], size: tuple[int, int]
) -> None:
    async with watched_page(browser, url_of(cluster), scheme=scheme, size=size) as page:
        await opened(page)
        await expect(page.locator("#scaling")).to_contain_text("3 wanted, 2 ready, 1 starting")
        await page.get_by_role("button", name="Slow", exact=True).click()
        await page.get_by_role("button", name="before-1", exact=True).click()
        await expect(page.locator("#requests .waterfall")).to_contain_text("prefill_compute")
        await page.locator("#requests summary").click()
        await expect(page.locator("#requests .record")).to_contain_text("workers had capacity for it")
        await expect(page.locator("#ttft-chart polygon")).not_to_have_count(0)
        assert await serious_violations(page) == []
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= size[0], "the page scrolls sideways"


@asynccontextmanager
async def under_prefix(base_url: str, prefix: str) -> AsyncIterator[str]:
    """A reverse proxy that maps paths below `prefix` to the server at `base_url`; yields its own address."""
    async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S) as client:

        async def proxy(request: Request) -> Response:
            path = "/" + request.path_params["path"]
            content = await request.body()
            answer = await client.request(request.method, path, content=content, headers=request.headers.raw)
            return Response(answer.content, answer.status_code, dict(answer.headers))

        routes = [Route(prefix + "{path:path}", proxy, methods=["GET", "POST"])]
        async with serving_http(Starlette(routes=routes), "127.0.0.1", 0) as port:
            yield f"http://127.0.0.1:{port}"


async def test_it_works_below_a_prefix(cluster: Cluster, browser: Browser) -> None:
    prefix = "/tools/splitserve/"
    async with (
        under_prefix(url_of(cluster), prefix) as url,
        watched_page(browser, url) as page,
    ):
        await opened(page, at=prefix)
        await page.get_by_role("button", name="Slow", exact=True).click()
        await page.get_by_role("button", name="before-1", exact=True).click()
        await expect(page.locator("#requests .waterfall")).to_contain_text("prefill_compute")
        await page.get_by_label("Message").fill("hello")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator("#chat-record .waterfall")).to_contain_text("decode")


async def test_everything_is_reached_by_keyboard(cluster: Cluster, browser: Browser) -> None:
    async with watched_page(browser, url_of(cluster)) as page:
        await opened(page)
        await page.keyboard.press("Tab")
        await expect(page.locator(".skip")).to_be_focused()
        await page.keyboard.press("Tab")
        await expect(page.locator(".prefill .worker").first).to_be_focused()
        await page.keyboard.press("ArrowDown")
        await expect(page.locator(".prefill .worker").last).to_be_focused()
        await expect(page.locator("#worker-detail")).to_contain_text("prefill-1 (simulated): ready")
        await page.locator("#ttft-chart .chart").focus()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("#ttft-chart .legend")).to_contain_text(" at ")
        await page.locator("#requests tbody button").first.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#requests .record h3")).to_be_focused()
        await page.locator("#prompt").focus()
        await page.keyboard.type("hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("#chat-record .waterfall")).to_contain_text("decode")


async def test_a_killed_worker_is_shown_as_gone(log_dir: Path, browser: Browser) -> None:
    async with running(Cluster(log_dir, decode=2, http=True)) as cluster:
        async with watched_page(browser, url_of(cluster)) as page:
            await opened(page, workers=3)
            await asyncio.to_thread(cluster.members["decode-1"].kill)
            await expect(page.locator(".worker.gone")).to_contain_text("decode-1")
            await expect(page.locator(".decode h3")).to_have_text("decode: 1 of 2 ready")
        await cluster.assert_no_leaks()


async def test_it_says_when_the_coordinator_is_away(log_dir: Path, browser: Browser) -> None:
    async with (
        running(Cluster(log_dir, http=True)) as cluster,
        watched_page(browser, url_of(cluster), expected=[GONE]) as page,
    ):
        await opened(page, workers=2)
        await asyncio.to_thread(cluster.members["coordinator"].kill)
        await expect(page.locator("#status")).to_contain_text("No answer")


async def test_hostile_names_are_text(browser: Browser) -> None:
    async with fake_cluster(prefill=0, decode=0, http_port=0) as cluster:
        await cluster.add_decode("d0", model=HOSTILE)
        await cluster.add_prefill("p0", model=HOSTILE)
        await cluster.all_ready()
        await cluster.answer(ask(model=HOSTILE, request_id="odd"))
        async with PatientScalingClient(cluster.address) as scaling:
            decision = scaling_pb2.PoolDecision(
                pool=registry_pb2.POOL_DECODE, cause=HOSTILE, reason=HOSTILE, next_actions=[HOSTILE]
            )
            await scaling.apply_plan(valid_s=600.0, decisions=[decision])
        async with watched_page(browser, f"http://127.0.0.1:{cluster.coordinator.http_port}") as page:
            await opened(page, workers=2)
            await page.locator(".decode .worker").click()
            await expect(page.locator("#worker-detail")).to_contain_text(HOSTILE)
            await page.get_by_role("button", name="odd", exact=True).click()
            await expect(page.locator("#requests .record")).to_contain_text(HOSTILE)
            await expect(page.locator("#scaling")).to_contain_text(HOSTILE)
            await expect(page.locator("img")).to_have_count(0)
            await expect(page.locator("script")).to_have_count(1)


async def test_a_locked_page_opens_with_its_token(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    async with (
        fake_cluster(http_port=0, page_token_file=path) as cluster,
        watched_page(browser, f"http://127.0.0.1:{cluster.coordinator.http_port}") as page,
    ):
        await page.goto("/")
        await expect(page.locator("#status")).to_have_text("Locked")
        await expect(page.locator("#main")).to_be_hidden()
        assert await serious_violations(page) == []
        await page.get_by_label("Token of this page").fill("wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_have_text("this is not the page's token")
        await page.get_by_label("Token of this page").fill(TOKEN)
        await page.keyboard.press("Enter")
        await expect(page.locator(".worker.ready")).to_have_count(2)
        await page.reload()
        await expect(page.locator(".worker.ready")).to_have_count(2)


async def test_the_chat_streams_with_real_weights_and_shows_its_waterfall(
    smollm2: str, log_dir: Path, browser: Browser
) -> None:
    real = Cluster(log_dir, model=smollm2, engine="torch", http=True)
    async with running(real):
        async with watched_page(browser, url_of(real)) as page:
            await opened(page, workers=2)
            await page.evaluate(
                "() => { window.pieces = 0; new MutationObserver((all) => { window.pieces += all.length; })"
                ".observe(document.querySelector('.log'), { childList: true, subtree: true }); }"
            )
            # Its answer is long: what comes at once on a busy machine is still in many pieces.
            await page.get_by_label("Message").fill("Count from one to forty.")
            await page.get_by_role("button", name="Send").click()
            await expect(page.locator("#chat-record .waterfall")).to_contain_text("prefill_compute")
            await expect(page.locator(".assistant")).to_have_text(re.compile(r"\w"))
            assert await page.evaluate("window.pieces") > 3, "the answer came in one piece"
            await expect(page.locator("#chat-record .record")).to_contain_text("completed, TTFT")
        await real.assert_no_leaks()
