"""The gateway's console in a real browser, against a real gateway and scripted workers."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from mlx_worker.gateway.auth import LoginLimits
from mlx_worker.records import Settings
from mlx_worker.wire.link import SETTING
from tests.gateway.console_site import ALL, ScriptedWorker, Site, model, site
from tests.server.chromium import HOSTILE, IS_WIDE, SIZES, launched, needs_chromium, opened
from tests.tiers import thinned

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_chromium]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One for all tests; each has a context of its own."""
    async with launched() as browser:
        yield browser


@asynccontextmanager
async def signed_in(
    browser: Browser, site: Site, role: str = "owner", at: str = "", **context: Any
) -> AsyncIterator[Page]:
    """The console, with a key of that role. at: the part of the address after #."""
    async with opened(browser, site, may_fail=True, **context) as page:
        await sign_in(page, site.keys[role])
        await expect(page.get_by_role("button", name="Sign out")).to_be_visible()
        await expect(state(page)).to_have_text("Connected")
        if at:
            await page.goto(f"http://127.0.0.1:{site.port}/#{at}")
        yield page


async def sign_in(page: Page, key: str) -> None:
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Sign in").click()


def state(page: Page) -> Locator:
    return page.get_by_role("status").first


# --- signing in --------------------------------------------------------------------------------


async def test_the_right_key_opens_the_console_and_is_nowhere_kept(
    browser: Browser, tmp_path: Path
):
    """Neither in the address, nor in what scripts may store, nor in the page."""
    async with site(tmp_path) as here, signed_in(browser, here) as page:
        await expect(page.get_by_role("heading", name="Workers")).to_be_visible()
        await expect(page.get_by_text("Acme · Ada, owner")).to_be_visible()
        secret = here.keys["owner"]
        kept = await page.evaluate(
            "() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, "
            "location.href, document.documentElement.outerHTML, "
            "[...document.querySelectorAll('input')].map((input) => input.value)])"
        )
        assert secret not in kept
        assert secret[:20] not in kept


async def test_a_wrong_key_is_refused_in_words(browser: Browser, tmp_path: Path):
    """And the field is empty and has the focus, for the next try."""
    async with site(tmp_path) as here, opened(browser, here, may_fail=True) as page:
        await sign_in(page, "mwk_" + "x" * 43)
        alert = page.get_by_role("alert")
        await expect(alert.filter(has_text="doesn't know this key")).to_be_visible()
        await expect(page.get_by_label("API key")).to_be_focused()
        await expect(page.get_by_label("API key")).to_have_value("")


@pytest.mark.parametrize(("begins", "kind"), [("mww_", "a worker's"), ("mwp_", "a platform")])
async def test_a_key_of_another_kind_is_named(
    browser: Browser, tmp_path: Path, begins: str, kind: str
):
    """With which one is needed, and without being sent."""
    async with site(tmp_path) as here, opened(browser, here, True) as page:
        await sign_in(page, begins + "x" * 43)
        told = re.compile(rf"^This is {kind} key\. .* begins with mwk_ .*key create")
        await expect(page.locator("#key-error")).to_have_text(told)


async def test_too_many_tries_say_how_long_to_wait(browser: Browser, tmp_path: Path):
    """In seconds."""
    limits = LoginLimits(per_address=1, window_s=100.0)
    async with site(tmp_path, limits=limits) as here, opened(browser, here, True) as page:
        await sign_in(page, "mwk_" + "x" * 43)
        await expect(page.locator("#key-error")).to_have_text(re.compile("know this key"))
        await sign_in(page, here.keys["owner"])
        told = re.compile(r"^Too many tries with wrong keys\. Try again in (100|99) seconds\.$")
        await expect(page.locator("#key-error")).to_have_text(told)


async def test_signing_out_ends_the_session(browser: Browser, tmp_path: Path):
    """A reload asks for a key again."""
    async with site(tmp_path) as here, signed_in(browser, here) as page:
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_text("You are signed out.")).to_be_visible()
        await expect(page.get_by_role("navigation")).to_be_hidden()
        await page.reload()
        await expect(page.get_by_label("API key")).to_be_visible()


