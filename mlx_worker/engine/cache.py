"""K/V timelines that rewind exactly, past the sliding window too.

Owns what is cached for one conversation, and the ledger of which ids that is. It stands in for
mlx-lm's own caches inside mlx-lm's models, which need `offset`, `update_and_fetch` and
`make_mask`. Leaves the choice of what to rewind to round.py and session.py. Engine thread only.

Keys and values are (1, n_kv_heads, tokens, head_dim), in temporal order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_worker.records import MAX_DEPTH

GROWTH_TOKENS = 256  # a buffer grows by this much at a time; also how rarely a window is compacted
SLACK_TOKENS = 2 * MAX_DEPTH  # how far a sliding timeline can always be rewound


@dataclass(frozen=True)
class Held:
    """A layer's last keys and values as they were at some moment; nothing changes them later.

    keys, values  (1, n_kv_heads, tokens, head_dim), contiguous
    offset        tokens since the start of the conversation
    window        of a sliding layer; None: it sees everything
    """

    keys: mx.array
    values: mx.array
    offset: int
    window: int | None

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def can_rewind(self, n_tokens: int) -> bool:
        return _can_rewind(n_tokens, self.keys.shape[2], self.offset, self.window)


def _can_rewind(n_tokens: int, n_buffered: int, offset: int, window: int | None) -> bool:
    """Whether what is left after n_tokens are forgotten is all that the next queries see."""
    n_seen = offset - n_tokens if window is None else min(offset - n_tokens, window - 1)
    return 0 <= n_tokens <= offset and n_buffered - n_tokens >= n_seen


class Timeline:
    """Keys and values of one attention layer, oldest first, in a buffer with room at its end."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0  # tokens since the start of the conversation
        self._end = 0  # tokens in the buffer

    @property
    def window(self) -> int | None:
        """How many tokens back a query sees, itself included; None: all."""
        return None

    @property
    def state(self) -> list[mx.array]:
        """The arrays to evaluate before the graph that built them may be forgotten."""
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append L tokens; return the keys and values that these L queries may see."""
        n_new = keys.shape[2]
        self._make_room(keys, values, n_new)
        assert self.keys is not None
        assert self.values is not None
        start, end = self._end, self._end + n_new
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        visible = self._n_visible(n_new)
        self._end = end
        self.offset += n_new
        return self._last(visible)

    def recent(self, n_tokens: int | None = None) -> tuple[mx.array, mx.array]:
        """The last n_tokens cached keys and values, or fewer where fewer exist; None is all."""
        return self._last(self._end if n_tokens is None else min(n_tokens, self._end))

    def can_rewind(self, n_tokens: int) -> bool:
        return _can_rewind(n_tokens, self._end, self.offset, self.window)

    def rewind(self, n_tokens: int) -> None:
        """Forget the last n_tokens: of a sliding layer SLACK_TOKENS or what was appended last."""
        assert self.can_rewind(n_tokens), f"rewind {n_tokens} of {self._end} buffered tokens"
        self._end -= n_tokens
        self.offset -= n_tokens

    def rest(self) -> None:
        """Let go of what is cheap to make again."""

    def held(self, n_back: int = 0) -> Held:
        """A copy of this layer as it was n_back tokens ago, with what a small rewind may need."""
        assert self.keys is not None
        assert self.values is not None
        end = self._end - n_back
        start = end - min(end, self._n_keep())
        keys, values = (array[..., start:end, :] for array in (self.keys, self.values))
        offset = self.offset - n_back
        return Held(mx.contiguous(keys), mx.contiguous(values), offset, self.window)

    def go_on(self, held: Held) -> None:
        """Be as that layer was."""
        assert held.window == self.window
        # Two handles: writing through one must not show through the other.
        self.keys, self.values = held.keys[...], held.values[...]
        self.offset, self._end = held.offset, held.keys.shape[2]

    def _last(self, n_tokens: int) -> tuple[mx.array, mx.array]:
        assert self.keys is not None
        assert self.values is not None
        start, end = self._end - n_tokens, self._end
        if start == 0 and end == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., start:end, :], self.values[..., start:end, :]

    def _n_visible(self, n_new: int) -> int:
        raise NotImplementedError

    def _n_keep(self) -> int:
        """How many buffered tokens must survive when the buffer is made anew."""
        raise NotImplementedError

    def _capacity(self, n_tokens: int) -> int:
        """Length of a new buffer that must hold n_tokens."""
        return -(-n_tokens // GROWTH_TOKENS) * GROWTH_TOKENS

    def _make_room(self, keys: mx.array, values: mx.array, n_new: int) -> None:
        if self.keys is not None and self._end + n_new <= self.keys.shape[2]:
            return
        n_keep = self._n_keep()
        capacity = self._capacity(n_keep + n_new)
        self.keys = _moved(self.keys, keys, self._end, n_keep, capacity)
        self.values = _moved(self.values, values, self._end, n_keep, capacity)
        self._end = n_keep


def _moved(
    buffer: mx.array | None, like: mx.array, end: int, n_keep: int, capacity: int
) -> mx.array:
    """A new buffer of `capacity` tokens like `like`, beginning with the last n_keep of the old."""
    batch, heads, _, dim = like.shape
    room = mx.zeros((batch, heads, capacity - n_keep, dim), like.dtype)
    if buffer is None or n_keep == 0:
        return room
    return mx.concatenate([buffer[..., end - n_keep : end, :], room], axis=2)


class FullTimeline(Timeline):
    """A layer that attends to everything: append, and shorten to rewind."""

    def _n_visible(self, n_new: int) -> int:
        return self._end + n_new

    def _n_keep(self) -> int:
        return self._end

    def make_mask(
        self, n_queries: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The causal mask for the next n_queries, windowed where the model asks for it."""
        if window_size is not None and self.offset + n_queries > window_size:
            return create_causal_mask(n_queries, self.offset, window_size=window_size)
        if n_queries == 1:
            return None
        return create_causal_mask(n_queries, self.offset) if return_array else "causal"


