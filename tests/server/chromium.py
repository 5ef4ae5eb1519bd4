"""A real browser, if there is one, and a page of ours in it.

MLX_WORKER_SCREENSHOTS=FOLDER keeps a picture of each size and scheme.
"""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest
from playwright.async_api import Browser, Page, async_playwright

CHROMIUM = next(
    filter(None, map(shutil.which, ("/usr/bin/chromium", "chromium", "google-chrome", "chrome"))),
    None,
)
SCREENSHOTS = os.environ.get("MLX_WORKER_SCREENSHOTS")  # before a test hides such variables
SIZES = [(360, 740), (390, 844), (768, 1024), (1280, 800)]
HOSTILE = "<img src=x onerror=alert(1)>"
NO_ANSWER = "Failed to load resource"  # how Chromium logs any reply but a good one
IS_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"

# Pages ask every second or two; in a test five times as often, so that it waits less.
HASTE = """
const later = window.setTimeout.bind(window);
window.setTimeout = (work, ms = 0, ...more) => later(work, ms < 1000 ? ms : ms / 5, ...more);
"""

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium or Chrome on this machine"
)


class Served(Protocol):
    """Whatever has a page."""

    @property
    def port(self) -> int: ...


@asynccontextmanager
async def launched() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(
    browser: Browser, local: Served, may_fail: bool = False, **context: Any
) -> AsyncIterator[Page]:
    """The page; in the end the browser has nothing to complain of, and nothing has popped up.

    may_fail  replies other than good ones are part of the test
    """
    complaints: list[str] = []
    seen = await browser.new_context(**context)
    await seen.add_init_script(HASTE)
    page = await seen.new_page()
    page.on("console", lambda line: complaints.append(f"{line.type}: {line.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    try:
        await page.goto(f"http://127.0.0.1:{local.port}/")
        yield page
    finally:
        await seen.close()
    assert [line for line in complaints if not (may_fail and NO_ANSWER in line)] == []
