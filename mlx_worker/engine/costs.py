"""What a verify pass and a draft step cost on this machine, timed alone.

Owns the two measurements that bench's facts card shows, and the curve that a controller starts
from. Never decides anything: a verdict rests on whole requests. Engine thread only.
"""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.load import LoadedPair
from mlx_worker.engine.round import Cursor
from mlx_worker.engine.sample import Sampler
from mlx_worker.records import MAX_DEPTH, Sampling

REPEATS = 9
WARM_UP = 3
CURVE_ROWS = (1, 2, 3, 5, 9)  # passes timed for a curve; what lies between is interpolated
CURVE_REPEATS = 4
DRAFT_STEPS = 4  # a chain this long is timed and divided, so that its fixed part is shared


def cost_curve(pair: LoadedPair) -> dict[int, float]:
    """Depth → time of a round in plain steps, from its pieces timed alone, in a second or two.

    Ranks depths until real rounds were timed; pieces timed alone are cheaper than a whole round.
    """
    pass_ms = verify_pass_ms(pair, CURVE_ROWS, repeats=CURVE_REPEATS)
    draft_ms = draft_step_ms(pair, repeats=CURVE_REPEATS) or 0.0
    curve: dict[int, float] = {}
    for depth in range(1, MAX_DEPTH + 1):
        time_ms = float(np.interp(depth + 1, CURVE_ROWS, [pass_ms[n] for n in CURVE_ROWS]))
        curve[depth] = (time_ms + depth * draft_ms) / pass_ms[1]
    return curve


def verify_pass_ms(
    pair: LoadedPair, rows: Sequence[int], *, context_tokens: int = 64, repeats: int = REPEATS
) -> dict[int, float]:
    """Rows → median ms of one target pass over that many rows, head and argmax included."""
    timelines = _filled(pair, context_tokens)

    def one_pass(n_rows: int) -> None:
        ids = mx.zeros((1, n_rows), mx.int32) + 3
        hidden = pair.target.hidden(ids, timelines.layers)[0]
        mx.eval(mx.argmax(pair.target.head(hidden), axis=-1))
        timelines.settle()

    return _interleaved({n: (lambda n=n: one_pass(n)) for n in rows}, repeats)


def draft_step_ms(
    pair: LoadedPair, *, context_tokens: int = 64, repeats: int = REPEATS
) -> float | None:
    """Median ms of one step of the draft's chain; None for a draft without a network."""
    if pair.draft_network is None:
        return None
    timelines = _filled(pair, context_tokens)
    sampler = Sampler(Sampling(), pair.target.vocab_size, [])
    drafter = pair.drafter(timelines, sampler)
    assert drafter is not None
    drafter.begin([*timelines.committed, 3])
    hidden = mx.zeros((1, 1, pair.target.hidden_size), mx.float32)
    cursor = Cursor(3, hidden, 1, sampler.start)

    def chain() -> None:
        ids = drafter.propose(DRAFT_STEPS, cursor).ids
        mx.eval(ids)
        drafter.commit([], 0)

    return _interleaved({DRAFT_STEPS: chain}, repeats)[DRAFT_STEPS] / DRAFT_STEPS


def _filled(pair: LoadedPair, context_tokens: int) -> Timelines:
    """Timelines with a context in them."""
    timelines = Timelines(pair.target.model)
    ids = [3] * context_tokens
    pair.target.hidden(mx.array([ids]), timelines.layers)
    timelines.evaluate()
    timelines.commit(ids)
    return timelines


def _interleaved(jobs: dict[int, Callable[[], None]], repeats: int) -> dict[int, float]:
    """Time each job `repeats` times, taking turns, so that drift hits all alike."""
    times: dict[int, list[float]] = {key: [] for key in jobs}
    for turn in range(WARM_UP + repeats):
        for key, job in jobs.items():
            started = perf_counter()
            job()
            if turn >= WARM_UP:
                times[key].append((perf_counter() - started) * 1000)
    return {key: median(values) for key, values in times.items()}
