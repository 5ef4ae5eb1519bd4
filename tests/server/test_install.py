"""Installing and removing models on the console page: a real browser, worker, hub and files."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from mlx_worker.errors import ModelInUse
from mlx_worker.files import locked
from mlx_worker.models.cache import RepoFile, Snapshot
from mlx_worker.models.store import Pulled, Store
from tests.hub import LocalHub
from tests.server.chromium import (
    HOSTILE,
    IS_WIDE,
    SCREENSHOTS,
    SIZES,
    launched,
    needs_chromium,
    opened,
)
from tests.server.library import (
    DRAFT,
    MODEL,
    N_WEIGHTS,
    WEIGHTS,
    Library,
    downloading,
    library,
    model_files,
    post,
    pulled,
)
from tests.server.local import Local
from tests.tiers import thinned

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_chromium]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with launched() as browser:
        yield browser


def serve(local: Local, **facts: Any) -> None:
    """/status has the model, as the real engine's would."""
    local.engine.facts = {"models": [{"id": MODEL, "is_loaded": False, **facts}]}


async def open_dialog(page: Page) -> Locator:
    await page.get_by_role("button", name="Install a model…").click()
    return page.get_by_role("dialog", name="Install a model")


async def install(page: Page, model: str = MODEL) -> Locator:
    dialog = await open_dialog(page)
    await dialog.get_by_label("Name, or any id of the hub").fill(model)
    await dialog.get_by_role("button", name="Install", exact=True).click()
    return dialog


async def remove_dialog(page: Page) -> Locator:
    await page.get_by_role("button", name=MODEL).click()
    await page.get_by_role("button", name="Remove…").click()
    return page.get_by_role("dialog", name=f"Remove {MODEL}?")


# --- installing --------------------------------------------------------------------------------


async def test_a_model_is_installed_with_its_progress(
    browser: Browser, hub: LocalHub, store: Store
):
    """How far, which file; then that it is here, with its draft."""
    gate = hub.gate(WEIGHTS, 500_000, repo=MODEL)
    async with downloading(hub, store) as local, opened(browser, local) as page:
        dialog = await install(page)
        row = dialog.get_by_role("listitem").filter(has_text=WEIGHTS)
        await expect(row).to_contain_text(re.compile(r"0\.[4-6] of 1\.1 MB, [345]\d %"))
        bar = dialog.get_by_role("progressbar", name=f"Download of {MODEL}")
        share = await bar.evaluate("bar => bar.position")
        assert 0.3 < share < 0.6
        gate.release()
        done = dialog.get_by_role("status").filter(has_text="is here")
        await expect(done).to_have_text(f"{MODEL} is here, with its draft {DRAFT}.")
        await expect(bar).to_have_count(0)


async def test_speed_and_time_left_are_shown(browser: Browser, hub: LocalHub, store: Store):
    """As measured while the page looks on."""
    hub.rate = 250_000
    async with downloading(hub, store) as local, opened(browser, local) as page:
        dialog = await install(page)
        how = dialog.locator(".how")
        await expect(how).to_contain_text(re.compile(r"\d kB/s · \d+ s left"))


async def test_a_draft_can_be_left_out(browser: Browser, hub: LocalHub, store: Store):
    """It comes along unless told otherwise."""
    async with downloading(hub, store) as local, opened(browser, local) as page:
        dialog = await open_dialog(page)
        check = dialog.get_by_label("With its draft")
        await expect(check).to_be_checked()
        await check.uncheck()
        await dialog.get_by_label("Name, or any id of the hub").fill(MODEL)
        await dialog.get_by_role("button", name="Install", exact=True).click()
        await expect(page.locator("#models-done")).to_contain_text("without a draft")
        assert (await library(local))["models"][0]["draft"] is None


async def test_an_error_is_told_as_the_worker_tells_it(
    browser: Browser, hub: LocalHub, store: Store
):
    """A gated model's address is plain text; the name stays, to be tried again."""
    hub.add("org/gated", model_files(), gated=True)
    async with downloading(hub, store) as local, opened(browser, local, may_fail=True) as page:
        dialog = await install(page, "org/gated")
        error = dialog.locator("#install-error")
        await expect(error).to_contain_text("org/gated is gated")
        await expect(error).to_contain_text(f"{hub.endpoint}/org/gated")
        assert await dialog.locator("a").count() == 0
        await expect(dialog.get_by_label("Name, or any id")).to_have_value("org/gated")
        await expect(dialog.get_by_role("button", name="Install", exact=True)).to_be_focused()


