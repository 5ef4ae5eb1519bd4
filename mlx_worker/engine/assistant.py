"""The Gemma 4 assistant network: the family's matching draft.

Owns its shape, one draft step and its two heads. It is built from mlx-lm's own decoder layers, all
of them KV-shared: queries only, reading the target's keys and values. Leaves chaining the steps to
draft.py and finding the files to load.py. Engine thread only.

Source: Hugging Face transformers 5.24, models/gemma4_assistant.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_worker.engine.arrays import module_arrays

SharedKV = dict[str, tuple[mx.array, mx.array]]  # layer type → keys, values (1, n_kv, tokens, dim)


class CentroidHead(nn.Module):
    """Chooses the clusters of ids worth scoring.

    centroids       hidden → n_centroids scores
    token_ordering  (vocab_size,) ids, cluster after cluster
    """

    def __init__(self, hidden_size: int, vocab_size: int, n_centroids: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(hidden_size, n_centroids, bias=False)
        self.token_ordering = mx.arange(vocab_size)

    def candidates(self, hidden: mx.array, n_clusters: int) -> mx.array:
        """hidden (1, 1, H) → (n_clusters · V/n_centroids,) ids of the best clusters."""
        scores = self.centroids(hidden).reshape(-1)
        best = mx.argpartition(-scores, kth=n_clusters - 1)[:n_clusters]
        return self.token_ordering.reshape(scores.shape[0], -1)[best].reshape(-1)


class AssistantTrunk(nn.Module):
    """Embedding, layers and norm; named as in the files."""

    def __init__(self, args: gemma4_text.ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [gemma4_text.DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class Assistant(nn.Module):
    """The whole draft network.

    args             of its text part, all layers KV-shared
    backbone_hidden  hidden size of the target it was made for
    n_centroids      0 for the tied head
    n_clusters       how many of the centroids' clusters get a logit
    """

    def __init__(
        self,
        args: gemma4_text.ModelArgs,
        backbone_hidden: int,
        n_centroids: int = 0,
        n_clusters: int = 0,
    ) -> None:
        super().__init__()
        self.args = args
        self.backbone_hidden = backbone_hidden
        self.n_clusters = n_clusters
        self.model = AssistantTrunk(args)
        self.pre_projection = nn.Linear(2 * backbone_hidden, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, backbone_hidden, bias=False)
        if n_centroids:
            self.masked_embedding = CentroidHead(args.hidden_size, args.vocab_size, n_centroids)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in module_arrays(self).values())

    @property
    def window(self) -> int:
        return self.args.sliding_window

    @property
    def has_centroids(self) -> bool:
        return self.n_clusters > 0

    def step(
        self, embedded: mx.array, hidden: mx.array, shared_kv: SharedKV, offset: mx.array
    ) -> tuple[mx.array, mx.array]:
        """One draft step for one query that sees all of shared_kv.

        embedded  (1, 1, backbone_hidden) the newest id, in the target's scaled embedding
        hidden    (1, 1, backbone_hidden) the target's, or the previous step's second result
        offset    () int, the query's position

        Returns (1, 1, H) for `candidates`, and (1, 1, backbone_hidden) for the next step.
        """
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in self.model.layers:
            x, _, _ = layer(x, shared_kv=shared_kv[layer.layer_type], offset=offset)
        x = self.model.norm(x)
        return x, self.post_projection(x)

    def candidates(self, hidden: mx.array) -> tuple[mx.array, mx.array | None]:
        """(1, 1, H) → logits (m,) and the ids (m,) they belong to; None when m is all of them.

        With the centroid head only the chosen clusters are scored: the full row is never built.
        """
        embedding: Any = self.model.embed_tokens
        if not self.has_centroids:
            return embedding.as_linear(hidden).reshape(-1), None
        ids = self.masked_embedding.candidates(hidden, self.n_clusters)
        return embedding(ids) @ hidden.reshape(-1), ids
