"""Models as a pull leaves them: a record, and files in a hub cache, made of the demo pair."""

import hashlib
import shutil
from pathlib import Path

from mlx_worker.engine.checkpoint import DEMO_FOLDER
from mlx_worker.models.cache import Cache, RepoFile, Snapshot
from mlx_worker.models.store import Pulled, Store

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def store_in(home: Path) -> Store:
    """The one that a process with this home folder uses (conftest.py sets its variables)."""
    return Store(home / ".mlx-worker", Cache(home / "hf" / "hub"))


def pull(store: Store, id: str, *, is_whole: bool = True) -> Pulled:
    """The demo pair under another name; one that isn't whole lacks its weights."""
    model = _snapshot(store.cache, f"owner/{id}", DEMO_FOLDER / "target")
    draft = _snapshot(store.cache, f"owner/{id}-draft", DEMO_FOLDER / "assistant")
    pulled = Pulled(id, model, draft)
    if not is_whole:
        cut(store, pulled)
    store.put(pulled)
    return pulled


def cut(store: Store, pulled: Pulled) -> None:
    (store.cache.snapshot_folder(pulled.model) / "model.safetensors").unlink()


def complete(store: Store, pulled: Pulled) -> None:
    file = next(one for one in pulled.model.files if one.name == "model.safetensors")
    store.cache.link(pulled.model, file)


def _snapshot(cache: Cache, repo: str, folder: Path) -> Snapshot:
    files = tuple(_file(path) for path in sorted(folder.iterdir()) if path.is_file())
    snapshot = Snapshot(repo, COMMIT, files)
    cache.point(repo, "main", COMMIT)
    for file in files:
        blob = cache.blob(repo, file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / file.name, blob)
        cache.link(snapshot, file)
    return snapshot


def _file(path: Path) -> RepoFile:
    content = path.read_bytes()
    return RepoFile(path.name, len(content), hashlib.sha256(content).hexdigest())
