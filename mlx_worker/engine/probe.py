"""Single questions to a loaded pair, outside any reply: its logits, and its draft's proposal.

Owns what parity with other implementations is checked by. Plain values in and out. Engine thread
only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import mlx.core as mx
import numpy as np

from mlx_worker.engine.arrays import ints
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.draft import Position
from mlx_worker.engine.load import LoadedPair
from mlx_worker.engine.round import Cursor
from mlx_worker.engine.sample import Sampler
from mlx_worker.engine.session import check
from mlx_worker.engine.validate import check_ids, check_whole, check_word
from mlx_worker.errors import RequestError
from mlx_worker.records import MAX_DEPTH, GenerationRequest, Sampling


def logits(pair: LoadedPair, ids: Sequence[int]) -> np.ndarray:
    """One full pass without a cache. ids: L of them → (L, vocab_size) float32."""
    ids = _checked(pair, ids)
    hidden = pair.target.hidden(mx.array([ids]), None)[0]
    return np.array(pair.target.head(hidden).astype(mx.float32))


def propose(
    pair: LoadedPair, ids: Sequence[int], depth: int, position: Position | None = None
) -> list[int]:
    """The draft's greedy chain after `ids`, all cached, and the target's own next id, not cached.

    position  where an assistant's query stands; None: as the pair was loaded

    Returns up to `depth` ids; prompt lookup may find fewer. Raises RequestError without a draft.
    """
    ids = _checked(pair, ids)
    check_whole("depth", depth, 0, MAX_DEPTH)
    if position is not None:
        check_word("position", position, get_args(Position))
    pair = pair if position is None else replace(pair, position=position)
    timelines = Timelines(pair.target.model)
    sampler = Sampler(Sampling(), pair.target.vocab_size, ids)
    drafter = pair.drafter(timelines, sampler)
    if drafter is None:
        raise RequestError(f"{pair.name} has no draft", hint=pair.draft_problem or "load one")
    hidden = pair.target.hidden(mx.array([ids]), timelines.layers)[:, -1:]
    timelines.commit(ids)
    bonus = ints(mx.argmax(pair.target.head(hidden[0]), axis=-1))[0]
    drafter.begin(ids)
    drafter.commit([bonus], 0)
    proposed = drafter.propose(depth, Cursor(bonus, hidden, 1, sampler.start)).ids
    return [] if proposed is None else ints(proposed)


def _checked(pair: LoadedPair, ids: Sequence[int]) -> list[int]:
    """The ids as plain ints. Raises RequestError for what this model can't be asked."""
    check_ids("prompt", ids, pair.target.vocab_size)
    check(pair, GenerationRequest(tuple(ids), max_tokens=1))
    return [int(id) for id in ids]