class SlidingTimeline(Timeline):
    """A layer that attends to the last `window` tokens, itself included.

    It buffers up to GROWTH_TOKENS more than it needs and SLACK_TOKENS that it must, so that
    compaction is rare and a rewind of up to SLACK_TOKENS is exact at any time. L queries see the
    last min(offset, window − 1) + L keys, whatever the slack: the mask narrows each row to its own
    window.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window
        self._masks: dict[tuple[int, int], mx.array] = {}

    @property
    def window(self) -> int:
        return self._window

    def rest(self) -> None:
        """Let go of what is cheap to make again."""
        self._masks.clear()

    def make_mask(
        self, n_queries: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of n_queries over their view: causal, and windowed once the window is full."""
        assert window_size in (None, self.window), f"window {window_size}, built for {self.window}"
        if n_queries == 1 and not return_array:
            return None
        n_before = min(self.offset, self.window - 1)
        if n_before + n_queries <= self.window and not return_array:
            return "causal"
        key = (n_before, n_queries)
        if key not in self._masks:
            if len(self._masks) > 2 * MAX_DEPTH:
                self._masks.clear()
            self._masks[key] = create_causal_mask(n_queries, n_before, window_size=self.window)
        return self._masks[key]

    def _n_visible(self, n_new: int) -> int:
        return min(self.offset, self.window - 1) + n_new

    def _n_keep(self) -> int:
        return min(self._end, self.window - 1 + SLACK_TOKENS)


class Timelines:
    """All layers' timelines of one conversation, and the ledger of the ids cached in them.

    `committed` is the one truth: ids whose keys and values stay. `settle` rewinds every layer to
    it. Some mlx-lm models have caches that can't rewind (recurrent states, for instance);
    `unrewindable` then names the first one, and the model can only be decoded plainly.
    """

    def __init__(self, model: nn.Module) -> None:
        caches = make_prompt_cache(model)
        ours = [_timeline(cache) for cache in caches]
        odd = [cache for cache, our in zip(caches, ours, strict=True) if our is None]
        self.unrewindable: str | None = type(odd[0]).__name__ if odd else None
        self.layers: list[Any] = caches if odd else ours
        self.committed: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def n_pending(self) -> int:
        """Tokens in the caches that the ledger does not know: drafted, or queued ahead."""
        return 0 if self.unrewindable else self.layers[0].offset - len(self.committed)

    def commit(self, ids: Sequence[int]) -> None:
        """Declare that the keys and values of `ids`, next in order, are cached and stay."""
        self.committed.extend(ids)

    def settle(self) -> None:
        """Rewind every layer to the committed ids, however far a failed pass got."""
        for layer in () if self.unrewindable else self.layers:
            n_pending = layer.offset - len(self.committed)
            assert n_pending >= 0, f"{-n_pending} committed ids were never cached"
            layer.rewind(n_pending)

    def can_rewind(self, n_tokens: int) -> bool:
        return not self.unrewindable and all(layer.can_rewind(n_tokens) for layer in self.layers)

    def rest(self) -> None:
        """Let go of what is cheap to make again: nothing is asked of these caches for a while."""
        for layer in self.layers:
            layer.rest()

    def held_windows(self) -> list[Held | None]:
        """[layer] copies of the sliding layers, which can't be cut back later; None for others."""
        found = [None if layer.window is None else layer.held() for layer in self.layers]
        mx.async_eval([array for held in found if held for array in (held.keys, held.values)])
        return found

    def cut(self, n_tokens: int, held: Sequence[Held | None]) -> "Timelines":
        """Another conversation that begins with the first n_tokens committed ids of this one.

        held  [layer] how it was a little after n_tokens; None where it can be rewound from now
        """
        other = Timelines.__new__(Timelines)
        other.unrewindable = None
        other.layers = [
            _cut(layer, n_tokens, at) for layer, at in zip(self.layers, held, strict=True)
        ]
        other.committed = self.committed[:n_tokens]
        return other

    def evaluate(self) -> None:
        """Compute what is queued, so that prefill memory stays bounded by one chunk."""
        mx.eval([layer.state for layer in self.layers])


def _cut(layer: Timeline, n_tokens: int, held: Held | None) -> Timeline:
    other = FullTimeline() if layer.window is None else SlidingTimeline(layer.window)
    other.go_on(held or layer.held(layer.offset - n_tokens))
    other.rewind(other.offset - n_tokens)
    return other


def _timeline(cache: object) -> Timeline | None:
    """Our rewindable stand-in for one of mlx-lm's caches, or None where we have none."""
    if type(cache) is KVCache:
        return FullTimeline()
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return SlidingTimeline(cache.max_size)
    return None
