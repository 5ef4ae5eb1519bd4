"""What a repository holds for us, and whether a draft can belong to a model, from their configs.

Owns what can be known before the weights are here. The engine checks again, and more, once it has
them. Pure, but for reading tokenizer files.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_worker.errors import shown
from mlx_worker.models.cache import RepoFile, Snapshot
from mlx_worker.records import ASSISTANT_TYPES, TARGET_TYPES

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
CARD = "README.md"
KEPT_SUFFIXES = (".json", ".jinja", ".txt")
KEPT_NAMES = ("tokenizer.model", CARD)

Config = Mapping[str, Any]


def wanted(snapshot: Snapshot) -> Snapshot:
    """Only the files that are read: configs, tokenizer, card and safetensors; never a program."""
    files = tuple(file for file in snapshot.files if is_wanted(file.name))
    return Snapshot(snapshot.repo, snapshot.commit, files)


def is_wanted(name: str) -> bool:
    if "/" in name or name.startswith("."):
        return False
    return is_weights(name) or name.endswith(KEPT_SUFFIXES) or name in KEPT_NAMES


def is_weights(name: str) -> bool:
    return name.startswith("model") and name.endswith(".safetensors")


def file_of(snapshot: Snapshot, name: str) -> RepoFile | None:
    return next((file for file in snapshot.files if file.name == name), None)


def flaw(everything: Snapshot) -> str | None:
    """Why a repository can't be a model here, from the names of its files; None: it may be one."""
    names = [file.name for file in everything.files]
    kept = [name.casefold() for name in names if is_wanted(name)]
    if len(set(kept)) < len(kept):
        return "it lists files that differ in nothing but letters' case, or not at all"
    if CONFIG not in names:
        return f"it has no {CONFIG}"
    if any(is_weights(name) for name in names):
        return None
    others = sorted({name.rpartition(".")[2] for name in names} & {"gguf", "bin", "pt", "npz"})
    found = f" but {', '.join(others)}" if others else ""
    return f"it has no model*.safetensors{found}, and only those are loaded"


def text_part(config: Config) -> Config:
    """What describes the language model; the whole config where it is not nested."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def vocab_size(config: Config) -> object:
    return text_part(config).get("vocab_size") or config.get("vocab_size")


def mismatch(target: Config, draft: Config) -> str | None:
    """Why a draft can't be this target's, both values named; None: nothing speaks against it."""
    ours, theirs = text_part(target), text_part(draft)
    facts = [("vocab_size", vocab_size(target), vocab_size(draft))]
    if draft.get("model_type") in ASSISTANT_TYPES:
        if target.get("model_type") not in TARGET_TYPES:
            return f"it is for Gemma 4, the model is {shown(target.get('model_type'))}"
        backbone = draft.get("backbone_hidden_size")
        facts.append(("backbone_hidden_size", ours.get("hidden_size"), backbone))
        facts += _shared(ours, theirs, "sliding_window", "head_dim")
    for name, of_target, of_draft in facts:
        if of_target != of_draft:
            return f"{name}: the model has {shown(of_target)}, the draft has {shown(of_draft)}"
    return None


def _shared(ours: Config, theirs: Config, *names: str) -> list[tuple[str, object, object]]:
    """Facts that both configs name; where one is silent, its default is the engine's business."""
    named = (name for name in names if ours.get(name) and theirs.get(name))
    return [(name, ours[name], theirs[name]) for name in named]


def vocabulary(folder: Path) -> str | None:
    """A digest of every token and its id in a folder's tokenizer.json; None: it has none.

    Whatever else differs (templates, names of files), the same digest is the same vocabulary.
    """
    try:
        content = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        ids = vocab if isinstance(vocab, dict) else {one[0]: i for i, one in enumerate(vocab)}
        added = {one["content"]: one["id"] for one in content.get("added_tokens") or ()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return "unreadable"
    pairs = json.dumps(sorted({**ids, **added}.items()), ensure_ascii=False)
    return hashlib.sha256(pairs.encode("utf-8", "surrogatepass")).hexdigest()[:16]