async def test_a_reload_keeps_the_session(browser: Browser, tmp_path: Path):
    """The cookie is enough."""
    async with site(tmp_path) as here, signed_in(browser, here) as page:
        await page.reload()
        await expect(page.get_by_role("heading", name="Workers")).to_be_visible()


async def test_a_session_that_is_over_brings_the_form_back(browser: Browser, tmp_path: Path):
    """With the reason, and without anybody touching the page."""
    async with site(tmp_path) as here, signed_in(browser, here) as page:
        keys = await here.store.keys(here.organisation.id)
        key = next(key for key in keys if key.role == "owner")
        await here.store.add_key(here.organisation.id, "another", "owner")
        await here.store.revoke_key(here.organisation.id, key.id)
        await expect(page.get_by_text("Your session is over.")).to_be_visible()
        await expect(page.get_by_label("API key")).to_be_focused()


# --- workers -----------------------------------------------------------------------------------


async def test_a_worker_appears_as_it_connects_and_goes(browser: Browser, tmp_path: Path):
    """Live; nobody reloads."""
    async with site(tmp_path) as here, signed_in(browser, here) as page:
        await expect(page.get_by_text("None yet. Add one, then start it.")).to_be_visible()
        worker = await here.worker("studio")
        async with worker.connected():
            item = page.get_by_role("listitem").filter(has=page.get_by_role("link", name="studio"))
            await expect(item).to_contain_text(re.compile("Connected since .*Version 0.9.0"))
        await expect(item).to_contain_text("Not connected since")


async def test_a_worker_is_added_with_lines_that_are_shown_once(browser: Browser, tmp_path: Path):
    """They are the lines of its configuration, and gone from the page when the dialog is."""
    may = ["clipboard-read", "clipboard-write"]
    async with site(tmp_path) as here, signed_in(browser, here, permissions=may) as page:
        await page.get_by_role("button", name="Add a worker…").click()
        await page.get_by_role("dialog").get_by_label("Name").fill("mini")
        await page.keyboard.press("Enter")
        lines = page.get_by_role("region", name="To be copied")
        await expect(lines).to_contain_text("mww_")
        (worker,) = await here.store.workers(here.organisation.id)
        form = (
            rf"gateway:\n  url: ws://127\.0\.0\.1:{here.port}\n  key: mww_{worker.id}_[\w-]{{43}}\n"
        )
        assert re.fullmatch(form, await lines.inner_text())
        await expect(page.get_by_role("button", name="Copy")).to_be_focused()
        await page.get_by_role("button", name="Copy").click()
        await expect(page.get_by_text("Copied.")).to_be_visible()
        copied = await page.evaluate("navigator.clipboard.readText()")
        assert re.fullmatch(form, copied)
        await page.get_by_role("button", name="Done").click()
        await expect(page.get_by_role("link", name="mini")).to_be_visible()
        await expect(page.locator("#once-text")).to_be_empty()
        assert "mww_" not in await page.content()


async def test_a_worker_is_disabled_after_a_second_thought(browser: Browser, tmp_path: Path):
    """Cancelling changes nothing."""
    async with site(tmp_path) as here, signed_in(browser, here) as page:
        worker = await here.worker("studio")
        async with worker.connected():
            await page.get_by_role("link", name="studio").click()
            for last in ("Cancel", "Disable"):
                await page.get_by_role("button", name="Disable this worker…").click()
                dialog = page.get_by_role("dialog", name="Disable studio?")
                await dialog.get_by_role("button", name=last, exact=True).click()
                await expect(dialog).to_be_hidden()
            await expect(page.get_by_role("heading", name="Workers")).to_be_focused()
            await expect(page.get_by_text("None yet.")).to_be_visible()
            assert await here.store.workers(here.organisation.id) == []


