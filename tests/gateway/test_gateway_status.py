"""The nine statuses, as the gateway tells them apart, and a worker as its API shows it."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.gateway.records import Enrolled, Organisation, PlatformState, Report
from mlx_worker.gateway.status import lines, worker_json
from mlx_worker.records import MINUS, Settings
from mlx_worker.wire.link import (
    DECIDES,
    KV_PREFIX_CACHE,
    RUN_TOGETHER,
    SETTING,
    ModelReport,
    SettingsPart,
    Speculation,
    StatusReport,
)
from tests.gateway.fleet import CAPABILITIES, Gateway, ScriptedWorker, gateway

ACME = Organisation("o", "acme", 0.0)
ALL = frozenset(CAPABILITIES)
ON = Speculation(state="on", speedup=0.245, depth=3, requests=9)
AUTO = PlatformState()
OFF = PlatformState(speculative_decoding="off", display_name="Contoso")
SWITCHED_OFF = Settings(speculative_decoding="off")
TOGETHER = Settings(run_requests_together=True)


def model(speculation: Speculation | None = ON, **more: Any) -> ModelReport:
    values: dict[str, Any] = {"id": "m", "is_loaded": True, "draft": "d", **more}
    return ModelReport(**values, speculation=speculation)


def worker(
    reported: ModelReport | None = None,
    settings: Settings | None = Settings(),  # noqa: B008 (frozen)
    capabilities: frozenset[str] = ALL,
    **more: Any,
) -> Enrolled:
    report = Report("1.0", capabilities, settings, models=(reported or model(),))
    return Enrolled("w", "o", "Mac", "mww_…", 0.0, report=report, **more)


def text(
    enrolled: Enrolled, platform: PlatformState = AUTO, organisation: Organisation = ACME
) -> str | None:
    (line,) = lines(enrolled, None, organisation, platform)
    return line["speculation"]


@pytest.mark.parametrize(
    ("speculation", "shown"),
    [
        (ON, "On, +24%"),
        (Speculation(state="off", speedup=-0.18), f"Off, {MINUS}18%"),
        (Speculation(state="measuring"), "Measuring"),
        (Speculation(state="automatic"), "Automatic"),
    ],
)
def test_what_was_measured_is_shown(speculation: Speculation, shown: str):
    """Where nothing else comes first."""
    assert text(worker(model(speculation))) == shown


CASES: list[tuple[str | None, Enrolled, PlatformState, Organisation]] = [
    (None, worker(model(draft=None)), OFF, ACME),
    (None, worker(), OFF, replace(ACME, is_speculation_available=False)),
    (None, worker(model(draft_problem="does not fit")), AUTO, ACME),
    (None, worker(model(Speculation(state="none"))), AUTO, ACME),
    ("Needs a worker update", worker(settings=SWITCHED_OFF, capabilities=ALL - {DECIDES}), OFF,
     ACME),
    ("Off (by Contoso)", worker(settings=SWITCHED_OFF), OFF, ACME),
    ("Off (by Pendra)", worker(is_off_by_platform=True), AUTO, ACME),
    ("Off (worker's Settings)", worker(settings=replace(TOGETHER, speculative_decoding="off")),
     AUTO, ACME),
    ("Paused", worker(settings=TOGETHER), AUTO, ACME),
]  # fmt: skip


@pytest.mark.parametrize(("shown", "enrolled", "platform", "organisation"), CASES)
def test_what_comes_first_is_shown(
    shown: str | None, enrolled: Enrolled, platform: PlatformState, organisation: Organisation
):
    """No line, then an update, then the platform, then the worker's settings, then Paused."""
    assert text(enrolled, platform, organisation) == shown


def test_an_organisation_without_drafts_sees_nothing_of_them():
    """Not the draft's name or size either."""
    hidden = replace(ACME, is_speculation_available=False)
    (line,) = lines(worker(model(draft_bytes=5)), None, hidden, AUTO)
    assert (line["draft"], line["draft_bytes"], line["measured"]) == (None, None, None)


def test_the_figures_travel_with_the_line():
    """What was measured stays there under a switch."""
    (line,) = lines(worker(settings=SWITCHED_OFF), None, ACME, AUTO)
    assert line["measured"]["speedup"] == 0.245
    assert line["measured"]["state"] == "settings_off"


def test_the_reason_of_a_refused_pair_is_in_the_details():
    """There is no line, and the draft's problem."""
    (line,) = lines(worker(model(draft_problem="other vocabulary")), None, ACME, AUTO)
    assert (line["speculation"], line["draft_problem"]) == (None, "other vocabulary")


