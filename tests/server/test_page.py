"""The console page in a real browser, against a real server and a scripted engine.

MLX_WORKER_SCREENSHOTS=FOLDER keeps a picture of each size and scheme.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from mlx_worker.errors import ConfigError, Overloaded
from mlx_worker.records import Call, Done, ReplyEvent, Settings, Started, Text, Timing, Usage
from mlx_worker.server.chat import ROUTES
from mlx_worker.server.keys import METRICS
from tests.server.chromium import (
    HOSTILE,
    IS_WIDE,
    SCREENSHOTS,
    SIZES,
    launched,
    needs_chromium,
    opened,
)
from tests.server.local import KEY, KEYED, ScriptedEngine, serving
from tests.tiers import thinned

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_chromium]


# --- the worker --------------------------------------------------------------------------------


def model(
    id: str = "gemma-4-e2b-it", line: str | None = "On, +24%", **facts: Any
) -> dict[str, Any]:
    measured = {
        "state": "on", "speedup": 0.24, "low": 0.18, "high": 0.31, "depth": 4, "acceptance": 0.71,
        "tokens_per_round": 2.94, "requests": 38, "tokens": 4120,
        "why": "38 requests were 24 % faster with drafts",
    }  # fmt: skip
    return {
        "id": id, "is_loaded": True, "context_limit": 131072, "target_bytes": 5_120_000_000,
        "draft": "gemma-4-e2b-it-assistant", "draft_bytes": 157_000_000, "draft_problem": None,
        "speculation": line, "measured": measured if line else None,
        "kv_prefix_cache": {"requests": 40, "hits": 12, "saved_tokens": 8400, "bytes": 2**27},
        **facts,
    }  # fmt: skip


def facts(*models: dict[str, Any], state: str = "ready", why: str = "") -> dict[str, Any]:
    return {
        "state": state,
        "why": why,
        "queue": {"running": 1, "waiting": 0, "limit": 32},
        "memory": {"active_bytes": 5_300_000_000},
        "models": list(models or [model()]),
    }


def done(tokens_per_s: float = 58.0, drafted: int = 0, accepted: int = 0) -> Done:
    decode_ms = 1000 * 29 / tokens_per_s
    return Done(
        "stop", Usage(7, 30), Timing(900.0, 180.0, decode_ms, 30, 9, 29, 10, drafted, accepted)
    )


class Writer(ScriptedEngine):
    """Writes `pieces`, then waits at its gate, which is open unless a test closes it."""

    def __init__(self, *models: dict[str, Any], pieces: Sequence[str] = ("Once ", "upon ")) -> None:
        super().__init__(facts(*models))
        self.pieces = pieces
        self.calls: list[Call] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.left = asyncio.Event()  # the call's events were closed

    async def submit(self, call: Call) -> AsyncGenerator[Started | ReplyEvent, None]:
        if self.refusal:
            raise self.refusal
        self.calls.append(call)
        try:
            yield Started("gemma-4", 7, 12.0)
            for n, piece in enumerate(self.pieces):
                yield ReplyEvent(0, Text((n,), piece))
            await self.gate.wait()
            yield ReplyEvent(0, done(drafted=40, accepted=28))
        finally:
            self.left.set()


# --- the browser -------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One for all tests; each has a context of its own."""
    async with launched() as browser:
        yield browser


def row(page: Page, name: str = "gemma-4-e2b-it") -> Locator:
    return page.get_by_role("button", name=re.compile(re.escape(name)))


async def send(page: Page, prompt: str = "Tell me a story.") -> None:
    await page.get_by_label("Prompt").fill(prompt)
    await page.get_by_role("button", name="Send").click()


# --- header and models -------------------------------------------------------------------------


async def test_the_header_says_how_the_worker_is(browser: Browser):
    """Ready, or failing with the reason; version and uptime beside it."""
    async with serving(Writer()) as local, opened(browser, local) as page:
        state = page.get_by_role("status").first
        await expect(state).to_have_text("Ready")
        await expect(page.locator("#facts")).to_have_text(re.compile(r"Version \d.* · up \d+ s"))
        local.engine.facts = facts(
            state="failing", why="no progress for 121 s, 120 s are the limit"
        )
        await expect(state).to_have_text("Failing: no progress for 121 s, 120 s are the limit")
        local.engine.facts = facts(state="draining")
        await expect(state).to_have_text(re.compile("^Draining"))


async def test_the_line_of_a_model_is_the_status_text_and_follows_it(browser: Browser):
    """Character for character, the minus sign included."""
    async with serving(Writer()) as local, opened(browser, local) as page:
        await row(page).click()
        line = page.locator("dt:text-is('Speculative decoding') + dd")
        await expect(line).to_have_text("On, +24%")
        for text in ("Off, −18%", "Off (worker's Settings)"):
            local.engine.facts = facts(model(line=text))
            await expect(line).to_have_text(text)


