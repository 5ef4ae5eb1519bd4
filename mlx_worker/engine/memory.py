"""What memory MLX holds, what it may hold, and what a request will need before it is begun.

Owns the budget and the forecast. Leaves what is let go of to make room to roster.py. Any thread,
but for the forecast, which reads a loaded model.

The forecast is fitted to measured peaks on the CPU backend (docs/LOG.md) and errs upwards.
"""

import mlx.core as mx

from mlx_worker.config import memory_bytes
from mlx_worker.engine.cache import GROWTH_TOKENS, SLACK_TOKENS
from mlx_worker.engine.checkpoint import folder_of
from mlx_worker.engine.device import working_set_bytes
from mlx_worker.engine.load import LoadedPair
from mlx_worker.engine.session import PREFILL_CHUNK_TOKENS
from mlx_worker.records import Source

CACHE_SHARE = 0.125  # of the budget that freed buffers may keep for reuse
MARGIN = 1.25
HIDDEN, INNER, HEADS = 8, 4, 8  # rows of each width that a pass over a token holds at a time
LOADING, LOADING_ON_CPU = 1.05, 2.1  # weights in memory over their files; the CPU backend widens


def used() -> dict[str, int]:
    """Bytes: of arrays that live, of freed buffers kept for reuse, and the most that ever lived."""
    return {
        "active_bytes": mx.get_active_memory(),
        "cache_bytes": mx.get_cache_memory(),
        "peak_bytes": mx.get_peak_memory(),
    }


def budget_bytes(gigabytes: float | None = None) -> int:
    """What the worker may hold: as configured, else what Metal recommends, else a share of all."""
    if gigabytes is None and (recommended := working_set_bytes()):
        return recommended
    return memory_bytes(gigabytes)


def hold_to(budget: int) -> None:
    """Tell MLX of the budget; on Metal, keep that much from being paged out."""
    mx.set_memory_limit(budget)
    mx.set_cache_limit(int(CACHE_SHARE * budget))
    if mx.metal.is_available():
        mx.set_wired_limit(budget)


def model_bytes(model: str | Source) -> int:
    """What a model's weights will take. Raises ModelNotFound."""
    files = folder_of(model).glob("*.safetensors")
    factor = LOADING if mx.metal.is_available() else LOADING_ON_CPU
    return int(factor * sum(file.stat().st_size for file in files))


def request_bytes(pair: LoadedPair, n_tokens: int) -> int:
    """What a prompt and its reply of n_tokens together will take at their peak.

    Keys and values; scores of a piece of the prompt against all tokens before it, which not every
    kernel avoids; and what a layer holds of such a piece.
    """
    config = pair.target.sizes
    n_rows = min(n_tokens, PREFILL_CHUNK_TOKENS)
    width = HIDDEN * config.hidden + INNER * config.inner + HEADS * config.heads * config.head
    scores = config.heads * n_rows * n_tokens
    kept = pair.target.kv_bytes(n_tokens, GROWTH_TOKENS + SLACK_TOKENS)
    return int(MARGIN * (kept + config.item_bytes * (scores + n_rows * width)))
