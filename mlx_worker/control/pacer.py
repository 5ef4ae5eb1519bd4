"""Pacers: what a session asks before each segment of decoding, and tells after each round.

Owns FixedPacer, which never changes its mind. Leaves timing to the engine. One thread: the
session's.
"""

from mlx_worker.records import MAX_DEPTH, Plan, Round

WHOLE_REQUEST_TOKENS = 1 << 30  # longer than any reply, so that the plan is asked for once


class FixedPacer:
    """The same depth in every round, whatever it costs: to measure, or when set by hand."""

    def __init__(self, depth: int):
        assert 0 <= depth <= MAX_DEPTH, depth
        self._plan = Plan(depth=depth, tokens=WHOLE_REQUEST_TOKENS)

    def plan(self) -> Plan:
        return self._plan

    def observe(self, round: Round) -> None:
        """Heard, not heeded."""
