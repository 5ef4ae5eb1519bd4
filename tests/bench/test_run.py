"""Who meets whom, and from replies to rows and verdicts; the serving is real, on tiny models."""

from itertools import product
from typing import Any

import pytest

from mlx_worker.bench import run
from mlx_worker.bench.run import OFF, Arm, Batch, Limits, Request, Served
from mlx_worker.bench.workloads import Prompt
from mlx_worker.errors import ConfigError
from tests.bench.replies import reply, served
from tests.tiers import thinned
from tests.tiny import tiny_pair

A1, A2 = Arm("assistant", 1), Arm("assistant", 2)


def tiny_batch(draft: str, n: int = 2, depths: tuple[int, ...] = (0, 2), **limits: Any) -> Batch:
    """Requests of raw ids for a tiny pair, which has no chat template."""
    loaded = tiny_pair(draft=draft)
    pairs = run.pairs_of(loaded, None)
    prompts = [Prompt("chat", ({"role": "user", "content": str(i)},)) for i in range(n)]
    requests = [Request(p, (2, 40 + i, 50, 60, 40 + i), i) for i, p in enumerate(prompts)]
    arms = run.arms_of(list(pairs), depths)
    return Batch(loaded, pairs, arms, requests, Limits(**{"max_tokens": 16, **limits}))


# --- arms -------------------------------------------------------------------------------------


def test_off_is_always_there_and_depth_0_is_off():
    """Modes that draft have no depth 0: it would be the plain path measured twice."""
    assert run.arms_of(["off", "assistant"], [2, 0, 1, 2]) == [OFF, A1, A2]
    assert run.arms_of(["off"], [0]) == [OFF]


def test_request_i_begins_with_arm_i():
    """So that no arm always goes first, on a machine that warms up."""
    assert run.rotated([OFF, A1, A2], 4) == [A1, A2, OFF]


@pytest.mark.parametrize(
    ("modes", "depths", "message"),
    [
        (["off", "assistant"], [0], "--depths: no depth above 0"),
        (["off", "assistant"], [9], "--depths: 9, must be 0 to 8"),
        (["off"], [-1], "--depths: -1, must be 0 to 8"),
    ],
)
def test_depths_that_compare_nothing_or_cannot_be_are_refused(
    modes: list[str], depths: list[int], message: str
):
    """Before anything is served."""
    with pytest.raises(ConfigError, match=message):
        run.arms_of(modes, depths)


def test_a_mode_is_unknown_or_without_a_drafter():
    """The message says which mode, why, and what to give."""
    with pytest.raises(ConfigError, match=r"--modes: no mode is called 'fast'.*off, assistant"):
        run.pairs_of(tiny_pair(), ["fast"])
    with pytest.raises(ConfigError, match=r"--modes assistant: tiny comes without one.*--draft"):
        run.pairs_of(tiny_pair(), ["assistant"])


def test_one_request_is_too_few_for_a_comparison():
    """It has no interval, so no verdict; measuring plain speed alone needs only one."""
    prompts = [Prompt("chat", ({"role": "user", "content": "Hi"},))]
    with pytest.raises(ConfigError, match=r"1 request in the batch, a verdict needs at least 2"):
        run.requests_of(tiny_pair(), prompts, n_arms=2)


def test_the_verdict_is_about_the_loaded_draft():
    """Not about whichever mode was fastest: that is what the worker would use."""
    loaded = tiny_pair(draft="assistant")
    pairs = run.pairs_of(loaded, ["lookup", "off", "assistant"])
    assert Batch(loaded, pairs, [OFF], [], Limits()).main_mode == "assistant"
    bare = tiny_pair()
    assert Batch(bare, run.pairs_of(bare, ["lookup"]), [OFF], [], Limits()).main_mode == "lookup"
    assert Batch(bare, run.pairs_of(bare, None), [OFF], [], Limits()).main_mode is None


# --- serving ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "temperature"),
    thinned(product(["lookup", "assistant", "same_weights"], [0.0, 0.9])),
)
def test_every_request_is_served_alike_by_every_arm(draft: str, temperature: float):
    """Each kind of drafter, greedy and sampled: the ids are those of plain decoding."""
    batch = tiny_batch(draft, temperature=temperature)
    steps: list[None] = []
    replies = run.serve(batch, lambda: steps.append(None))
    assert len(steps) == batch.n_replies
    assert [list(one.replies) for one in replies] == [batch.arms] * 2
    assert all(one.same_text for one in replies)
    assert replies[0].off.ids != replies[1].off.ids


