"""What every table on the console shares: its width, and how a figure reads.

Owns neither what is shown nor where. Pure but for console(); any thread.

Tables fit 80 columns and say everything without colour. A figure that isn't known is a dash.
"""

import sys

from rich.console import Console

from mlx_worker.records import MINUS

MIN_WIDTH, MAX_WIDTH = 80, 100
DASH = "–"


def console() -> Console:
    """Standard output, as wide as the terminal within limits; a pipe gets the narrow layout."""
    plain = Console(file=sys.stdout)
    width = min(max(plain.width, MIN_WIDTH), MAX_WIDTH) if plain.is_terminal else MIN_WIDTH
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width)


def percent(fraction: float | None) -> str:
    """+24.3%, −18.0%, +1240%, or a dash."""
    if fraction is None:
        return DASH
    if fraction >= 1:
        return f"+{100 * fraction:.0f}%"
    tenths = round(100 * fraction, 1) + 0.0  # + 0.0 makes −0.0 zero
    return f"{tenths:+.1f}%".replace("-", MINUS)


def number(value: float | None, digits: int = 1) -> str:
    """1,234.5, or a dash."""
    return DASH if value is None else f"{value:,.{digits}f}"


def span(low: float | None, high: float | None) -> str:
    """An interval: −3.1 to +4.0%, or a dash."""
    return DASH if low is None else f"{percent(low).rstrip('%')} to {percent(high)}"
