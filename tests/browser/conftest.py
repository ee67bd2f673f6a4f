"""The service under test, and Debian's Chromium to look at it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

from tests.browser.live_service import IdleRay, Rubato, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rubato(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rubato]:
    async with served(tmp_path_factory.mktemp("home"), IdleRay()) as service:
        yield service


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    async with async_playwright() as playwright:
        # Without its sandbox, which does not start for root; only pages of this test are opened.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(rubato: Rubato, browser: Browser) -> AsyncIterator[Page]:
    """A page of the service."""
    async with watched_page(browser, rubato.url) as page:
        yield page


@asynccontextmanager
async def watched_page(browser: Browser, url: str) -> AsyncIterator[Page]:
    """A page that fails the test when its scripts fail, open a dialog or fetch anything from elsewhere."""
    complaints: list[str] = []

    def is_elsewhere(address: str) -> bool:
        return not address.startswith((url, "data:", "blob:"))

    context = await browser.new_context(base_url=url, viewport={"width": 1320, "height": 1000})
    context.set_default_timeout(15_000)
    page = await context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"a script opened a dialog: {dialog.message}"))
    page.on("request", lambda request: complaints.append(request.url) if is_elsewhere(request.url) else None)
    yield page
    await context.close()
    assert complaints == []
