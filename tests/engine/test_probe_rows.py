"""A pass over several rows beside passes over one: what differs, and what of it is a fault."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_worker.engine import probe_rows
from mlx_worker.engine.probe_rows import Flip, RowsProbe
from mlx_worker.engine.target import Target
from tests.tiny import tiny_pair, tiny_target


class Skewed(Target):
    """A network whose pass over a few rows answers for the rows in another order."""

    def hidden(self, ids: mx.array, caches: Sequence[Any] | None) -> mx.array:
        found = super().hidden(ids, caches)
        is_verify_pass = 1 < ids.shape[1] <= max(probe_rows.ROWS)
        return found[:, ::-1] if is_verify_pass else found


def skewed() -> Target:
    sound = tiny_target()
    return Skewed(sound.model, sound.vocab_size, sound.context_limit)


def probe_of(*flips: Flip) -> RowsProbe:
    return RowsProbe("m", None, "bfloat16", 36, (2,), 0.1, flips, 0.5, {1: 1.0}, None)


@pytest.mark.parametrize("shape", ["shared", "own", "llama"])
def test_in_float32_on_the_cpu_rows_make_no_difference(shape: str):
    """The texts with and without a draft are then equal, whatever was drafted."""
    found = probe_rows.probe_rows(tiny_pair(shape, target=tiny_target(shape)))
    assert (found.flips, found.largest_difference < 1e-4) == ((), True)


def test_a_network_that_answers_otherwise_for_several_rows_is_found():
    """Planted: it gives the rows of a verify pass in another order."""
    found = probe_rows.probe_rows(tiny_pair(target=skewed()))
    assert found.clear_flips
    assert found.largest_difference > 1


def test_the_times_are_of_every_depth_and_of_the_draft():
    """A verify pass has one row more than ids were drafted."""
    found = probe_rows.probe_rows(tiny_pair(draft="assistant"), rows=(2,))
    assert list(found.pass_ms) == list(range(1, 10))
    assert found.draft_ms is not None
    assert found.draft_ms > 0


def test_a_flip_has_the_margin_of_the_two_likeliest_ids():
    """Of one row, against which several are held."""
    alone = np.array([[1.0, 3.0, 2.5], [5.0, 0.0, 0.0]], np.float32)
    together = np.array([[1.0, 2.7, 2.8], [5.0, 0.1, 0.0]], np.float32)
    assert list(probe_rows.flips(alone, together, 4)) == [Flip(4, 0, 0.5)]


def test_a_flip_between_all_but_tied_ids_is_rounding():
    """At the stated margin and below it."""
    assert probe_of(Flip(2, 0, 0.5)).clear_flips == ()
    assert probe_of(Flip(2, 0, 0.51)).clear_flips == (Flip(2, 0, 0.51),)


def test_a_logit_that_is_no_number_is_an_infinite_difference():
    """NaN compares with nothing, so it must not pass for agreement."""
    alone = np.zeros((1, 3), np.float32)
    assert probe_rows.difference(alone, np.full((1, 3), np.nan, np.float32)) == float("inf")


def test_a_flip_whose_margin_is_no_number_is_no_rounding():
    """NaN is neither above nor below a bound."""
    assert len(probe_of(Flip(2, 0, float("nan"))).clear_flips) == 1