async def test_a_member_is_offered_what_its_key_allows(browser: Browser, tmp_path: Path):
    """It reads workers, settings and usage; adding, disabling, keys and changes aren't there."""
    async with site(tmp_path) as here:
        worker = await here.worker("studio")
        async with worker.connected(), signed_in(browser, here, "member") as page:
            await expect(page.get_by_role("link", name="Usage log")).to_be_visible()
            await page.get_by_role("link", name="studio").click()
            settings = page.get_by_role("region", name="Settings")
            await expect(settings.get_by_label("Speculative decoding")).to_have_text("Automatic")
            await expect(settings).to_contain_text("Your key may see these settings, not change")
            for role, name in (
                ("button", "Add a worker…"), ("button", "Disable this worker…"),
                ("link", "Keys"), ("link", "Changes"), ("combobox", "Speculative decoding"),
            ):  # fmt: skip
                await expect(page.get_by_role(role, name=name)).to_have_count(0)  # pyright: ignore[reportArgumentType]
            await page.goto(f"http://127.0.0.1:{here.port}/#/keys")
            await expect(page.get_by_role("heading", name="Workers")).to_be_visible()


async def test_names_from_workers_are_text(browser: Browser, tmp_path: Path):
    """Whatever markup they hold, nothing of it runs, on no part of the console."""
    hostile = model(HOSTILE, draft=HOSTILE, draft_problem=HOSTILE)
    async with site(tmp_path) as here:
        worker = await here.worker(HOSTILE, hostile)
        worker.version, worker.problem = HOSTILE, HOSTILE
        await here.used(worker.worker, model=HOSTILE, error=HOSTILE)
        async with worker.connected(), signed_in(browser, here) as page:
            await page.get_by_role("link", name=HOSTILE).click()
            await page.get_by_role("button", name=HOSTILE).click()
            await expect(page.get_by_role("heading", name=HOSTILE).first).to_have_text(HOSTILE)
            await expect(page.locator("#settings-problem")).to_contain_text(HOSTILE)
            await page.get_by_role("link", name="Usage log").click()
            await expect(page.get_by_role("cell", name=HOSTILE)).to_have_count(3)
            assert await page.locator("img, main script").count() == 0


# --- a worker's page ---------------------------------------------------------------------------


@asynccontextmanager
async def on_page_of(
    browser: Browser, here: Site, worker: ScriptedWorker, role: str = "owner"
) -> AsyncIterator[Page]:
    """The page of a connected worker."""
    async with worker.connected(), signed_in(browser, here, role) as page:
        await page.get_by_role("link", name=worker.worker.name).click()
        await expect(page.locator("#worker-state")).to_contain_text("Connected since")
        yield page


def row(page: Page, name: str = "gemma-4-e2b-it") -> Locator:
    return page.get_by_role("button", name=re.compile(re.escape(name)))


def line(page: Page) -> Locator:
    return page.locator("#models dt:text-is('Speculative decoding') + dd")


async def test_a_model_opens_on_what_is_known_of_it(browser: Browser, tmp_path: Path):
    """From the keyboard: context, bytes, the line, and the figures behind it."""
    async with site(tmp_path) as here:
        async with on_page_of(browser, here, await here.worker()) as page:
            await row(page).focus()
            await page.keyboard.press("Enter")
            told = await page.locator("#models dl").inner_text()
            for part in (
                "131,072 tokens", "5.1 GB", "gemma-4-e2b-it-assistant, 157 MB", "On, +24%",
                "38 requests were 24 % faster with drafts.", "+18% to +31%",
                "4 drafted tokens a round", "71 %", "2.94", "38 requests, 4,120 tokens",
            ):  # fmt: skip
                assert part in told, part


