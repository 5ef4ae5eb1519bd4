"""Which drafted ids are kept: the coupled rule and the standard rule.

Owns the two rules and nothing else; ids are chosen in sample.py. Runs on the engine thread.

Coupled: draft and target picked with the same noise, a draft is kept only if it is the target's
own id, so the reply is the target's for its seed, id by id (Daliri, Musco & Suresh 2024,
arXiv:2408.07978). Standard: independent noise, ids kept with probability min(1, p/q), so only the
reply's distribution is the target's. Never mix them: shared noise under min(1, p/q) is biased.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def leading_run(draft_ids: Sequence[int], target_ids: Sequence[int]) -> int:
    """How many drafts equal the target's id at the same place, up to the first that does not."""
    n = 0
    for drafted, chosen in zip(draft_ids, target_ids, strict=False):
        if drafted != chosen:
            break
        n += 1
    return n


def coupled(draft_ids: mx.array, target_ids: mx.array) -> mx.array:
    """leading_run without reading anything back.

    draft_ids   (K,)   int32
    target_ids  (K+1,) int32  row i was picked after draft_ids[:i]

    Returns n () int32 in 0..K; target_ids[:n+1] is what the reply gains.
    """
    is_equal = draft_ids == target_ids[: len(draft_ids)]
    return mx.sum(mx.cumprod(is_equal.astype(mx.int32)))


def standard(
    draft_ids: mx.array, draft_probs: mx.array, target_probs: mx.array, u: mx.array
) -> tuple[mx.array, mx.array]:
    """Keep the longest drafted prefix that leaves the target's distribution unchanged.

    draft_ids     (K,)     int32    proposed by the drafter, K at least 1
    draft_probs   (K, V)   float32  rows sum to 1: the law each id was drawn from
    target_probs  (K+1, V) float32  row K follows a fully accepted draft
    u             (K,)     float32  uniforms in [0, 1), passed in so that tests can fix them

    Returns (n, dist): n () int32 in 0..K ids kept; dist (V,) is what the next id is drawn from.
    Where rounding leaves nothing of the residual (p and q equal to the last bit), dist is p.
    A draft of -1, from a law that was unusable, is refused.
    Source: Leviathan et al. 2023, algorithm 1 (arXiv:2211.17192).
    """
    n_drafted = len(draft_ids)
    columns = draft_ids[:, None]
    p = mx.take_along_axis(target_probs[:n_drafted], columns, axis=-1)[:, 0]
    q = mx.take_along_axis(draft_probs, columns, axis=-1)[:, 0]
    # u < p / q without the division by a q that underflowed
    is_kept = mx.logical_and(draft_ids >= 0, u * q < p)
    n = mx.sum(mx.cumprod(is_kept.astype(mx.int32)))
    target_row = target_probs[n]
    draft_row = mx.where(n < n_drafted, draft_probs[mx.minimum(n, n_drafted - 1)], 0.0)
    residual = mx.maximum(target_row - draft_row, 0.0)
    total = mx.sum(residual)
    return n, mx.where(total > 0, residual / total, target_row)
