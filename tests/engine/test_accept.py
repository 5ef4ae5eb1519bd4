"""What is kept of a draft: fixed cases of both rules (their laws are in test_law.py)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_worker.engine.accept import coupled, leading_run, standard


def ids(*values: int) -> mx.array:
    return mx.array(values, mx.int32)


@pytest.mark.parametrize(
    ("draft", "target", "n"),
    [
        ((1, 2, 3), (1, 2, 3, 9), 3),
        ((1, 2, 3), (1, 2, 4, 9), 2),
        ((1, 2, 3), (0, 2, 3, 9), 0),
        ((1, 2, 3), (1, 0, 3, 9), 1),
        ((5,), (5, 5), 1),
        ((), (7,), 0),
        ((1, 2), (1, -1, -1), 1),
    ],
)
@pytest.mark.parametrize("where", ["host", "device"])
def test_the_leading_run_is_kept(draft, target, n, where):
    """Equality after the first difference doesn't count; an unusable row (-1) ends the run."""
    if where == "host":
        assert leading_run(draft, target) == n
    else:
        assert coupled(ids(*draft), ids(*target)).item() == n


def test_host_and_device_agree():
    """The two forms of the rule, on random ids."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        k = int(rng.integers(1, 9))
        draft, target = rng.integers(0, 2, k).tolist(), rng.integers(0, 2, k + 1).tolist()
        assert coupled(ids(*draft), ids(*target)).item() == leading_run(draft, target)


P = mx.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
Q = mx.array([[0.2, 0.3, 0.5], [0.1, 0.6, 0.3]])


def test_all_kept_draws_from_the_last_row():
    """p at least q keeps an id whatever u is, and a full run ends with the target's own row."""
    n, law = standard(ids(0, 1), Q, P, mx.array([0.999, 0.999]))
    assert n.item() == 2
    np.testing.assert_allclose(law, P[2], atol=1e-6)


def test_a_refused_id_is_redrawn_from_the_residual():
    """The normalised positive part of p - q, in which the refused id has no part."""
    n, law = standard(ids(2, 1), Q, P, mx.array([0.41, 0.0]))
    assert n.item() == 0
    np.testing.assert_allclose(law, [1, 0, 0], atol=1e-6)


def test_an_id_is_kept_below_p_over_q():
    """0.2 / 0.5 is 0.4."""
    n, _ = standard(ids(2, 1), Q, P, mx.array([0.39, 0.0]))
    assert n.item() == 2


def test_nothing_counts_after_the_first_refusal():
    """A later id that would be kept is not."""
    refuse = mx.array([[0.0, 0.0, 1.0], [0.1, 0.6, 0.3]])
    n, _ = standard(ids(2, 1), refuse, P, mx.array([0.9, 0.0]))
    assert n.item() == 0


def test_an_impossible_id_is_never_kept():
    """p = 0 refuses even at u = 0."""
    target = mx.array([[0.0, 1.0], [0.5, 0.5]])
    n, law = standard(ids(0), mx.array([[0.5, 0.5]]), target, mx.array([0.0]))
    assert (n.item(), law.tolist()) == (0, [0.0, 1.0])


def test_a_point_mass_falls_back_to_the_target_without_it():
    """A sure proposal is kept with p(x), and refused it leaves p without x."""
    n, law = standard(ids(2), mx.array([[0.0, 0.0, 1.0]]), P[:2], mx.array([0.2]))
    assert n.item() == 0
    np.testing.assert_allclose(law, [0.625, 0.375, 0], atol=1e-6)


def test_an_empty_residual_falls_back_to_the_target():
    """With p equal to q only rounding can refuse, and there is still a law to draw from."""
    n, law = standard(ids(0), P[:1], P[:2], mx.array([1.0]))
    assert n.item() == 0
    np.testing.assert_allclose(law, P[0], atol=1e-6)


def test_an_unusable_row_ends_the_run():
    """NaN probabilities keep nothing and are passed on for the draw to refuse."""
    target = mx.array([[0.5, 0.5], [float("nan")] * 2, [0.5, 0.5]])
    n, law = standard(ids(0, 0), mx.array([[0.5, 0.5]] * 2), target, mx.array([0.0, 0.0]))
    assert n.item() == 1
    assert mx.all(mx.isnan(law)).item()


def test_the_standard_rule_refuses_a_draft_of_minus_one():
    """An unusable draft law gives id -1, which used to index the last id and could be kept."""
    draft_probs = mx.array([[0.5, 0.5, 0.0, 0.0]])
    target_probs = mx.array([[0.1, 0.2, 0.3, 0.4]] * 2)
    n, dist = standard(mx.array([-1]), draft_probs, target_probs, mx.array([0.0]))
    assert n.item() == 0
    assert mx.sum(dist).item() == pytest.approx(1.0)
