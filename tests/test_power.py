"""What a machine says of its power: read from texts and files of the forms that there are."""

from pathlib import Path

import pytest

from mlx_worker.power import Power, from_pmset, from_supplies, power

NO_WARNING = "Note: No thermal warning level has been recorded\n"


@pytest.mark.parametrize(
    ("battery", "heat", "found"),
    [
        ("Now drawing from 'AC Power'\n", NO_WARNING, Power(False, "nominal")),
        ("Now drawing from 'Battery Power'\n -InternalBattery-0", "", Power(True, None)),
        ("", "CPU_Speed_Limit \t= 100\n", Power(None, "nominal")),
        ("", "CPU_Speed_Limit \t= 62\n", Power(None, "throttled")),
        ("", "", Power()),
    ],
)
def test_pmsets_words_are_read(battery: str, heat: str, found: Power):
    """What it doesn't say isn't known."""
    assert from_pmset(battery, heat) == found


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
