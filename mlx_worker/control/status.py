"""The words of a verdict: one function, so that every place shows the same text.

Owns how a measured speed-up is written. Leaves to decide.py whether it is On. Pure; any thread.
"""

import math

MINUS = "\u2212"


def verdict_text(is_on: bool, speedup: float) -> str:
    """`On, +24%` or `Off, −18%`, rounded towards zero.

    speedup  a fraction: 0.24 is 24 % faster, −0.18 is 18 % slower

    On needs at least +1 %, else it is Off; Off never shows a positive number but `Off, +0%`.
    """
    percent = whole_percent(speedup)
    if is_on and percent >= 1:
        return f"On, +{percent}%"
    return f"Off, {MINUS}{-percent}%" if percent < 0 else "Off, +0%"


def whole_percent(fraction: float) -> int:
    """Percent, rounded towards zero; 0.29 is 29 although 100 * 0.29 is a little less."""
    return math.trunc(round(100 * fraction, 9))