async def test_the_line_follows_the_worker_and_the_focus_stays(browser: Browser, tmp_path: Path):
    """Character for character, the minus sign included; the row stays open."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        async with on_page_of(browser, here, worker) as page:
            await row(page).click()
            for state, text in (("off", "Off, −18%"), ("measuring", "Measuring")):
                await worker.report(model("another"), model(state=state, speedup=-0.18))
                await expect(line(page).nth(1)).to_have_text(text)
                await expect(row(page)).to_be_focused()
                await expect(row(page)).to_have_attribute("aria-expanded", "true")


async def test_without_a_draft_there_is_no_line_but_the_reason(browser: Browser, tmp_path: Path):
    """In the row's details."""
    bare = model(state=None, draft=None, draft_bytes=None, draft_problem="vocabularies differ")
    async with site(tmp_path) as here:
        async with on_page_of(browser, here, await here.worker("studio", bare)) as page:
            await row(page).click()
            told = page.locator("#models dl")
            await expect(told).to_contain_text("Vocabularies differ.")
            await expect(line(page)).to_have_count(0)
            note = page.get_by_text("No model of this worker has a draft, so this changes nothing")
            await expect(note).to_be_visible()


async def test_switching_drafts_off_shows_in_the_line_and_goes_back(
    browser: Browser, tmp_path: Path
):
    """The worker has it, and the API says that it is pinned off."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        async with on_page_of(browser, here, worker) as page:
            await row(page).click()
            choice = page.get_by_label("Speculative decoding")
            for value, text, is_off in (
                ("Off", "Off (worker's Settings)", True),
                ("Automatic", "On, +24%", False),
            ):
                await choice.select_option(value)
                await expect(line(page)).to_have_text(text)
                said = f"Speculative decoding: {value}, from the next request on."
                await expect(page.get_by_text(said)).to_be_visible()
                assert worker.settings is not None
                assert (worker.settings.speculative_decoding == "off") == is_off
                found = await page.evaluate("fetch('/api/v1/workers').then((r) => r.json())")
                assert found["data"][0]["speculative_pinned_off"] is is_off


async def test_other_settings_reach_the_worker(browser: Browser, tmp_path: Path):
    """The KV prefix cache is on by default."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        async with on_page_of(browser, here, worker) as page:
            cache = page.get_by_label("KV prefix cache")
            await expect(cache).to_have_value("on")
            await cache.select_option("Off")
            said = "KV prefix cache: Off, from the next request on."
            await expect(page.get_by_text(said)).to_be_visible()
            assert worker.settings == Settings(kv_prefix_cache=False)


async def test_automatic_is_not_in_use_while_requests_run_together(
    browser: Browser, tmp_path: Path
):
    """It is marked so in the choice itself, and the line says Paused."""
    async with site(tmp_path) as here:
        async with on_page_of(browser, here, await here.worker()) as page:
            await row(page).click()
            await page.get_by_label("Run requests together").select_option("On")
            chosen = page.get_by_label("Speculative decoding").locator("option:checked")
            await expect(chosen).to_have_text("Automatic (not in use)")
            note = "Automatic is not in use while Run requests together is on."
            await expect(page.get_by_text(note)).to_be_visible()
            await expect(line(page)).to_have_text("Paused")


async def test_an_organisation_that_isnt_offered_drafts_sees_nothing_of_them(
    browser: Browser, tmp_path: Path
):
    """Neither a line nor a setting, from the moment on."""
    async with site(tmp_path) as here:
        async with on_page_of(browser, here, await here.worker()) as page:
            await row(page).click()
            await expect(line(page)).to_be_visible()
            await here.store.offer_speculation(here.organisation.id, False)
            await here.registry.platform_changed()
            await expect(line(page)).to_have_count(0)
            await expect(page.get_by_label("Speculative decoding")).to_be_hidden()
            await expect(page.get_by_label("KV prefix cache")).to_be_visible()


