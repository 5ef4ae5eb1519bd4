"""Whether a draft fits a target, and the assistant network from disk.

Owns the pair checks, each with its own message naming both values, and how an assistant's files
become a network. Engine thread only.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.checkpoint import REPAIR_HINT, Checkpoint, bad_value
from mlx_worker.engine.target import FULL, SLIDING, Target
from mlx_worker.engine.weights import build_error, read_tokenizer, settle
from mlx_worker.errors import CheckpointError, PairMismatch, UnsupportedModel

# What transformers takes where an assistant's config is silent.
HEAD_DEFAULTS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}


def check_vocabulary(target: Target, tokenizer: TokenizerWrapper, draft: Checkpoint) -> None:
    """Raises PairMismatch unless sizes agree, and contents too where the draft has a tokenizer."""
    size = draft.text_config.get("vocab_size") or draft.config.get("vocab_size")
    if size != target.vocab_size:
        raise PairMismatch("vocab_size", target.vocab_size, size)
    if not draft.has_tokenizer:
        return
    ours, theirs = _vocabulary_hash(tokenizer), _vocabulary_hash(read_tokenizer(draft))
    if ours != theirs:
        raise PairMismatch("tokenizer vocabulary (SHA-256)", ours, theirs)


def _vocabulary_hash(tokenizer: TokenizerWrapper) -> str:
    entries = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(entries.encode()).hexdigest()[:16]


def load_assistant(checkpoint: Checkpoint, target: Target) -> Assistant:
    """The assistant network in memory, checked against the target it will read.

    Raises PairMismatch for one made for another target, CheckpointError for a broken one.
    """
    _check_pair(checkpoint, _assistant_args(checkpoint), target)
    return read_assistant(checkpoint, settle)


def read_assistant(checkpoint: Checkpoint, bring_in: Callable[[nn.Module], None]) -> Assistant:
    """The assistant network of a folder, whatever its target.

    bring_in  brings its weights into memory

    Raises CheckpointError for a broken one.
    """
    config, args = checkpoint.config, _assistant_args(checkpoint)
    n_centroids, n_clusters = _head_size(checkpoint, args.vocab_size)
    try:
        network = Assistant(args, config["backbone_hidden_size"], n_centroids, n_clusters)
        weights = _assistant_weights(checkpoint)
        _quantize_like(network, weights, config)
        network.load_weights(list(weights.items()))
        bring_in(network)
    except Exception as error:  # a config can be wrong in as many ways as a network can fail
        raise build_error(checkpoint, error) from error
    if n_centroids:
        _check_ordering(checkpoint, network.masked_embedding.token_ordering)
    return network


def _assistant_args(checkpoint: Checkpoint) -> gemma4_text.ModelArgs:
    text = dict(checkpoint.text_config)
    text["num_kv_shared_layers"] = text["num_hidden_layers"]
    text["hidden_size_per_layer_input"] = 0
    return gemma4_text.ModelArgs.from_dict(text)


def _head_size(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, int]:
    """Centroids of the head, and how many of their clusters get a logit; (0, 0) if it is tied."""
    config, file = checkpoint.config, checkpoint.path / "config.json"
    if not config.get("use_ordered_embeddings"):
        return 0, 0
    found = {key: config.get(key) for key in HEAD_DEFAULTS}
    sizes = {k: HEAD_DEFAULTS[k] if found[k] is None else found[k] for k in HEAD_DEFAULTS}
    n_centroids, n_clusters = sizes.values()
    if type(n_centroids) is not int or n_centroids < 1 or vocab_size % n_centroids:
        raise bad_value(file, "num_centroids", n_centroids, f"a divisor of vocab_size {vocab_size}")
    if type(n_clusters) is not int or not 1 <= n_clusters <= n_centroids:
        limit = f"1 to num_centroids {n_centroids}"
        raise bad_value(file, "centroid_intermediate_top_k", n_clusters, limit)
    return n_centroids, n_clusters


def _check_ordering(checkpoint: Checkpoint, ordering: mx.array) -> None:
    """Raises CheckpointError unless every id is in exactly one cluster."""
    if not mx.array_equal(mx.sort(ordering), mx.arange(ordering.size)):
        raise CheckpointError(
            checkpoint.path,
            "masked_embedding.token_ordering does not hold every token id exactly once",
            REPAIR_HINT,
        )


def _assistant_weights(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """The draft's tensors under this program's names; the tied head and K/V leftovers dropped."""
    weights: dict[str, mx.array] = {}
    for file in checkpoint.weight_files():
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        weights.update(loaded)
    dropped = ("lm_head.", "self_attn.k_", "self_attn.v_", "rotary_emb")
    if checkpoint.config.get("tie_word_embeddings") is False and "lm_head.weight" in weights:
        raise UnsupportedModel(f"{checkpoint.path} is an assistant with a head of its own")
    kept = {k: v for k, v in weights.items() if not any(part in k for part in dropped)}
    ordering = "masked_embedding.token_ordering"
    if ordering in kept:
        kept[ordering] = kept[ordering].astype(mx.int32)
    if not checkpoint.config.get("use_ordered_embeddings"):
        kept = {k: v for k, v in kept.items() if not k.startswith("masked_embedding.")}
    return kept


def _quantize_like(
    network: nn.Module, weights: Mapping[str, mx.array], config: Mapping[str, Any]
) -> None:
    """Quantise the modules whose weights came quantised."""
    found = config.get("quantization")
    if not found:
        return

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        return found[path] if isinstance(found.get(path), dict) else True

    mode = found.get("mode", "affine")
    nn.quantize(network, found["group_size"], found["bits"], mode=mode, class_predicate=packed)


def _check_pair(checkpoint: Checkpoint, args: gemma4_text.ModelArgs, target: Target) -> None:
    """Raises PairMismatch, naming both values, unless the assistant can read this target's K/V."""
    if target.gemma is None:
        raise PairMismatch("model family", "not Gemma 4", checkpoint.model_type)
    ours = target.gemma.args
    backbone = checkpoint.config.get("backbone_hidden_size")
    if backbone != ours.hidden_size:
        raise PairMismatch("backbone_hidden_size", ours.hidden_size, backbone)
    kinds = list(dict.fromkeys(args.layer_types or []))
    for kind in kinds:
        if kind not in target.donor_layers:
            raise PairMismatch("layer types", sorted(target.donor_layers), kind)
    if SLIDING in kinds and args.sliding_window != ours.sliding_window:
        raise PairMismatch("sliding_window", ours.sliding_window, args.sliding_window)
    donors = {kind: target.gemma.layers[i].self_attn for kind, i in target.donor_layers.items()}
    if SLIDING in kinds and args.head_dim != donors[SLIDING].head_dim:
        raise PairMismatch("head_dim", donors[SLIDING].head_dim, args.head_dim)
    if FULL in kinds and args.global_head_dim != donors[FULL].head_dim:
        raise PairMismatch("full-attention head_dim", donors[FULL].head_dim, args.global_head_dim)
    _check_kv_heads(args, {kind: donors[kind] for kind in kinds})


def _check_kv_heads(args: gemma4_text.ModelArgs, donors: Mapping[str, Any]) -> None:
    """Configs name the full layers' heads apart only where they differ, and not all in one way."""
    common, full = args.num_key_value_heads, args.num_global_key_value_heads or 0
    for kind, donor in donors.items():
        allowed = (common, full) if kind == FULL else (common,)
        if donor.n_kv_heads not in allowed:
            raise PairMismatch(f"{kind} key/value heads", donor.n_kv_heads, max(allowed))