async def test_a_row_opens_from_the_keyboard(browser: Browser):
    """With everything that was measured."""
    async with serving(Writer()) as local, opened(browser, local) as page:
        await expect(row(page)).to_have_attribute("aria-expanded", "false")
        await page.keyboard.press("Tab")  # past the link to the content
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(row(page)).to_have_attribute("aria-expanded", "true")
        told = await page.locator(".model dl").inner_text()
        for part in (
            "131,072 tokens", "5.1 GB", "gemma-4-e2b-it-assistant, 157 MB",
            "38 requests were 24 % faster with drafts.", "+18% to +31%", "4 drafted tokens a round",
            "71 %", "2.94", "38 requests, 4,120 tokens", "12 of 40 requests", "8,400 tokens",
        ):  # fmt: skip
            assert part in told, part


async def test_a_row_stays_open_and_keeps_the_focus_while_figures_change(browser: Browser):
    """Polling must not throw anybody out of where they are."""
    async with serving(Writer()) as local, opened(browser, local) as page:
        await row(page).click()
        local.engine.facts = facts(model("another"), model(line="Measuring"))
        await expect(page.locator(".model")).to_have_count(2)
        await expect(page.locator("dd:text-is('Measuring')")).to_be_visible()
        await expect(row(page)).to_be_focused()


async def test_without_a_draft_there_is_no_line(browser: Browser):
    """The reason is there, if there is one."""
    bare = model(line=None, draft=None, draft_bytes=0, draft_problem="vocabularies differ")
    async with serving(Writer(bare)) as local, opened(browser, local) as page:
        await row(page).click()
        await expect(page.locator("dt:text-is('Draft problem') + dd")).to_have_text(
            "Vocabularies differ."
        )
        await expect(page.locator("dt:text-is('Speculative decoding')")).to_have_count(0)
        await expect(page.locator("#speculative-note")).to_contain_text("changes nothing")


async def test_a_model_that_was_never_loaded_has_a_row(browser: Browser):
    """Little is known of it yet."""
    unknown = {"id": "later", "is_loaded": False, "speculation": None, "measured": None}
    async with serving(Writer(unknown)) as local, opened(browser, local) as page:
        row = page.get_by_role("button", name="later Not loaded", exact=True)
        await row.click()
        await expect(row).to_have_attribute("aria-expanded", "true")


async def test_names_and_replies_are_shown_as_text(browser: Browser):
    """Whatever markup they hold, nothing of it runs."""
    hostile = model(HOSTILE, draft=HOSTILE, measured={"why": HOSTILE}, draft_problem=HOSTILE)
    engine = Writer(hostile, model("other"), pieces=(HOSTILE, "</div><script>alert(2)</script>"))
    async with serving(engine, ROUTES) as local, opened(browser, local) as page:
        await row(page, HOSTILE).click()
        await send(page)
        await expect(page.locator("#reply")).to_have_text(
            f"{HOSTILE}</div><script>alert(2)</script>"
        )
        await expect(page.locator(".model .name").first).to_have_text(HOSTILE)
        assert await page.locator("img, main script").count() == 0
        assert engine.calls[0].model == HOSTILE


# --- figures -----------------------------------------------------------------------------------


async def test_drafted_and_plain_replies_are_drawn_apart(browser: Browser):
    """Filled and hollow, with a legend in words."""
    async with serving(Writer()) as local:
        recent = local.app[METRICS].recent
        for _ in range(3):
            recent.add([done(58.0, drafted=40, accepted=28), done(31.0)], 0.0)
        async with opened(browser, local) as page:
            await expect(page.locator("#sparkline rect.drafted")).to_have_count(3)
            await expect(page.locator("#sparkline rect.plain")).to_have_count(3)
            await expect(page.locator("#drafted-legend")).to_have_text("drafted: 3, median 58.0")
            await expect(page.locator("#plain-legend")).to_have_text("plain: 3, median 31.0")
            tiles = page.locator("#figures")
            await expect(tiles).to_contain_text("70 %mean of 3 drafted replies")
            await expect(tiles).to_contain_text("180 ms")


# --- a prompt ----------------------------------------------------------------------------------