async def test_the_platforms_switch_keeps_the_choice(browser: Browser, tmp_path: Path):
    """It says by whom it is off; the choice can be made, and applies once it is back."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        await here.store.set_display_name("Cloud & Co")
        async with on_page_of(browser, here, worker) as page:
            await row(page).click()
            await here.store.switch_platform("off")
            await here.registry.platform_changed()
            await expect(line(page)).to_have_text("Off (by Cloud & Co)")
            note = "Cloud & Co has switched speculative decoding off. Your choice is kept and"
            await expect(page.get_by_text(note)).to_be_visible()
            await page.get_by_label("Speculative decoding").select_option("Off")
            await expect(page.get_by_text("from the next request on")).to_be_visible()
            await here.store.switch_platform("auto")
            await here.registry.platform_changed()
            await expect(line(page)).to_have_text("Off (worker's Settings)")


async def test_an_older_worker_is_to_be_updated(browser: Browser, tmp_path: Path):
    """Its settings can't be changed from here, and the line says why."""
    async with site(tmp_path) as here:
        worker = await here.worker("studio", model(state=None))
        worker.settings, worker.capabilities = None, ()
        async with on_page_of(browser, here, worker) as page:
            await row(page).click()
            await expect(line(page)).to_have_text("Needs a worker update")
            for name in ("Speculative decoding", "KV prefix cache", "Run requests together"):
                await expect(page.get_by_label(name)).to_be_disabled()
            await expect(page.get_by_text("Update the worker, then")).to_have_count(3)


async def test_a_worker_that_decides_but_takes_no_setting_has_its_file(
    browser: Browser, tmp_path: Path
):
    """Its line stays as it is."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        worker.capabilities = tuple(one for one in ALL if one != SETTING)
        async with on_page_of(browser, here, worker) as page:
            await row(page).click()
            await expect(line(page)).to_have_text("On, +24%")
            await expect(page.get_by_label("Speculative decoding")).to_be_disabled()
            await expect(page.get_by_text("policies.json in its folder works")).to_be_visible()
            await expect(page.get_by_label("KV prefix cache")).to_be_enabled()


async def test_a_file_of_settings_that_cant_be_read_is_an_error(browser: Browser, tmp_path: Path):
    """With the worker's own words."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        worker.problem, worker.settings = "policies.json: can't be read: no JSON", Settings("off")
        async with on_page_of(browser, here, worker) as page:
            alert = page.get_by_role("alert").filter(has_text="can't be read: no JSON")
            await expect(alert).to_be_visible()
            await expect(page.get_by_label("Speculative decoding")).to_be_disabled()


async def test_a_worker_that_is_away_keeps_its_settings(browser: Browser, tmp_path: Path):
    """They are shown, and can't be changed until it is back; it comes back by itself."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        async with worker.connected():
            pass
        async with signed_in(browser, here, at=f"/workers/{worker.worker.id}") as page:
            choice = page.get_by_label("Speculative decoding")
            await expect(page.get_by_text("The worker is not connected.")).to_be_visible()
            await expect(choice).to_be_disabled()
            async with worker.connected():
                await expect(choice).to_be_enabled()


async def test_a_change_waits_for_the_workers_word(browser: Browser, tmp_path: Path):
    """Until then it is marked as sent."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        worker.acks.clear()
        async with on_page_of(browser, here, worker) as page:
            await page.get_by_label("Speculative decoding").select_option("Off")
            await expect(page.get_by_text("Sent, not yet confirmed by the worker.")).to_be_visible()
            await expect(page.get_by_label("Speculative decoding")).to_have_value("off")
            worker.acks.set()
            await expect(page.get_by_text("Off, from the next request on.")).to_be_visible()


# --- the usage log -----------------------------------------------------------------------------


async def test_the_usage_log_has_a_row_for_each_request(browser: Browser, tmp_path: Path):
    """Live; a dash where no draft was used."""
    async with site(tmp_path) as here, signed_in(browser, here, at="/usage") as page:
        await expect(page.get_by_text("No request fits.")).to_be_visible()
        worker = await here.worker()
        await here.used(worker.worker)
        await here.used(worker.worker, draft_acceptance_rate=None)
        rows = page.get_by_role("row")
        await expect(rows).to_have_count(3)
        await expect(rows.nth(1).get_by_role("cell").nth(8)).to_have_text("–")
        texts = await rows.nth(2).get_by_role("cell").all_inner_texts()
        expected = ["Ada", "studio", "gemma-4-e2b-it", "12", "340", "182 ms", "58.1", "71 %"]
        assert texts[1:] == [*expected, "stop"]
        lines = page.get_by_role("img", name=re.compile("Acceptance of drafts of the last 2"))
        await expect(lines).to_be_visible()


