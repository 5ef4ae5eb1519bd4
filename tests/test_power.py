"""What a machine says of its power: read from texts and files of the forms that there are."""

from importlib import import_module
from pathlib import Path

import pytest

from mlx_worker.link.report import is_news, status_report
from mlx_worker.power import (
    ASK_S,
    GAP_S,
    LOOK_S,
    THERMAL,
    Pmset,
    Power,
    Sleep,
    Watch,
    changes,
    from_pmset,
    from_process_info,
    from_supplies,
    power,
)
from mlx_worker.records import Disturbance
from mlx_worker.wire.link import StatusReport

NO_WARNING = "Note: No thermal warning level has been recorded\n"


@pytest.mark.parametrize(
    ("battery", "heat", "settings", "found"),
    [
        ("Now drawing from 'AC Power'\n", NO_WARNING, "", Power(False, "nominal")),
        ("Now drawing from 'Battery Power'\n -InternalBattery-0", "", "", Power(True, None)),
        ("", "CPU_Speed_Limit \t= 100\n", "", Power(None, "nominal")),
        ("", "CPU_Speed_Limit \t= 62\n", "", Power(None, "serious")),
        ("", "", " lowpowermode         1\n", Power(None, None, True)),
        ("", "", " sleep  1\n lowpowermode         0\n", Power(None, None, False)),
        ("", "", "", Power()),
    ],
)
def test_pmsets_words_are_read(battery: str, heat: str, settings: str, found: Power):
    """What it doesn't say isn't known."""
    assert from_pmset(battery, heat, settings) == found


@pytest.mark.parametrize(
    ("supplies", "found"),
    [
        ({"AC": ("Mains", ""), "BAT0": ("Battery", "Discharging")}, True),
        ({"AC": ("Mains", ""), "BAT0": ("Battery", "Full")}, False),
        ({"AC": ("Mains", "")}, None),
        ({}, None),
    ],
)
def test_linuxs_supplies_are_read(
    tmp_path: Path, supplies: dict[str, tuple[str, str]], found: bool | None
):
    """A machine without a battery says nothing."""
    for name, (kind, status) in supplies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
        if status:
            (tmp_path / name / "status").write_text(f"{status}\n")
    assert from_supplies(tmp_path) is found
    assert from_supplies(tmp_path / "none") is None


def test_this_machine_can_be_asked():
    """Whatever it says, nothing fails."""
    assert isinstance(power(), Power)


def test_pmset_is_asked_again_only_after_a_while():
    """Each text is a process, which a laptop on battery pays for."""
    clocks, asked = Clocks(), list[str]()

    def run(*what: str) -> str:
        asked.append(" ".join(what))
        return f"{len(asked)}"

    pmset = Pmset(run, lambda: clocks.clock_s)
    assert [pmset("-g", "batt"), pmset("-g"), pmset("-g", "batt")] == ["1", "2", "1"]
    clocks.run(ASK_S)
    assert pmset("-g", "batt") == "3"
    assert asked == ["-g batt", "-g", "-g batt"]


def test_an_error_of_process_infos_own_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever writes the decision log looks here as well, and goes on."""
    (tmp_path / "foundation_broken.py").write_text("raise OSError('no such library')")
    monkeypatch.syspath_prepend(tmp_path)
    assert from_process_info("foundation_broken") == (None, None)


# --- NSProcessInfo, from a module of its form -------------------------------------------------

FOUNDATION = """
class NSProcessInfo:
    @staticmethod
    def processInfo():
        return NSProcessInfo()
    def thermalState(self):
        return {thermal}
