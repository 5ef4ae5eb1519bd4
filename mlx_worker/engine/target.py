"""The target: mlx-lm's own network, split where a draft needs it split.

Owns the one place that knows how a Gemma 4 model is taken apart into trunk, head and embedding,
and which cached layers an assistant reads. Any other mlx-lm text model works too, whole: its
"hidden state" is then its logits and the head does nothing. Engine thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_worker.engine.arrays import module_arrays
from mlx_worker.engine.cache import Timelines

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Sizes:
    """Widths of a model's passes, and the bytes of a number in them."""

    hidden: int
    inner: int
    heads: int
    head: int
    item_bytes: int = 4  # scores are float32 whatever the weights are


class Target:
    """A loaded mlx-lm model.

    model          the module as mlx-lm built it
    vocab_size     width of its logits
    context_limit  positions it was made for
    """

    def __init__(self, model: nn.Module, vocab_size: int, context_limit: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.context_limit = context_limit
        text = getattr(model, "language_model", model)
        self.gemma: Any = text if isinstance(text, gemma4_text.Model) else None

    @property
    def is_separable(self) -> bool:
        """Whether hidden states can be had without a projection onto the vocabulary."""
        return self.gemma is not None

    @property
    def hidden_size(self) -> int:
        return self.gemma.args.hidden_size if self.gemma else self.vocab_size

    @property
    def window(self) -> int | None:
        return self.gemma.args.sliding_window if self.gemma else None

    @cached_property
    def donor_layers(self) -> dict[str, int]:
        """Layer type → index in the caches of the last layer of that type with its own cache."""
        if self.gemma is None:
            return {}
        n_own = len(self.gemma.make_cache())
        return {kind: i for i, kind in enumerate(self.gemma.args.layer_types[:n_own])}

    @cached_property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in module_arrays(self.model).values())

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one more token of context takes before any window is full."""
        return sum(n_bytes for _, n_bytes in self._kv_layers)

    def kv_bytes(self, n_tokens: int, n_spare: int = 0) -> int:
        """Bytes of the keys and values of n_tokens; a sliding layer forgets all but its window.

        n_spare  tokens that each layer's buffer may have room for beyond those
        """
        return sum(
            n_bytes * (n_spare + (n_tokens if window is None else min(n_tokens, window)))
            for window, n_bytes in self._kv_layers
        )

    @cached_property
    def _kv_layers(self) -> list[tuple[int | None, int]]:
        """(window, bytes a token) of each layer with keys and values of its own; measured once."""
        timelines = Timelines(self.model)
        self.hidden(mx.array([[0]]), timelines.layers)
        found: list[tuple[int | None, int]] = []
        for layer in timelines.layers:
            arrays = [item for item in layer.state if isinstance(item, mx.array) and item.ndim == 4]
            n_bytes = sum(array.nbytes // array.shape[2] for array in arrays)
            found.append((getattr(layer, "window", None), n_bytes))
        return found

    @cached_property
    def sizes(self) -> "Sizes":
        """Widths of its passes; 0 for one that its configuration doesn't name."""
        args = self.gemma.args if self.gemma else getattr(self.model, "args", None)
        heads = [int(getattr(args, name, 0) or 0) for name in ("head_dim", "global_head_dim")]
        return Sizes(
            hidden=int(getattr(args, "hidden_size", 0)),
            inner=int(getattr(args, "intermediate_size", 0)),
            heads=int(getattr(args, "num_attention_heads", 0)),
            head=max(heads),
        )

    def hidden(self, ids: mx.array, caches: Sequence[Any] | None) -> mx.array:
        """One pass: ids (1, L) → (1, L, hidden_size) after the final norm; caches grow by L."""
        trunk = self.gemma.model if self.gemma else self.model
        return trunk(ids, cache=caches)

    def head(self, hidden: mx.array) -> mx.array:
        """(rows, hidden_size) → (rows, vocab_size) logits, softcapped where the model does so."""
        if self.gemma is None:
            return hidden
        if self.gemma.tie_word_embeddings:
            logits = self.gemma.model.embed_tokens.as_linear(hidden)
        else:
            logits = self.gemma.lm_head(hidden)
        cap = self.gemma.final_logit_softcapping
        return logits if cap is None else gemma4_text.logit_softcap(cap, logits)

    def embed(self, ids: mx.array) -> mx.array:
        """(1, L) int32 → (1, L, hidden_size), scaled as the trunk scales its input. Gemma only."""
        trunk = self.gemma.model
        return trunk.embed_tokens(ids) * trunk.embed_scale
