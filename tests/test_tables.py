"""How figures read in every table on the console."""

import io

import pytest

from mlx_worker import tables


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.243, "+24.3%"),
        (-0.18, "−18.0%"),
        (0.0, "+0.0%"),
        (-0.0001, "+0.0%"),
        (12.4, "+1240%"),
        (None, "–"),
    ],
)
def test_percentages_are_signed(fraction: float | None, text: str):
    """Zero has one spelling."""
    assert tables.percent(fraction) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(-0.031, 0.04, "−3.1 to +4.0%"), (None, None, "–"), (0.05, 1.2, "+5.0 to +120%")],
)
def test_an_interval_has_one_unit(low: float | None, high: float | None, text: str):
    """At its end."""
    assert tables.span(low, high) == text


@pytest.mark.parametrize(("value", "text"), [(1234.56, "1,234.6"), (0, "0.0"), (None, "–")])
def test_numbers_are_grouped_by_thousands(value: float | None, text: str):
    """And are a dash where there is none."""
    assert tables.number(value) == text


def test_nothing_that_is_printed_is_read_as_markup():
    """A model's folder may have brackets in its name."""
    console = tables.console()
    console.file = out = io.StringIO()
    console.print("[bold]x[/bold] :smile: 9")
    assert out.getvalue() == "[bold]x[/bold] :smile: 9\n"
