"""Pictures of the console while a real worker's verdict forms: docs/console/*.png.

    python scripts/screenshots.py [FOLDER]

Serves the demo pair in a folder of its own and asks it the README's loop of requests. Needs a
Chromium or Chrome. With OpenBLAS preloaded (README) the verdict is On here, without about level.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).parent.parent / "docs" / "console"
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
MOST_REQUESTS = 40


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        worker = subprocess.Popen(
            [sys.executable, "-m", "mlx_worker", "serve", "--model", "demo", "--port", "0"],
            env={**os.environ, "MLX_WORKER_HOME": home},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert worker.stdout is not None
            address = worker.stdout.readline().removeprefix("console: ").strip()
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
                args=["--no-sandbox"],
            )
            page = browser.new_page(viewport=DESKTOP)  # pyright: ignore[reportArgumentType]
            take_all(page, address, folder)
        finally:
            worker.terminate()
            worker.wait()


def take_all(page: Page, address: str, folder: Path) -> None:
    page.goto(address)
    page.get_by_role("button", name=re.compile("demo")).first.click()
    before = None
    for n in range(MOST_REQUESTS):
        text = status_text(address)
        if text != before:
            page.get_by_text(text, exact=True).locator("visible=true").first.wait_for()
            before = text
            state = re.split(r"[ ,]", text)[0].lower()
            page.screenshot(path=folder / f"{state}.png")
            print(f"after {n} requests: {text}")
            if state in ("on", "off"):
                break
        ask(address, f"Count from {n} in steps of 4, 20 numbers.")
    for n in range(8):
        ask(address, f"Write a JSON object about lamp {n}.", speculation="off" if n % 3 else "auto")
    page.wait_for_timeout(2500)  # a poll and a half
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType]
        for name, size in (("phone", PHONE), ("desktop", DESKTOP)):
            page.set_viewport_size(size)  # pyright: ignore[reportArgumentType]
            page.screenshot(path=folder / f"{name}-{scheme}.png", full_page=True)


def status_text(address: str) -> str:
    with urllib.request.urlopen(f"{address}status") as reply:
        return json.loads(reply.read())["models"][0]["speculation"]


def ask(address: str, prompt: str, **options: Any) -> None:
    body = {"messages": [{"role": "user", "content": prompt}], **options}
    request = urllib.request.Request(
        f"{address}v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).read()


if __name__ == "__main__":
    main()