async def test_a_prompt_is_answered_as_it_is_written(browser: Browser):
    """Its timing stands below it at the end."""
    engine = Writer()
    engine.gate.clear()
    async with serving(engine, ROUTES) as local, opened(browser, local) as page:
        await page.get_by_label("Max tokens").fill("64")
        await page.get_by_label("Speculation", exact=True).select_option("On")
        await send(page)
        await expect(page.locator("#reply")).to_have_text("Once upon ")
        await expect(page.locator("#timing")).to_have_text("")
        engine.gate.set()
        timing = "58.0 tokens per second · first token after 192 ms · acceptance 70 % · 30 tokens"
        await expect(page.locator("#timing")).to_have_text(timing)
        await expect(page.get_by_role("button", name="Send")).to_be_enabled()
        (call,) = engine.calls
        assert (call.max_tokens, call.speculation) == (64, "on")
        assert call.messages == ({"role": "user", "content": "Tell me a story."},)


async def test_stop_ends_the_reply_at_the_engine(browser: Browser):
    """From the keyboard: the focus has gone along to Stop."""
    engine = Writer()
    engine.gate.clear()
    async with serving(engine, ROUTES) as local, opened(browser, local) as page:
        await send(page)
        await expect(page.locator("#reply")).to_have_text("Once upon ")
        await page.keyboard.press("Enter")
        async with asyncio.timeout(5):
            await engine.left.wait()
        await expect(page.locator("#timing")).to_have_text("Stopped.")
        await expect(page.get_by_role("button", name="Send")).to_be_focused()


async def test_an_error_is_shown_in_place(browser: Browser):
    """And the next try is free of it."""
    engine = Writer()
    engine.refusal = Overloaded("32 requests wait already", retry_after_s=3)
    async with serving(engine, ROUTES) as local, opened(browser, local, may_fail=True) as page:
        await send(page)
        error = page.locator("#try-error")
        await expect(error).to_have_text("32 requests wait already. hint: try again in 3 s.")
        engine.refusal = None
        await page.get_by_label("Prompt").press("Control+Enter")
        await expect(page.locator("#reply")).to_have_text("Once upon ")
        await expect(error).to_have_text("")


# --- settings ----------------------------------------------------------------------------------


async def test_a_change_of_settings_reaches_the_engine(browser: Browser):
    """And is confirmed in words."""
    async with serving(Writer()) as local, opened(browser, local) as page:
        await page.get_by_label("Speculative decoding").select_option("Off")
        said = page.locator("#settings-done")
        await expect(said).to_have_text("Speculative decoding: Off, from the next request on.")
        await page.get_by_label("KV prefix cache").select_option("Off")
        await expect(said).to_have_text("KV prefix cache: Off, from the next request on.")
        await page.get_by_label("Run requests together").select_option("On")
        await expect(said).to_have_text("Run requests together: On, from the next request on.")
        assert local.engine.in_force == Settings("off", False, True)


NOT_IN_USE = [
    (
        {"paused": True},
        "Automatic is not in use while Run requests together is on; this choice is kept.",
    ),
    (
        {"platform": {"speculative_decoding": "off", "display_name": "Acme"}},
        "Switched off by Acme; this choice is kept, and applies once it is back on.",
    ),
    (
        {"platform": {"speculative_decoding": "unavailable", "display_name": "Acme"}},
        "Not offered to this worker's organisation; this choice is kept.",
    ),
]


@pytest.mark.parametrize(("status", "note"), NOT_IN_USE)
async def test_automatic_that_is_not_in_use_is_marked(
    browser: Browser, status: dict[str, Any], note: str
):
    """With why; the choice stays as it was, and can be changed."""
    engine = Writer()
    engine.facts |= status
    async with serving(engine) as local, opened(browser, local) as page:
        choice = page.get_by_label("Speculative decoding")
        await expect(choice).to_have_value("auto")
        await expect(choice.locator("option").first).to_have_text("Automatic (not in use)")
        await expect(page.locator("#speculative-note")).to_have_text(note)
        for name in status:
            del engine.facts[name]
        await expect(choice.locator("option").first).to_have_text("Automatic")


async def test_what_run_requests_together_does_not_do_yet_is_said(browser: Browser):
    """Beside the choice."""
    async with serving(Writer()) as local, opened(browser, local) as page:
        together = page.get_by_label("Run requests together")
        await expect(together).to_have_value("off")
        await expect(together).to_have_accessible_description(re.compile("one request after the"))


@pytest.mark.parametrize(
    ("link", "text"),
    [
        (None, ""),
        (
            {"url": "gw.example", "state": "connected", "why": "", "name": "<b>Mac</b>"},
            "Gateway gw.example: connected as <b>Mac</b>",
        ),
        (
            {"url": "gw.example", "state": "key rejected", "why": "unknown", "name": None},
            "Gateway gw.example: key rejected, unknown",
        ),
    ],
)
async def test_the_header_says_how_the_link_is(
    browser: Browser, link: dict[str, Any] | None, text: str
):
    """Nothing without a gateway."""
    async with serving(Writer(), link=link) as local, opened(browser, local) as page:
        await expect(page.locator("#state")).to_have_text("Ready")
        await expect(page.locator("#link")).to_have_text(text)


