"""Which of two drafts is faster: the rule on scripted timings, the words, and one real batch."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from mlx_worker.bench import drafts
from mlx_worker.bench.drafts import PUBLISHED, SMALLER
from mlx_worker.bench.facts import machine
from mlx_worker.bench.run import OFF, Arm, Limits, Served
from mlx_worker.bench.workloads import Prompt
from mlx_worker.engine.checkpoint import DEMO_FOLDER
from mlx_worker.engine.quantize import quantize_assistant
from tests.bench.replies import reply, served


def both(
    seed: int, published: Mapping[int, float], smaller: Mapping[int, float], *, off: float = 10.0
) -> Served:
    """One request: milliseconds a token by depth of either draft."""
    one = served(seed, off, published)
    replies = {
        Arm(SMALLER, depth): reply(step_ms, drafted=4 * depth, accepted=2)
        for depth, step_ms in smaller.items()
    }
    return Served(one.request, {**one.replies, **replies})


FASTER = [both(i, {1: 9.0, 2: 8.0 + i / 10}, {1: 7.0 + i / 20, 2: 7.5}) for i in range(6)]
SLOWER = [both(i, {1: 7.0 + i / 20, 2: 7.5}, {1: 9.0, 2: 8.0 + i / 10}) for i in range(6)]
UNSURE = [both(i, {1: 8.0}, {1: 5.0 if i % 2 else 10.0}) for i in range(6)]


def found(replies: list[Served]) -> drafts.Comparison:
    comparison = drafts.compare(machine(), replies)
    assert comparison is not None
    return comparison


def test_each_draft_counts_at_its_own_best_depth():
    """The copy is best at depth 1, the published draft at depth 2."""
    comparison = found(FASTER)
    assert comparison.rows[PUBLISHED].arm == Arm(PUBLISHED, 2)
    assert comparison.rows[SMALLER].arm == Arm(SMALLER, 1)
    expected = 6 / sum((7.0 + i / 20) / (8.0 + i / 10) for i in range(6)) - 1
    assert comparison.gain.speedup == pytest.approx(expected)


@pytest.mark.parametrize(("replies", "is_chosen"), [(FASTER, True), (SLOWER, False)])
def test_the_faster_draft_is_chosen(replies: list[Served], is_chosen: bool):
    """Both are faster than plain; only what one gains over the other counts."""
    comparison = found(replies)
    assert comparison.is_smaller_faster is is_chosen
    assert all(verdict.is_on for verdict in comparison.verdicts.values())


def test_a_gain_that_is_not_sure_is_none():
    """A tenth faster on average, a quarter slower on every other request."""
    comparison = found(UNSURE)
    assert comparison.gain.speedup > 0.05
    assert comparison.gain.low is not None
    assert comparison.gain.low < 0
    assert not comparison.is_smaller_faster
    assert drafts.choice_line(comparison, 4).endswith(", so not shown to be faster")


def test_the_machines_drift_cancels_out():
    """Requests that are all three times as slow as others compare the drafts as well."""
    drifting = [
        both(i, {1: 8.0 * scale}, {1: 7.0 * scale}, off=10.0 * scale)
        for i, scale in enumerate([1.0, 3.0, 1.0, 3.0])
    ]
    gain = found(drifting).gain
    assert (gain.low, gain.high) == pytest.approx((8 / 7 - 1, 8 / 7 - 1))


def test_replies_of_one_token_choose_nothing():
    """They have no decoding speed."""
    short = {arm: reply(9.0, ids=(1,)) for arm in (OFF, Arm(PUBLISHED, 1), Arm(SMALLER, 1))}
    assert drafts.compare(machine(), [Served(FASTER[0].request, short)]) is None
    assert drafts.choice_line(None, 4) == (
        "kept, not chosen: the 4-bit copy; every reply was a single token, which has no speed"
    )


@pytest.mark.parametrize(
    ("replies", "start"),
    [
        (FASTER, "chosen: the 4-bit copy, +15.8% over the published draft, 90% interval +1"),
        (SLOWER, "kept, not chosen: the 4-bit copy, −13.6% over the published draft, 90% inte"),
    ],
)
def test_the_choice_is_told_with_its_figures(replies: list[Served], start: str):
    """One line, as in the README."""
    assert drafts.choice_line(found(replies), 4).startswith(start)


def test_a_real_batch_compares_the_demo_pair_with_its_copy(tmp_path: Path):
    """Every arm says the same; the copy holds less; what is chosen follows from the interval."""
    copy = quantize_assistant(DEMO_FOLDER / "assistant", tmp_path / "copy")
    assert drafts.copy_line(copy).startswith("14 layers at 4 bits, groups of 64: 1.5 MB of weights")
    texts = ("Count from 3 in steps of 4, 10 numbers.", "Count from 5 in steps of 2, 10 numbers.")
    prompts = [Prompt("count", ({"role": "user", "content": text},)) for text in texts]
    folders = (str(DEMO_FOLDER / "target"), str(DEMO_FOLDER / "assistant"), str(copy.folder))
    batch = drafts.prepare(*folders, prompts, Limits(max_tokens=12))
    comparison = drafts.measure(batch)
    assert comparison is not None
    assert all(one.same_text for one in comparison.served)
    assert batch.pairs[SMALLER].draft_bytes * 3 < batch.pairs[PUBLISHED].draft_bytes
    assert (comparison.gain.low or 0) > 0 or not comparison.is_smaller_faster
    json.dumps(drafts.as_json(batch, comparison), allow_nan=False)

    out = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    drafts.print_comparison(out, batch, comparison, 4)
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split()[0] for line in lines if line.startswith(("none", "published", "4-bit"))]
    assert rows == ["none", "published", "4-bit"]
