"""What Automatic mode is compared with, on replies whose times are known."""

import math
from collections.abc import Sequence

from mlx_worker.bench.live import chosen_by_others_ms, decode_ms
from mlx_worker.bench.run import Arm, Served
from tests.bench.replies import N_TOKENS, served

STEPS = N_TOKENS - 1


def totals(replies: Sequence[Served]) -> dict[Arm, float]:
    return {arm: decode_ms(replies, arm) for arm in replies[0].replies}


def test_each_reply_has_the_depth_that_the_others_choose():
    """Depth 2 is the fastest on two of three, and by far the slowest on the third."""
    replies = [served(n, 5.0, {2: ms, 4: 2.0}) for n, ms in enumerate((1.0, 1.0, 10.0))]
    found = chosen_by_others_ms(replies, totals(replies))
    assert math.isclose(found, STEPS * (2.0 + 2.0 + 10.0))


def test_plain_decoding_is_one_of_the_choices():
    """A workload on which no depth gains is best served plainly."""
    replies = [served(n, 1.0, {2: 2.0, 4: 3.0}) for n in range(3)]
    assert math.isclose(chosen_by_others_ms(replies, totals(replies)), 3 * STEPS)


def test_one_reply_has_no_others():
    """No depth could be chosen for it but by its own luck."""
    replies = [served(0, 1.0, {2: 2.0})]
    assert chosen_by_others_ms(replies, totals(replies)) == math.inf