def test_a_worker_that_decides_but_takes_no_setting_keeps_its_status():
    """Whether it is pinned off is not known."""
    older = worker(settings=None, capabilities=frozenset({DECIDES}))
    shown = worker_json(older, None, ACME, AUTO)
    assert shown["speculative_pinned_off"] is None
    assert shown["models"][0]["speculation"] == "On, +24%"
    assert shown["takes"] == dict.fromkeys(
        ("speculative_decoding", "kv_prefix_cache", "run_requests_together"), False
    )


@pytest.mark.parametrize(
    ("capabilities", "settings", "pinned"),
    [
        (ALL, Settings(), False),
        (ALL, SWITCHED_OFF, True),
        (ALL, None, None),
        (ALL - {SETTING}, SWITCHED_OFF, None),
        (frozenset({SETTING, KV_PREFIX_CACHE, RUN_TOGETHER}), SWITCHED_OFF, True),
    ],
)
def test_pinned_off_follows_the_workers_settings(
    capabilities: frozenset[str], settings: Settings | None, pinned: bool | None
):
    """True, false, or not known; the platform's switch is another thing."""
    shown = worker_json(worker(None, settings, capabilities), None, ACME, OFF)
    assert shown["speculative_pinned_off"] is pinned


# --- of workers that are connected --------------------------------------------------------------


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path) as running:
        yield running


async def shown(hub: Gateway, scripted: ScriptedWorker) -> dict[str, Any]:
    await hub.registry.keep()
    enrolled = await hub.store.worker(hub.organisation.id, scripted.id)
    organisation = await hub.store.organisation(hub.organisation.id)
    assert enrolled
    assert organisation
    one = hub.registry.get(scripted.id)
    return worker_json(enrolled, one, organisation, await hub.store.platform())


async def line(hub: Gateway, scripted: ScriptedWorker) -> str | None:
    return (await shown(hub, scripted))["models"][0]["speculation"]


async def test_a_worker_that_has_not_reported_is_starting(hub: Gateway):
    """Then what it reports is shown."""
    scripted = hub.scripted(*await hub.enrol(), models=[model(None)])
    scripted.reports = None
    await scripted.connect()
    await hub.until(lambda: hub.registry.get(scripted.id) is not None)
    assert await line(hub, scripted) == "Starting"
    await scripted.send(StatusReport(models=(model(),), settings=SettingsPart()))
    await hub.until_reported(scripted)
    assert await line(hub, scripted) == "On, +24%"


async def test_a_model_that_is_not_loaded_is_automatic(hub: Gateway):
    """Nothing is measured of it, and nothing stands in its way."""
    scripted = await hub.worker(models=[model(None, is_loaded=False)])
    assert await line(hub, scripted) == "Automatic"


async def test_a_worker_that_went_away_shows_what_it_said(hub: Gateway):
    """With what is known of it, and since when."""
    scripted = await hub.worker(models=[model()])
    there = await shown(hub, scripted)
    assert there["connected"]
    assert there["since"] > 0
    assert there["queue"]["slots"] == 4
    await scripted.cut()
    await hub.until(lambda: hub.registry.get(scripted.id) is None)
    away = await shown(hub, scripted)
    assert (away["connected"], away["since"], away["queue"]) == (False, None, None)
    assert away["models"][0]["speculation"] == "On, +24%"
    assert away["version"] == "1.0"


async def test_a_change_is_pending_until_the_worker_has_it(hub: Gateway):
    """Then its own word is shown, and the line follows."""
    scripted = await hub.worker(models=[model()])
    scripted.acknowledges = False
    await hub.registry.change(scripted.worker, {"speculative_decoding": "off"})
    before = await shown(hub, scripted)
    assert (before["settings_pending"], before["speculative_pinned_off"]) == (True, False)
    scripted.acknowledges = True
    await scripted.cut()
    await scripted.again()
    await hub.until(lambda: not hub.registry.pending(scripted.worker))
    scripted.reports = None
    after = await shown(hub, scripted)
    assert (after["settings_pending"], after["speculative_pinned_off"]) == (False, True)
    assert after["models"][0]["speculation"] == "Off (worker's Settings)"


async def test_the_platforms_switch_keeps_the_workers_choice(hub: Gateway):
    """It applies again once the platform is back on."""
    scripted = await hub.worker(models=[model()], settings=SettingsPart(speculative_decoding="off"))
    await hub.store.switch_platform("off")
    await hub.registry.platform_changed()
    off = await shown(hub, scripted)
    assert off["models"][0]["speculation"] == "Off (by Pendra)"
    assert off["speculative_pinned_off"] is True
    assert off["platform"] == {"speculative_decoding": "off", "display_name": "Pendra"}
    await hub.store.switch_platform("auto")
    await hub.registry.platform_changed()
    assert await line(hub, scripted) == "Off (worker's Settings)"
