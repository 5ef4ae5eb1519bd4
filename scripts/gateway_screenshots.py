"""Pictures of the gateway's console: docs/console/gateway-*.png.

    python scripts/gateway_screenshots.py [FOLDER]

Runs a gateway with scripted workers that dial in over a real link and report what is to be shown,
each of the nine statuses among it. Needs a
Chromium or Chrome, and Pillow, which matplotlib brings.
"""

import asyncio
import io
import math
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402
from playwright.async_api import Browser, Page, expect  # noqa: E402

from mlx_worker.gateway.records import PlatformState  # noqa: E402
from mlx_worker.records import Settings  # noqa: E402
from mlx_worker.wire.link import SETTING, ModelReport  # noqa: E402
from tests.gateway.console_site import ALL, ScriptedWorker, Site, model, site  # noqa: E402
from tests.server.chromium import launched  # noqa: E402

DOCS = ROOT / "docs" / "console"
DESKTOP = {"width": 1100, "height": 760}
PHONE = {"width": 390, "height": 844}
N_REQUESTS = 42
N_COLOURS = 24


async def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        async with launched() as browser:
            for take in (take_parts, take_settings, take_statuses):
                place = Path(home) / take.__name__
                place.mkdir()
                async with site(place) as here:
                    await take(browser, here, folder)


async def opened(browser: Browser, here: Site, at: str = "", **context: Any) -> Page:
    page = await browser.new_page(**{"viewport": DESKTOP, "color_scheme": "light", **context})
    await page.goto(f"http://127.0.0.1:{here.port}/")
    await page.get_by_label("API key", exact=True).fill(here.keys["owner"])
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("status").first).to_have_text("Connected")
    await page.goto(f"http://127.0.0.1:{here.port}/#{at}")
    return page


async def take(page: Page, path: Path, *, is_whole: bool = True) -> None:
    await page.evaluate("document.activeElement.blur()")
    keep(path, await page.screenshot(full_page=is_whole))


def keep(path: Path, picture: bytes) -> None:
    """With few colours, as there are few: a fraction of the bytes."""
    drawn = Image.open(io.BytesIO(picture)).convert("RGB").quantize(N_COLOURS)
    drawn.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


# --- the parts ---------------------------------------------------------------------------------


async def take_parts(browser: Browser, here: Site, folder: Path) -> None:
    page = await browser.new_page(viewport={"width": 700, "height": 420})
    await page.goto(f"http://127.0.0.1:{here.port}/")
    await expect(page.get_by_label("API key", exact=True)).to_be_visible()
    await take(page, folder / "gateway-sign-in.png")
    async with AsyncExitStack() as stack:
        studio = await fleet(here, stack)
        await requests(here, studio)
        await here.store.add_key(here.organisation.id, "nightly batch", "member")
        await here.store.add_key(
            here.organisation.id, "on call", "member", extra=["manage_workers"]
        )
        page = await opened(browser, here)
        await expect(page.get_by_text("On, +24%")).to_be_visible()
        await take(page, folder / "gateway-workers.png")
        await page.get_by_role("link", name="studio").click()
        await page.get_by_role("button", name="gemma-4-e2b-it").click()
        await expect(page.get_by_text("Tokens per second")).to_be_visible()
        await take(page, folder / "gateway-worker.png")
        await page.emulate_media(color_scheme="dark")
        await page.set_viewport_size(PHONE)  # pyright: ignore[reportArgumentType]
        await take(page, folder / "gateway-worker-phone.png")
        await page.emulate_media(color_scheme="light")
        await page.set_viewport_size(DESKTOP)  # pyright: ignore[reportArgumentType]
        await page.get_by_role("link", name="Usage log").click()
        await expect(page.get_by_text("42 shown, all there are.")).to_be_visible()
        await take(page, folder / "gateway-usage.png", is_whole=False)
        await page.get_by_role("link", name="Keys").click()
        await expect(page.get_by_text("nightly batch").first).to_be_visible()
        await take(page, folder / "gateway-keys.png")


async def fleet(here: Site, stack: AsyncExitStack) -> ScriptedWorker:
    studio = await here.worker(
        "studio", model(), model("qwen3-8b", "measuring", draft="qwen3-0.6b", is_loaded=True)
    )
    mini = await here.worker("mini", model("gemma-4-e2b-it", "off", speedup=-0.18))
    await here.worker("laptop")
    await stack.enter_async_context(studio.connected())
    await stack.enter_async_context(mini.connected())
    return studio


