"""Unquantised drafts on disk, and the demo pair as a model that was pulled."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text

from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.checkpoint import DEMO_FOLDER
from mlx_worker.models.cache import RepoFile, Snapshot
from mlx_worker.models.store import Pulled, Store
from tests.tiny import VOCAB, gemma_args, randomised, tiny_tokenizer

REPO = "acme/demo-it"
MODEL_COMMIT, DRAFT_COMMIT = "a" * 40, "b" * 40

SIZES: dict[str, Any] = {  # the least that groups of 64 divide
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}


def saved_pair(root: Path, *, has_centroids: bool) -> tuple[Path, Path]:
    """A random target and an assistant of it in bfloat16, every layer's width a multiple of 64."""
    args = gemma_args("own", **SIZES)
    target = save(root / "model", randomised(gemma4_text.Model(args), 0), dict(vars(args)))
    tiny_tokenizer().save_pretrained(target)
    own = gemma_args("own", **SIZES, num_kv_shared_layers=2)
    assistant = Assistant(own, 64, 16 if has_centroids else 0, 4 if has_centroids else 0)
    randomised(assistant, 7)
    head: dict[str, Any] = {}
    if has_centroids:
        ordering = mx.random.permutation(VOCAB, key=mx.random.key(1))
        assistant.masked_embedding.token_ordering = ordering
        head = {"num_centroids": 16, "centroid_intermediate_top_k": 4}
    config = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 64,
        "use_ordered_embeddings": has_centroids,
        **head,
        "text_config": vars(own),
    }
    return target, save(root / "draft", assistant, config)


def save(folder: Path, model: nn.Module, config: Mapping[str, Any]) -> Path:
    """As published: bfloat16, one file."""
    folder.mkdir(parents=True)
    model.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pull_demo(store: Store, *, draft_commit: str = DRAFT_COMMIT) -> Pulled:
    """The demo pair's files in the hub's cache, and its record, as a pull leaves them."""
    model = _in_cache(store, REPO, DEMO_FOLDER / "target", MODEL_COMMIT)
    draft = _in_cache(store, f"{REPO}-assistant", DEMO_FOLDER / "assistant", draft_commit)
    pulled = Pulled(REPO, model, draft, added_s=1.0)
    store.put(pulled)
    return pulled


def _in_cache(store: Store, repo: str, folder: Path, commit: str) -> Snapshot:
    contents = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    files = tuple(RepoFile(name, len(contents[name]), digests[name]) for name in contents)
    snapshot = Snapshot(repo, commit, files)
    for file in files:
        blob = store.cache.blob(repo, file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / file.name, blob)
        store.cache.link(snapshot, file)
    return snapshot