async def test_a_download_that_fails_later_says_why_and_goes_on_when_told(
    browser: Browser, hub: LocalHub, store: Store, monkeypatch
):
    """In its row."""
    monkeypatch.setattr("mlx_worker.models.transfer.TRIES", 1)
    gate = hub.gate(WEIGHTS, 500_000, repo=MODEL)
    async with downloading(hub, store) as local, opened(browser, local) as page:
        dialog = await install(page)
        await expect(dialog.locator(".how")).to_contain_text("0.5 of 1.1 MB")
        hub.stop()
        gate.release()
        error = dialog.locator(".download .error")
        await expect(error).to_contain_text("the same command goes on from there", timeout=15_000)
        hub.start()
        sent = hub.bytes_sent(MODEL, WEIGHTS)
        await dialog.get_by_role("button", name="Go on").click()
        await expect(page.locator("#models-done")).to_contain_text("is here")
        assert hub.bytes_sent(MODEL, WEIGHTS) < sent + N_WEIGHTS


async def test_a_reloaded_page_finds_the_download(browser: Browser, hub: LocalHub, store: Store):
    """Which never stopped."""
    gate = hub.gate(WEIGHTS, 500_000, repo=MODEL)
    async with downloading(hub, store) as local, opened(browser, local) as page:
        dialog = await install(page)
        await expect(dialog.locator(".how")).to_contain_text("0.5 of 1.1 MB")
        await page.reload()
        await expect(page.locator("#downloads-place .how")).to_contain_text("0.5 of 1.1 MB")
        dialog = await open_dialog(page)
        await expect(dialog.locator(".how")).to_contain_text("0.5 of 1.1 MB")
        gate.release()
        await expect(dialog.locator("#models-done")).to_contain_text("is here")
    assert hub.bytes_sent(MODEL, WEIGHTS) == N_WEIGHTS


async def test_a_closed_dialog_leaves_the_download_to_be_stopped_and_gone_on_with(
    browser: Browser, hub: LocalHub, store: Store
):
    """In the list of the page."""
    gate = hub.gate(WEIGHTS, 500_000, repo=MODEL)
    async with downloading(hub, store) as local, opened(browser, local) as page:
        dialog = await install(page)
        await expect(dialog.locator(".how")).to_contain_text("0.5 of 1.1 MB")
        await dialog.get_by_role("button", name="Close").click()
        await expect(dialog).to_be_hidden()
        place = page.locator("#downloads-place")
        await expect(place.locator(".how")).to_contain_text("0.5 of 1.1 MB")
        await place.get_by_role("button", name="Stop").click()
        await expect(place.locator(".how")).to_contain_text("Stopped at 0.5 of 1.1 MB")
        gate.release()
        await place.get_by_role("button", name="Go on").click()
        await expect(page.locator("#models-done")).to_contain_text("is here")


async def test_what_is_gone_on_with_is_what_was_asked_for(
    browser: Browser, hub: LocalHub, store: Store
):
    """Without a draft, and also by a worker that only has the record of it."""
    gate = hub.gate(WEIGHTS, 500_000, repo=MODEL)
    async with downloading(hub, store) as local, opened(browser, local) as page:
        dialog = await open_dialog(page)
        await dialog.get_by_label("With its draft").uncheck()
        await dialog.get_by_label("Name, or any id of the hub").fill(MODEL)
        await page.keyboard.press("Enter")
        await expect(dialog.locator(".how")).to_contain_text("0.5 of 1.0 MB")
        await dialog.get_by_role("button", name="Stop").click()
        await expect(dialog.locator(".how")).to_contain_text("Stopped at 0.5 of 1.0 MB")
    gate.release()
    async with downloading(hub, store) as local, opened(browser, local) as page:
        await page.get_by_role("button", name="Go on").click()
        await expect(page.locator("#models-done")).to_contain_text("without a draft")
    assert hub.bytes_sent(DRAFT) == 0


