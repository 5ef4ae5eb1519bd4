"""Pacers on their own."""

import pytest

from mlx_worker.control.pacer import FixedPacer
from mlx_worker.records import MAX_DEPTH, Round


@pytest.mark.parametrize("depth", [0, 3, MAX_DEPTH])
def test_a_fixed_pacer_plans_its_depth_whatever_it_hears(depth: int):
    """A depth set by hand is not changed by a bad round."""
    pacer = FixedPacer(depth)
    pacer.observe(Round(depth, drafted=depth, accepted=0, round_ms=900.0, context_tokens=5))
    assert pacer.plan().depth == depth


def test_one_plan_of_a_fixed_pacer_covers_the_longest_reply():
    """Otherwise the plain path would be cut into segments, and be slower than it is."""
    assert FixedPacer(0).plan().tokens > 10_000_000