async def test_filters_narrow_the_log_and_its_download(browser: Browser, tmp_path: Path):
    """By worker, model, errors and time; the download has the same rows."""
    async with site(tmp_path) as here:
        worker = await here.worker("mini")
        await here.used(worker.worker, model="qwen3-8b", error="worker_lost", finish_reason=None)
        for _ in range(3):
            await here.used()
        async with signed_in(browser, here, at="/usage") as page:
            rows = page.get_by_role("row")
            await expect(rows).to_have_count(5)
            for label, choice in (("Worker", "mini"), ("Model", "qwen3-8b"), ("Key", "Ada")):
                await page.get_by_label(label, exact=True).select_option(choice)
                n = 4 if label == "Key" else 1
                await expect(rows).to_have_count(1 + n)
                await page.get_by_label(label, exact=True).select_option("All")
                await expect(rows).to_have_count(5)
            await page.get_by_label("Time").select_option("The last hour")
            await page.get_by_label("Errors only").check()
            await expect(rows).to_have_count(2)
            async with page.expect_download() as downloading:
                await page.get_by_role("link", name="Download as CSV").click()
            path = await (await downloading.value).path()
            (_, row) = await asyncio.to_thread(lambda: path.read_text().splitlines())
            assert "worker_lost" in row


async def test_older_requests_come_page_by_page(browser: Browser, tmp_path: Path):
    """None twice, none left out, also while new ones come."""
    async with site(tmp_path) as here:
        for _ in range(120):
            await here.used()
        async with signed_in(browser, here, at="/usage") as page:
            rows = page.locator("#usage-rows tr")
            await expect(rows).to_have_count(50)
            await here.used()
            await expect(rows).to_have_count(51)
            for n in (101, 121):
                await page.get_by_role("button", name="Older requests").click()
                await expect(rows).to_have_count(n)
            await expect(page.get_by_role("button", name="Older requests")).to_be_hidden()
            await expect(page.get_by_text("121 shown, all there are.")).to_be_visible()