def test_a_draft_with_the_targets_own_weights_is_always_right():
    """Acceptance 1, depth + 1 tokens a round, fewer passes: the counts tell the truth."""
    batch = tiny_batch("same_weights", max_tokens=13)
    result = run.conclude(batch, run.serve(batch))
    total = result.rows[-1]
    assert (total.arm, total.workload, total.requests) == (Arm("model", 2), "all", 2)
    assert total.acceptance == 1.0
    assert total.tokens_per_round == pytest.approx(3.0)
    assert result.trade is not None
    assert (result.trade.passes_off, result.trade.passes_on) == (26, 10)
    assert result.trade.thrown_away == 0
    assert result.trade.draft_bytes == batch.loaded.draft_bytes > 0
    assert result.verdict is not None


def test_the_off_arm_prepares_no_draft():
    """A draft's own prefill would make plain decoding look slower than it is."""
    assert tiny_batch("same_weights").pairs["off"].draft_network is None


def test_off_alone_reports_speeds_and_no_verdict():
    """A model without a draft can be measured too."""
    loaded = tiny_pair()
    prompt = Prompt("chat", ({"role": "user", "content": "x"},))
    batch = Batch(
        loaded, run.pairs_of(loaded, None), [OFF], [Request(prompt, (2, 9), 0)], Limits(16)
    )
    result = run.conclude(batch, run.serve(batch))
    assert [(row.arm, row.workload) for row in result.rows] == [(OFF, "chat"), (OFF, "all")]
    assert (result.verdict, result.arm, result.trade) == (None, None, None)


# --- arithmetic -------------------------------------------------------------------------------


def test_a_ratio_is_time_per_token_without_prefill():
    """8 ms against 10 ms, although the whole request gained less."""
    one = served(0, 10.0, {2: 8.0})
    assert one.ratio(A2) == pytest.approx(0.8)
    assert one.latency_change(A2) == pytest.approx(180 / 200 - 1)


def test_rows_pool_counts_and_take_the_median_speed():
    """Medians resist one slow request; acceptance weighs every drafted id alike."""
    batch = [served(0, 10.0, {2: 8.0}), served(1, 10.0, {2: 5.0}), served(2, 10.0, {2: 4.0})]
    row = run.row_of(A2, "all", batch)
    assert row.tokens_per_s == pytest.approx(200.0)
    assert (row.slowest_per_s, row.fastest_per_s) == pytest.approx((125.0, 250.0))
    assert row.acceptance == pytest.approx(9 / 24)
    assert row.tokens_per_round == pytest.approx(21 / 12)
    assert row.estimate is not None
    assert row.estimate.speedup == pytest.approx(3 / (0.8 + 0.5 + 0.4) - 1)


def test_every_arm_has_a_row_for_each_workload_and_for_all():
    """Off too, whose speed-up over itself is zero."""
    batch = [served(0, 10.0, {1: 9.0, 2: 8.0}), served(1, 10.0, {1: 9.0, 2: 8.0}, workload="json")]
    rows = run.rows_of(batch)
    assert [(row.arm, row.workload) for row in rows] == [
        (arm, kind) for arm in (OFF, A1, A2) for kind in ("chat", "json", "all")
    ]
    assert rows[2].estimate is not None
    assert rows[2].estimate.speedup == 0


def test_a_prompt_served_twice_is_one_piece_of_evidence():
    """Else repeating prompts would narrow the interval out of nothing."""
    twice = [served(i, 10.0, {2: ms}, text="same") for i, ms in enumerate((7.0, 9.0))]
    verdict = run.verdict_of([*twice, served(2, 10.0, {2: 8.0})], "assistant")
    assert verdict is not None
    assert verdict.requests == 2
    assert verdict.estimate.speedup == pytest.approx(0.25)


def test_a_reply_of_one_token_is_left_out_of_the_verdict():
    """It has no decoding speed; when all are so, there is no verdict."""
    short = Served(served(9, 1, {}).request, {OFF: reply(10.0, ids=(1,)), A2: reply(9.0, ids=(1,))})
    verdict = run.verdict_of([short, served(0, 10.0, {2: 5.0}), served(1, 10, {2: 5})], "assistant")
    assert verdict is not None
    assert verdict.requests == 2
    assert run.verdict_of([short], "assistant") is None


def test_texts_that_differ_in_one_arm_are_not_the_same():
    """Every arm counts, not the verdict's alone."""
    one = served(0, 10.0, {1: 9.0, 2: 8.0})
    changed = Served(one.request, {**one.replies, A1: reply(9.0, ids=(*range(10), 99))})
    assert (one.same_text, changed.same_text) == (True, False)


def test_only_the_standard_rule_at_a_temperature_may_change_the_text():
    """The coupled rule never does, nor does greedy decoding."""
    assert Limits(temperature=0.8).keeps_text
    assert Limits(acceptance="standard").keeps_text
    assert not Limits(temperature=0.8, acceptance="standard").keeps_text
