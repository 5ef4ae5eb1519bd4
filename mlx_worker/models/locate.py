"""A name → the files of a model on this machine.

Owns what a name may be beside `demo` and a folder, which the engine finds by itself: a short name
of the catalogue, or a hub id. Leaves getting what isn't here to pull.py. Blocking, never on the
network; any thread.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from mlx_worker.errors import IncompleteModel, ModelNotFound
from mlx_worker.models import catalogue
from mlx_worker.models.cache import Snapshot
from mlx_worker.models.pairing import CONFIG
from mlx_worker.models.store import Pulled, Store
from mlx_worker.records import Source

DEMO = "demo"
WORDS = ("auto", "none", "lookup")  # that a draft may be beside a name
HUB_ID = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")


def locate(name: str, store: Store | None = None) -> str | Source:
    """The model with this name. `demo`, a folder, and what can only be one are given back as such.

    Raises ModelNotFound for what isn't on this machine, IncompleteModel for what is so in part.
    """
    if is_local(name):
        return name
    store = store or Store.default()
    id = catalogue.canonical(name)
    if pulled := store.find(id):
        return _source(store, pulled)
    if snapshot := _cached(store, catalogue.repo_of(name)):
        drafts = [catalogue.repo_of(name) + "-assistant", *catalogue.drafts_of(name)]
        return Source(id, snapshot, draft=_first_cached(store, drafts))
    raise ModelNotFound(name, hint=hint_for(name))


def locate_draft(
    draft: str | None, store: Store | None = None, of: str | None = None
) -> str | Source | None:
    """The same for a draft, which may also be auto, none or lookup.

    of  the model that it is for, whose record says which commit of it was pulled
    """
    if draft is None or draft in WORDS or is_local(draft):
        return draft
    store = store or Store.default()
    repo = catalogue.repo_of(draft)
    models = store.models()
    first = [one for one in models if of and one.id == catalogue.canonical(of)]
    for pulled in (*first, *models):
        if pulled.draft and pulled.draft.repo == repo and _is_whole(store, pulled.draft):
            return Source(repo, store.cache.snapshot_folder(pulled.draft))
    return locate(draft, store)


def _is_whole(store: Store, snapshot: Snapshot) -> bool:
    return all(store.cache.is_whole(snapshot, file) for file in snapshot.files)


def is_local(name: str) -> bool:
    """Whether the engine finds it without us: `demo`, a folder, or a path that is none."""
    if name == DEMO or not name.strip() or name.startswith(("/", ".", "~")):
        return True
    try:
        return Path(name).is_dir()
    except OSError:  # a name too long for a path
        return False


def hint_for(name: str) -> str:
    """What to do about a name that nothing here has."""
    if catalogue.find(name) or HUB_ID.fullmatch(name):
        return f"mlx-worker pull {name}"
    near = catalogue.nearest(name)
    if near is None:
        return "a short name of `mlx-worker models --catalogue`, or owner/name as on the hub"
    return f"did you mean {near}? mlx-worker models --catalogue shows all"


def _source(store: Store, pulled: Pulled) -> Source:
    """Raises IncompleteModel."""
    missing = store.presence(pulled).missing
    if missing:
        raise IncompleteModel(
            pulled.id, missing, n_files=sum(len(s.files) for s in pulled.snapshots)
        )
    smaller = pulled.own_smaller_draft
    draft = None
    if smaller and smaller.is_chosen and smaller.folder.is_dir():
        draft = Source(smaller.folder.name, smaller.folder)
    elif pulled.draft:
        draft = Source(pulled.draft.repo, store.cache.snapshot_folder(pulled.draft))
    folder = store.cache.snapshot_folder(pulled.model)
    return Source(pulled.id, folder, draft, pulled.draft_note)


def _cached(store: Store, repo: str) -> Path | None:
    """A repository that another program brought here, at the commit of its main branch."""
    if repo.count("/") != 1:
        return None
    commit = store.cache.commit_of(repo, "main")
    folder = store.cache.snapshot_folder(Snapshot(repo, commit, ())) if commit else None
    return folder if folder and (folder / CONFIG).exists() else None


def _first_cached(store: Store, repos: Iterable[str]) -> Source | None:
    for repo in repos:
        if folder := _cached(store, repo):
            return Source(repo, folder)
    return None