async def requests(here: Site, worker: ScriptedWorker) -> None:
    for n in range(N_REQUESTS):
        is_drafted = n % 6 != 2
        speed = (58 if is_drafted else 44) + 7 * math.sin(n)
        fields: dict[str, Any] = {
            "prompt_tokens": 90 + 37 * n % 400,
            "completion_tokens": 120 + 91 * n % 700,
            "ttft_ms": 150 + 40 * math.cos(n),
            "tokens_per_second": speed,
            "draft_acceptance_rate": 0.7 + 0.12 * math.sin(1.7 * n) if is_drafted else None,
        }
        if n == N_REQUESTS - 4:
            fields = dict.fromkeys(fields) | {"error": "worker_lost", "finish_reason": None}
        await here.used(worker.worker, **fields)


# --- what settings say -------------------------------------------------------------------------


async def take_settings(browser: Browser, here: Site, folder: Path) -> None:
    for name in ("automatic", "together", "platform", "older", "by-file", "unreadable", "away"):
        worker = await here.worker(name)
        if name == "together":
            worker.settings = Settings(run_requests_together=True)
        if name == "older":
            worker.settings, worker.capabilities = None, ()
        if name == "by-file":
            worker.capabilities = tuple(one for one in ALL if one != SETTING)
        if name == "unreadable":
            worker.problem = "policies.json: can't be read: Expecting value: line 1 column 1"
            worker.settings = Settings("off")
        if name == "platform":
            await here.store.switch_platform("off", [worker.worker.id])
        page = await opened(
            browser, here, f"/workers/{worker.worker.id}", viewport={"width": 560, "height": 900}
        )
        async with worker.connected():
            await expect(page.locator("#worker-state")).to_contain_text("Connected since")
            if name != "away":
                await shoot_settings(page, folder / f"gateway-settings-{name}.png")
        if name == "away":
            await expect(page.locator("#worker-state")).to_contain_text("Not connected since")
            await shoot_settings(page, folder / f"gateway-settings-{name}.png")
        await page.close()


async def shoot_settings(page: Page, path: Path) -> None:
    card = page.get_by_role("region", name="Settings")
    keep(path, await card.screenshot())


# --- the nine statuses, and no line ------------------------------------------------------------


def reports() -> dict[str, ModelReport]:
    return {
        "on": model(state="on"),
        "off": model(state="off", speedup=-0.18),
        "measuring": model(state="measuring"),
        "automatic": model(state="automatic"),
        "paused": model(),
        "off-settings": model(),
        "off-platform": model(),
        "starting": model(state=None),
        "needs-update": model(state=None),
        "no-line": model(state=None, draft=None, draft_bytes=None, draft_problem=REFUSED),
    }


REFUSED = "the vocabularies differ: 262,144 and 151,936 words"
TEXTS = {
    "on": "On, +24%", "off": "Off, −18%", "measuring": "Measuring", "automatic": "Automatic",
    "paused": "Paused", "off-settings": "Off (worker's Settings)",
    "off-platform": f"Off (by {PlatformState().display_name})", "starting": "Starting",
    "needs-update": "Needs a worker update", "no-line": REFUSED,
}  # fmt: skip


async def take_statuses(browser: Browser, here: Site, folder: Path) -> None:
    for name, report in reports().items():
        worker = await here.worker(name, report)
        worker.reports = name != "starting"
        if name == "paused":
            worker.settings = Settings(run_requests_together=True)
        if name == "off-settings":
            worker.settings = Settings("off")
        if name == "needs-update":
            worker.settings, worker.capabilities = None, ()
        if name == "off-platform":
            await here.store.switch_platform("off", [worker.worker.id])
        page = await opened(
            browser, here, f"/workers/{worker.worker.id}", viewport={"width": 620, "height": 900}
        )
        async with worker.connected():
            await page.get_by_role("button", name=report.id).click()
            text = TEXTS[name]
            await expect(page.locator("#models dd").filter(has_text=text)).to_be_visible()
            card = page.get_by_role("region", name="Models & context")
            keep(folder / f"gateway-status-{name}.png", await card.screenshot())
        await page.close()


if __name__ == "__main__":
    asyncio.run(main())
