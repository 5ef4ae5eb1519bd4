"""What a pass over k rows answers beside k passes over one row: differences, flips and times.

Owns the measurement, and which flip counts as a tie. Leaves what a fault means to doctor. Engine
thread only.

A draft is kept where the target, asked for several rows at once, picks what it would have picked
row by row. Kernels for one row and for several may round differently, so that where two ids are
all but tied the pick may flip. More than that is a fault, and would change texts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.costs import draft_step_ms, verify_pass_ms
from mlx_worker.engine.load import LoadedPair
from mlx_worker.engine.target import Target
from mlx_worker.records import MAX_DEPTH

TEXT = "Here is how a watermill works, told from the river to the flour. The water of the"
POSITIONS = 36  # compared, of the model's own text after TEXT
ROWS = (2, 3, 5, MAX_DEPTH + 1)
TIMED_ROWS = range(1, MAX_DEPTH + 2)
TIMED_REPEATS = 5
# Between the two likeliest ids, in units of the logits: below it rounding alone may flip a pick.
# Numbers from 16 to 32 are 1/8 apart in bfloat16 and 1/64 in float16; logits are sums of many.
NEAR_TIE: Mapping[str, float] = {"float32": 0.01, "float16": 0.25, "bfloat16": 0.5}


@dataclass(frozen=True)
class Flip:
    """A position where k rows at once pick another id. margin: between the two likeliest ids."""

    rows: int
    position: int
    margin: float


@dataclass(frozen=True)
class RowsProbe:
    """Of one pair.

    largest_difference  of any logit; infinite where one is no number
    near_tie            a flip with at most this margin is rounding
    pass_ms             rows → one pass of the target, median
    draft_ms            one step of the draft; None: none with weights
    """

    model: str
    draft: str | None
    dtype: str
    n_positions: int
    rows: tuple[int, ...]
    largest_difference: float
    flips: tuple[Flip, ...]
    near_tie: float
    pass_ms: Mapping[int, float]
    draft_ms: float | None

    @property
    def clear_flips(self) -> tuple[Flip, ...]:
        """Those that no rounding explains."""
        return tuple(flip for flip in self.flips if not flip.margin <= self.near_tie)


def probe_rows(pair: LoadedPair, rows: Sequence[int] = ROWS) -> RowsProbe:
    """Compare and time, in a second for a small model and some for a large one."""
    prompt = pair.encode_text(TEXT)
    ids, alone = one_by_one(pair.target, prompt, POSITIONS)
    together = {n: in_blocks(pair.target, prompt, ids, n) for n in rows}
    return RowsProbe(
        model=pair.name,
        draft=pair.draft_name,
        dtype=pair.dtype,
        n_positions=len(ids),
        rows=tuple(rows),
        largest_difference=max(difference(alone, other) for other in together.values()),
        flips=tuple(flip for n, other in together.items() for flip in flips(alone, other, n)),
        near_tie=NEAR_TIE.get(pair.dtype, max(NEAR_TIE.values())),
        pass_ms=verify_pass_ms(pair, TIMED_ROWS, repeats=TIMED_REPEATS),
        draft_ms=draft_step_ms(pair, repeats=TIMED_REPEATS),
    )


def one_by_one(target: Target, prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
    """The greedy text after the prompt, and the logits (count, V) of passes over one row.

    Row i is what the target said when it had read ids up to and including ids[i].
    """
    timelines, first = _begun(target, prompt)
    ids, found = [first], list[np.ndarray]()
    for _ in range(count):
        found.append(_read(target, timelines, ids[-1:])[0])
        ids.append(int(found[-1].argmax()))
    return ids[:count], np.stack(found)


def in_blocks(target: Target, prompt: Sequence[int], ids: Sequence[int], rows: int) -> np.ndarray:
    """Logits (len(ids), V) of the same ids, read `rows` at a time."""
    timelines, _ = _begun(target, prompt)
    blocks = [ids[start : start + rows] for start in range(0, len(ids), rows)]
    return np.concatenate([_read(target, timelines, block) for block in blocks])


def difference(alone: np.ndarray, together: np.ndarray) -> float:
    largest = float(np.abs(alone - together).max())
    return largest if np.isfinite(largest) else float("inf")


def flips(alone: np.ndarray, together: np.ndarray, rows: int) -> Iterator[Flip]:
    """Where the likeliest id differs. Both (L, V)."""
    picked, other = alone.argmax(axis=-1), together.argmax(axis=-1)
    for position in np.flatnonzero(picked != other):
        second, first = np.sort(alone[position])[-2:]
        yield Flip(rows, int(position), float(first - second))


def _begun(target: Target, prompt: Sequence[int]) -> tuple[Timelines, int]:
    """Timelines that hold the prompt, and the id that the target picks after it."""
    timelines = Timelines(target.model)
    return timelines, int(_read(target, timelines, prompt)[-1].argmax())


def _read(target: Target, timelines: Timelines, ids: Sequence[int]) -> np.ndarray:
    """One pass over ids, which stay cached: (len(ids), V) float32."""
    hidden = target.hidden(mx.array([list(ids)]), timelines.layers)[0]
    logits = np.array(target.head(hidden).astype(mx.float32))
    timelines.commit(ids)
    return logits