"""
SAVING = "    def isLowPowerModeEnabled(self):\n        return 1\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        *((FOUNDATION.format(thermal=n) + SAVING, (word, True)) for n, word in enumerate(THERMAL)),
        (FOUNDATION.format(thermal=9) + SAVING, (None, True)),
        (FOUNDATION.format(thermal=1), ("fair", None)),
        ("", (None, None)),
    ],
    ids=[*THERMAL, "a new state", "an older macOS", "nothing"],
)
def test_process_info_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: tuple[str, bool]
):
    """What it doesn't have isn't known."""
    name = f"foundation_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert from_process_info(name) == found


def test_without_pyobjc_nothing_is_said():
    """As on any machine but a Mac."""
    with pytest.raises(ImportError):
        import_module("no_such_foundation")
    assert from_process_info("no_such_foundation") == (None, None)


# --- changes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "reasons"),
    [
        (Power(False, "nominal", False), []),
        (Power(True, "nominal", False), ["power source"]),
        (Power(True, "serious", True), ["power source", "thermal state", "low power mode"]),
        (Power(), []),
    ],
)
def test_what_was_said_otherwise_is_a_change(now: Power, reasons: list[str]):
    """Silence, before or after, is none."""
    before = Power(False, "nominal", False)
    assert changes(before, now) == [Disturbance(reason, lasts=True) for reason in reasons]
    assert changes(Power(), now) == []


class Clocks:
    """Two clocks; the first stands still while the machine sleeps."""

    def __init__(self) -> None:
        self.clock_s, self.wall_s = 100.0, 1e9

    def run(self, s: float) -> None:
        self.clock_s, self.wall_s = self.clock_s + s, self.wall_s + s

    def sleep(self, s: float) -> None:
        self.wall_s += s


@pytest.mark.parametrize(("gap_s", "slept"), [(GAP_S + 1, True), (GAP_S - 1, False), (-99, False)])
def test_a_gap_between_the_clocks_is_a_sleep_once(gap_s: float, slept: bool):
    """A short one isn't, nor is a wall clock that is set back."""
    clocks = Clocks()
    sleep = Sleep(lambda: clocks.clock_s, lambda: clocks.wall_s, GAP_S)
    clocks.run(3600)
    assert not sleep.happened()
    clocks.sleep(gap_s)
    assert sleep.happened() is slept
    assert not sleep.happened()


def test_a_watch_tells_each_change_once():
    """Read every few seconds, and at once after a sleep."""
    clocks, said = Clocks(), [Power(False), Power(True), Power(False)]
    watch = Watch(lambda: said.pop(0), lambda: clocks.clock_s, lambda: clocks.wall_s)
    assert (watch.look(), watch.power) == ([], Power(False))
    clocks.run(LOOK_S / 2)
    assert (watch.look(), watch.power) == ([], Power(False))
    clocks.run(LOOK_S)
    assert (watch.look(), watch.power) == ([Disturbance("power source", True)], Power(True))
    clocks.sleep(3600)
    assert watch.look() == [Disturbance("sleep", False), Disturbance("power source", True)]
    assert watch.power == Power(False)


def test_a_look_that_failed_hides_no_change():
    """pmset gave no answer once, as the charger was pulled."""
    clocks, said = Clocks(), [Power(False), Power(), Power(True)]
    watch = Watch(lambda: said.pop(0), lambda: clocks.clock_s, lambda: clocks.wall_s)
    found: list[Disturbance] = []
    for _ in range(3):
        found += watch.look()
        clocks.run(LOOK_S)
    assert found == [Disturbance("power source", True)]


# --- on the link ------------------------------------------------------------------------------


def test_a_change_of_power_is_news_to_the_gateway():
    """It is sent at once, not with the next heartbeat."""
    before = status_report({"power": {"is_low_power": False}}, None)
    now = status_report({"power": {"is_low_power": True}}, None)
    assert now.is_low_power
    assert is_news(now, before)
    assert not is_news(now, now)


def test_an_older_workers_word_for_heat_is_taken():
    """It said throttled, and nothing of low power mode."""
    report = StatusReport.model_validate({"type": "status", "thermal": "throttled"})
    assert (report.thermal, report.is_low_power) == ("throttled", None)