async def test_a_worker_leads_to_its_own_requests(browser: Browser, tmp_path: Path):
    """The filter is set; the page itself has sparklines of them."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        await here.used(worker.worker)
        await here.used()
        async with on_page_of(browser, here, worker) as page:
            await expect(page.get_by_text("The last 1 request.")).to_be_visible()
            speeds = page.get_by_role("img", name=re.compile("Tokens per second of the last 1"))
            await expect(speeds).to_be_visible()
            await page.get_by_role("link", name="All requests of this worker").click()
            await expect(page.get_by_role("row")).to_have_count(2)


# --- keys and changes --------------------------------------------------------------------------


async def test_a_key_is_created_shown_once_and_revoked(browser: Browser, tmp_path: Path):
    """It works in between."""
    async with site(tmp_path) as here, signed_in(browser, here, at="/keys") as page:
        await page.get_by_role("button", name="Create a key…").click()
        dialog = page.get_by_role("dialog", name="Create a key")
        await dialog.get_by_label("Name").fill("batch")
        await dialog.get_by_label("manage workers").check()
        await dialog.get_by_role("button", name="Create").click()
        shown = page.get_by_role("region", name="To be copied")
        await expect(shown).to_have_text(re.compile(r"^mwk_[\w-]{43}$"))
        secret = await shown.inner_text()
        key = await here.store.key_of(secret)
        assert key is not None
        assert (key.role, key.extra) == ("member", {"manage_workers"})
        await page.get_by_role("button", name="Done").click()
        await expect(page.locator("#once-text")).to_be_empty()
        assert secret not in await page.content()
        row = page.get_by_role("row").filter(has_text="batch")
        await expect(row).to_contain_text("send requests, see workers, manage workers")
        await page.get_by_role("button", name="Revoke batch…").click()
        await page.get_by_role("button", name="Revoke", exact=True).click()
        await expect(page.get_by_role("heading", name="Keys")).to_be_focused()
        await expect(row).to_have_count(0)
        assert await here.store.key_of(secret) is None


async def test_owners_see_who_changed_what(browser: Browser, tmp_path: Path):
    """Every change of the console is there."""
    async with site(tmp_path) as here:
        async with on_page_of(browser, here, await here.worker()) as page:
            await page.get_by_label("Speculative decoding").select_option("Off")
            await expect(page.get_by_text("from the next request on")).to_be_visible()
            await page.get_by_role("link", name="Changes").click()
            row = page.get_by_role("row").filter(has_text="worker.settings")
            await expect(row).to_contain_text("Ada")


# --- being away, and being seen ----------------------------------------------------------------


AWAY = "The gateway can't be reached. What is shown may be old. Trying again every 2 seconds."


async def test_a_gateway_that_is_gone_is_missed_and_found_again(browser: Browser, tmp_path: Path):
    """Afterwards everything is fresh."""
    async with site(tmp_path) as here, signed_in(browser, here) as page:
        await here.stop()
        await expect(state(page)).to_have_text("Not connected, trying again")
        await expect(page.locator("#trouble")).to_have_text(AWAY)
        await here.worker("late")
        await here.start()
        await expect(state(page)).to_have_text("Connected", timeout=10_000)
        await expect(page.get_by_role("link", name="late")).to_be_visible()
        await expect(page.locator("#trouble")).to_be_hidden()


@pytest.mark.parametrize(("size", "scheme"), thinned(product(SIZES, ("light", "dark"))))
async def test_no_part_is_wider_than_the_screen(
    browser: Browser, tmp_path: Path, size: tuple[int, int], scheme: str
):
    """From a phone to a desktop, in both schemes; tables scroll in themselves."""
    look: dict[str, Any] = {
        "viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme,
    }  # fmt: skip
    async with site(tmp_path) as here:
        worker = await here.worker("a-name-that-goes-on-and-on-" * 2)
        await here.used(worker.worker)
        async with worker.connected(), signed_in(browser, here, **look) as page:
            for at in ("/workers", f"/workers/{worker.worker.id}", "/usage", "/keys", "/changes"):
                await page.goto(f"http://127.0.0.1:{here.port}/#{at}")
                await expect(page.locator("main h2:visible").first).to_be_visible()
                assert not await page.evaluate(IS_WIDE), at


async def test_everything_is_reached_from_the_keyboard(browser: Browser, tmp_path: Path):
    """From the field of the key to a setting, with Tab, Enter and arrows alone."""
    async with site(tmp_path) as here:
        worker = await here.worker()
        async with worker.connected(), opened(browser, here, may_fail=True) as page:
            await expect(page.get_by_label("API key", exact=True)).to_be_focused()
            await page.keyboard.type(here.keys["owner"])
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("link", name="studio")).to_be_visible()
            await tab_to(page, "studio")
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("heading", name="studio")).to_be_focused()
            await tab_to(page, "speculative-decoding")
            await page.keyboard.press("ArrowDown")
            await expect(page.get_by_text("Off, from the next request on.")).to_be_visible()
            await expect(page.get_by_label("Speculative decoding")).to_be_focused()


async def tab_to(page: Page, what: str) -> None:
    """Tab until the element with this text or id has the focus."""
    focused = "[document.activeElement.textContent.trim(), document.activeElement.id]"
    for _ in range(40):
        if what in await page.evaluate(focused):
            return
        await page.keyboard.press("Tab")
    raise AssertionError(f"{what} is not reached")
