"""The target: mlx-lm's own network, split where a draft needs it split.

Owns the one place that knows how a Gemma 4 model is taken apart into trunk, head and embedding,
and which cached layers an assistant reads. Any other mlx-lm text model works too, whole: its
"hidden state" is then its logits and the head does nothing. Engine thread only.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_worker.engine.arrays import module_arrays
from mlx_worker.engine.cache import Timelines

FULL, SLIDING = "full_attention", "sliding_attention"


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
        """Bytes that one more token of context takes before any window is full; measured once."""
        timelines = Timelines(self.model)
        self.hidden(mx.array([[0]]), timelines.layers)
        states = [item for layer in timelines.layers for item in layer.state]
        arrays = [item for item in states if isinstance(item, mx.array) and item.ndim == 4]
        return sum(array.nbytes // array.shape[2] for array in arrays)

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