async def test_another_programs_download_is_shown(browser: Browser, hub: LocalHub, store: Store):
    """It can't be stopped from here."""
    snapshot = Snapshot(MODEL, "0" * 40, (RepoFile(WEIGHTS, 1000, "0" * 40),))
    await asyncio.to_thread(store.put, Pulled(MODEL, snapshot))
    with ExitStack() as other:
        await asyncio.to_thread(other.enter_context, locked(store.lock(MODEL)))
        async with downloading(hub, store) as local, opened(browser, local) as page:
            row = page.locator(".download")
            await expect(row.locator(".how")).to_have_text("0.0 of 1.0 kB, 0 %, by another program")
            await expect(row.get_by_role("button", name="Stop")).to_have_count(0)


async def test_everything_can_be_done_from_the_keyboard(
    browser: Browser, hub: LocalHub, store: Store
):
    """Opened, filled in, sent, stopped, closed; the focus is back where it was."""
    gate = hub.gate(WEIGHTS, 500_000, repo=MODEL)
    async with downloading(hub, store) as local, opened(browser, local) as page:
        button = page.get_by_role("button", name="Install a model…")
        await button.focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_label("Name, or any id of the hub")).to_be_focused()
        await page.keyboard.type(MODEL)
        await page.keyboard.press("Enter")
        stop = page.get_by_role("dialog").get_by_role("button", name="Stop", exact=True)
        await expect(stop).to_be_visible()
        await stop.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator(".how")).to_contain_text("Stopped at")
        await expect(page.get_by_role("button", name="Go on")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await expect(button).to_be_focused()
        gate.release()


async def test_the_catalogue_is_narrowed_by_what_is_typed_and_chosen_by_arrow_keys(
    browser: Browser, hub: LocalHub, store: Store
):
    """Each with its size, its need, and whether it fits."""
    async with downloading(hub, store) as local, opened(browser, local) as page:
        listed = (await library(local))["catalogue"]
        dialog = await open_dialog(page)
        choices = dialog.get_by_role("radio")
        await expect(choices).to_have_count(len(listed))
        await expect(dialog.locator("#catalogue li").first).to_contain_text(
            re.compile(r"GB to download · .* of memory needed · (fits|too large for this machine)")
        )
        name = dialog.get_by_label("Name, or any id of the hub")
        await name.fill("8bit")
        n_narrow = sum("8bit" in one["variant"] or "8bit" in one["repo"] for one in listed)
        await expect(choices).to_have_count(n_narrow)
        await choices.first.focus()
        await page.keyboard.press("Space")
        chosen = await name.input_value()
        await page.keyboard.press("ArrowDown")
        assert chosen != await name.input_value()
        assert await name.input_value() in {one["id"] for one in listed}
        await name.fill("no such thing")
        await expect(dialog.locator("#no-match")).to_be_visible()


# --- removing ----------------------------------------------------------------------------------


async def test_a_model_is_removed_once_that_is_confirmed(
    browser: Browser, hub: LocalHub, store: Store
):
    """What goes is named before and after."""
    async with downloading(hub, store) as local:
        await pulled(local)
        serve(local)
        async with opened(browser, local) as page:
            dialog = await remove_dialog(page)
            await expect(dialog).to_contain_text("1.1 MB will be freed. Its draft goes too")
            await expect(dialog.get_by_role("button", name="Keep it")).to_be_focused()
            await dialog.get_by_role("button", name="Remove").click()
            said = page.locator("#models-done")
            await expect(said).to_have_text(f"{MODEL} was removed, 1.1 MB are free again.")
            await expect(dialog).to_be_hidden()
        assert (await library(local))["models"] == []


async def test_nothing_is_removed_unless_it_is_confirmed(
    browser: Browser, hub: LocalHub, store: Store
):
    """The focus goes back to the button."""
    async with downloading(hub, store) as local:
        await pulled(local)
        serve(local)
        async with opened(browser, local) as page:
            await remove_dialog(page)
            await page.keyboard.press("Escape")
            await expect(page.get_by_role("button", name="Remove…")).to_be_focused()
        assert len((await library(local))["models"]) == 1


async def test_a_shared_draft_is_said_to_stay(browser: Browser, hub: LocalHub, store: Store):
    """And who needs it."""
    hub.add("org/second", model_files(5000, b"s"))
    async with downloading(hub, store) as local:
        await pulled(local)
        await pulled(local, "org/second", draft=DRAFT)
        serve(local)
        async with opened(browser, local) as page:
            dialog = await remove_dialog(page)
            await expect(dialog).to_contain_text(
                "Its draft stays, for it is shared with org/second"
            )


async def test_a_model_in_use_stays_and_the_dialog_says_so(
    browser: Browser, hub: LocalHub, store: Store
):
    """It can be tried again there."""
    async with downloading(hub, store) as local:
        await pulled(local)
        serve(local)
        assert isinstance(local.engine, Library)
        local.engine.in_use = ModelInUse(MODEL, n_requests=1)
        async with opened(browser, local, may_fail=True) as page:
            dialog = await remove_dialog(page)
            await dialog.get_by_role("button", name="Remove").click()
            await expect(dialog.locator("#remove-error")).to_contain_text(
                "1 request running or waiting"
            )
            local.engine.in_use = None
            await dialog.get_by_role("button", name="Remove").click()
            await expect(dialog).to_be_hidden()


async def test_what_was_not_downloaded_has_no_remove_button(
    browser: Browser, hub: LocalHub, store: Store
):
    """The demo, or a folder."""
    async with downloading(hub, store) as local:
        serve(local)
        async with opened(browser, local) as page:
            await page.get_by_role("button", name=MODEL).click()
            await expect(page.locator(".model dl")).to_be_visible()
            await expect(page.get_by_role("button", name="Remove…")).to_have_count(0)


# --- whatever comes ----------------------------------------------------------------------------


async def test_names_of_models_and_files_are_shown_as_text(
    browser: Browser, hub: LocalHub, store: Store
):
    """Whatever markup they hold."""
    snapshot = Snapshot(HOSTILE, "0" * 40, (RepoFile(HOSTILE, 10, "0" * 40),))
    await asyncio.to_thread(store.put, Pulled(HOSTILE, snapshot, snapshot, HOSTILE))
    async with downloading(hub, store) as local, opened(browser, local) as page:
        place = page.locator("#downloads-place")
        await expect(place.locator(".name")).to_have_text(HOSTILE)
        await place.get_by_role("button", name="Remove…").click()
        await expect(page.locator("#remove-title")).to_have_text(f"Remove {HOSTILE}?")
        assert await page.locator("img").count() == 0


async def test_an_unreadable_list_is_told(browser: Browser, hub: LocalHub, store: Store):
    """With the file's name."""
    async with downloading(hub, store) as local:
        await asyncio.to_thread(store.path.parent.mkdir, parents=True)
        await asyncio.to_thread(store.path.write_text, "{")
        async with opened(browser, local, may_fail=True) as page:
            await expect(page.locator("#models-error")).to_contain_text("models.json")


@pytest.mark.parametrize(("size", "scheme"), thinned(product(SIZES, ("light", "dark"))))
async def test_the_dialogs_are_not_wider_than_the_window(
    browser: Browser, hub: LocalHub, store: Store, size: tuple[int, int], scheme: str
):
    """With a download under way and long words."""
    long = "org/" + 12 * "a-very-long-name-"
    hub.add(long[:90], model_files(100_000))
    gate = hub.gate(WEIGHTS, 50_000, repo=long[:90])
    view = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme}
    async with downloading(hub, store) as local, opened(browser, local, **view) as page:
        dialog = await install(page, long[:90])
        await expect(dialog.locator(".how")).to_contain_text("50")
        if SCREENSHOTS:
            path = Path(SCREENSHOTS) / f"install-{size[0]}x{size[1]}-{scheme}.png"
            await page.screenshot(path=path)
        assert not await page.evaluate(IS_WIDE)
        is_wide = "dialog => dialog.scrollWidth > dialog.clientWidth"
        assert not await dialog.evaluate(is_wide)
        await dialog.get_by_role("button", name="Remove…").click()
        removal = page.get_by_role("dialog", name=re.compile("^Remove"))
        assert not await removal.evaluate(is_wide)
        await removal.get_by_role("button", name="Keep it").click()
        await post(local, "stop", model=long[:90])
        gate.release()
