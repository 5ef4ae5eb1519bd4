"""Whether the machine slept. A socket says that it is open after hours in which nobody was there.

Owns the comparison of two clocks. Leaves a peer's silence to wire/link.py. Pure; any thread.
"""

from collections.abc import Callable


class Sleep:
    """Sees that the wall clock went on while the loop's clock stood still.

    clock, wall  seconds; the first only ever grows and may stop while the machine sleeps
    gap_s        that counts as sleep. A wall clock that is set back is none
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float], gap_s: float) -> None:
        self._clock = clock
        self._wall = wall
        self._gap_s = gap_s
        self._ahead_s = wall() - clock()

    def happened(self) -> bool:
        """Since the last look."""
        ahead_s = self._wall() - self._clock()
        slept = ahead_s - self._ahead_s > self._gap_s
        self._ahead_s = ahead_s
        return slept
