"""Which cases of a large table run in the default tier."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """The first of every few cases; the others are of the long tier."""
    return [
        case
        if n % every == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for n, case in enumerate(cases)
    ]
