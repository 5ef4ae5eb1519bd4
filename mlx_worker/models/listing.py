"""What there is, for whoever shows it: pulled models and the catalogue, as plain values.

Owns the keys that `mlx-worker models --json` and GET /api/models share. Blocking, never on the
network; any thread.
"""

from collections.abc import Mapping
from typing import Any, Literal

from mlx_worker.models import catalogue
from mlx_worker.models.cache import Snapshot, free_bytes
from mlx_worker.models.store import Pulled, Store

State = Literal["ready", "updating", "downloading", "incomplete"]


def pulled_json(
    store: Store, verdicts: Mapping[tuple[str, str | None], str]
) -> list[dict[str, Any]]:
    """Every model that was asked for. verdicts: (id, name of the draft) → text, as last measured.

    Raises ConfigError.
    """
    return [_model(store, one, verdicts) for one in store.models()]


def _model(
    store: Store, pulled: Pulled, verdicts: Mapping[tuple[str, str | None], str]
) -> dict[str, Any]:
    wanted = pulled.pending or pulled
    presence = store.presence(wanted)
    smaller = pulled.own_smaller_draft
    has_smaller = smaller is not None and smaller.is_chosen
    draft = smaller.folder.name if smaller and has_smaller else pulled.draft and pulled.draft.repo
    return {
        "id": pulled.id,
        "state": _state(store, pulled),
        "repo": pulled.model.repo,
        "revision": pulled.asked,
        "commit": pulled.model.commit,
        "bytes": wanted.n_bytes,
        "present_bytes": presence.n_bytes,
        "missing": list(presence.missing),
        "draft": wanted.draft and _draft(wanted.draft),
        "draft_note": wanted.draft_note,
        "smaller_draft": smaller and {"bits": smaller.bits, "is_chosen": smaller.is_chosen},
        "speculation": verdicts.get((pulled.id, draft)),
        "added_s": pulled.added_s,
    }


def _draft(snapshot: Snapshot) -> dict[str, Any]:
    return {"repo": snapshot.repo, "commit": snapshot.commit, "bytes": snapshot.n_bytes}


def _state(store: Store, pulled: Pulled) -> State:
    presence = store.presence(pulled)
    if presence.is_downloading:
        return "updating" if pulled.pending and presence.is_whole else "downloading"
    return "ready" if presence.is_whole else "incomplete"


def catalogue_json(store: Store, budget_bytes: int) -> list[dict[str, Any]]:
    """Every model that has a short name, with what it takes and whether that fits."""
    have = {one.id for one in store.models()}
    return [
        {
            "id": one.id,
            "title": one.title,
            "variant": one.tag,
            "repo": one.weights.repo,
            "bytes": one.weights.n_bytes,
            "draft": one.drafts[0].repo if one.drafts else None,
            "draft_bytes": one.drafts[0].n_bytes if one.drafts else 0,
            "need_bytes": one.need_bytes,
            "fits": one.need_bytes <= budget_bytes,
            "is_pulled": one.id in have,
        }
        for one in catalogue.variants()
    ]


def disk_json(store: Store) -> dict[str, Any]:
    folder = store.cache.folder
    return {"folder": str(folder), "free_bytes": free_bytes(folder)}