async def test_a_change_that_fails_is_taken_back(browser: Browser):
    """The control shows what is in force, the error why."""
    engine = Writer()
    engine.refusal = ConfigError("policies.json: can't be written")
    async with serving(engine) as local, opened(browser, local, may_fail=True) as page:
        choice = page.get_by_label("Speculative decoding")
        await choice.select_option("Off")
        await expect(page.locator("#settings-error")).to_have_text(
            "Speculative decoding was not changed: policies.json: can't be written."
        )
        await expect(choice).to_have_value("auto")
        assert engine.in_force == Settings()


# --- coming and going --------------------------------------------------------------------------


async def test_the_page_asks_for_the_key_once(browser: Browser):
    """A wrong one is refused in words; the right one serves everything, and a reload too."""
    async with (
        serving(Writer(), ROUTES, **KEYED) as local,
        opened(browser, local, may_fail=True) as page,
    ):
        key, use = page.get_by_label("Key", exact=True), page.get_by_role("button", name="Use")
        await expect(key).to_be_focused()
        await expect(page.locator("main")).to_be_hidden()
        await key.fill("mwk-wrong-0123456789")
        await use.click()
        await expect(page.locator("#key-error")).to_have_text("The worker doesn't know this key.")
        await key.fill(KEY)
        await use.click()
        await expect(row(page)).to_be_visible()
        await send(page)
        await expect(page.locator("#timing")).to_contain_text("tokens per second")
        await page.reload()
        await expect(row(page)).to_be_visible()
        await page.get_by_label("KV prefix cache").select_option("Off")
        await expect(page.locator("#settings-done")).to_contain_text("Off")
        assert KEY not in page.url


async def test_a_worker_that_is_gone_is_missed_and_found_again(browser: Browser):
    """At the same address; settings are read anew, for they may be others."""
    async with AsyncExitStack() as stack:
        async with serving(Writer()) as first:
            page = await stack.enter_async_context(opened(browser, first, may_fail=True))
            await expect(page.locator("#state")).to_have_text("Ready")
        trouble = page.locator("#trouble")
        await expect(trouble).to_contain_text("The worker can't be reached. Figures are from ")
        await expect(page.locator("#state")).to_have_text("Not connected")
        engine = Writer(model(line="Automatic"))
        engine.in_force = Settings("off")
        await stack.enter_async_context(serving(engine, port=first.port))
        await expect(page.locator("#state")).to_have_text("Ready")
        await expect(trouble).to_be_hidden()
        await expect(page.locator(".glance")).to_contain_text("Automatic")
        await expect(page.get_by_label("Speculative decoding")).to_have_value("off")


async def test_a_page_that_nobody_sees_asks_nothing(browser: Browser):
    """Once it is seen again, it asks at once."""
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    async with serving(Writer()) as local, opened(browser, local) as page:
        await expect(page.locator("#state")).to_have_text("Ready")
        await page.evaluate(hide % "true" + tell)
        local.engine.facts = facts(state="draining")
        await asyncio.sleep(2.5)
        await expect(page.locator("#state")).to_have_text("Ready")
        await page.evaluate(hide % "false" + tell)
        await expect(page.locator("#state")).to_have_text(re.compile("Draining"), timeout=1000)


async def test_a_kept_page_works_after_a_reload(browser: Browser):
    """Its files come from the browser's cache then, with their policy."""
    async with serving(Writer()) as local, opened(browser, local) as page:
        for _ in range(2):
            await expect(row(page)).to_be_visible()
            await page.reload()
        await expect(row(page)).to_be_visible()


# --- looks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "scheme"), thinned(product(SIZES, ["light", "dark"])))
async def test_nothing_is_wider_than_the_window(
    browser: Browser, size: tuple[int, int], scheme: str
):
    """With an open row, long words and a reply in it."""
    engine = Writer(model(), model("org/" + 12 * "a-very-long-name-", line="Off, −18%"))
    engine.pieces = ("A whale named Olga swam north. ", 200 * "x")
    view = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme}
    async with serving(engine, ROUTES) as local:
        for n in range(24):
            recent = local.app[METRICS].recent
            recent.add([done(52.0 + n % 7, 40, 28) if n % 3 else done(30.0 + n % 4)], 9.0)
        async with opened(browser, local, **view) as page:
            await row(page).first.click()
            await send(page)
            await expect(page.locator("#timing")).to_contain_text("tokens per second")
            await expect(page.locator("#drafted-legend")).to_contain_text("median")
            if SCREENSHOTS:
                path = Path(SCREENSHOTS) / f"page-{size[0]}x{size[1]}-{scheme}.png"
                await page.screenshot(path=path, full_page=True)
            assert not await page.evaluate(IS_WIDE)
