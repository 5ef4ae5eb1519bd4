"""The words of a verdict."""

import pytest

from mlx_worker.records import verdict_text


@pytest.mark.parametrize(
    ("is_on", "speedup", "text"),
    [
        (True, 0.24, "On, +24%"),
        (True, 0.2499, "On, +24%"),
        (True, 0.29, "On, +29%"),  # 100 * 0.29 is 28.999999999999996
        (True, 1.13, "On, +113%"),
        (True, 0.01, "On, +1%"),
        (True, 0.0099, "Off, +0%"),
        (True, -0.2, "Off, −20%"),
        (False, -0.18, "Off, −18%"),
        (False, -0.1899, "Off, −18%"),
        (False, -0.009, "Off, +0%"),
        (False, 0.0, "Off, +0%"),
        (False, 0.4, "Off, +0%"),
        (False, -0.99, "Off, −99%"),
    ],
)
def test_figures_are_rounded_towards_zero_and_off_is_never_positive(
    is_on: bool, speedup: float, text: str
):
    """Each line of the contract, with its edges."""
    assert verdict_text(is_on, speedup) == text


def test_the_minus_is_the_typographic_one():
    """Programs that look for the sign find U+2212, not a hyphen."""
    assert "\u2212" in verdict_text(False, -0.5)
    assert "-" not in verdict_text(False, -0.5)
