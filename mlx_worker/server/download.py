"""One download, in the words that clients read.

Owns the messages of a pull. Leaves what happens to models/pull.py, and who hears of it to pulls.py,
which imports this in the download's thread: the hub's library takes long to load. Blocking; any
thread.

    {"type": "planned", "id", "repo", "commit", "bytes", "present_bytes", "free_bytes",
     "draft", "draft_bytes", "draft_note"}
    {"type": "progress", "present_bytes", "bytes", "file"}
    {"type": "done", "id", "is_new", "draft", "draft_note", "unchecked"}
"""

from collections.abc import Generator
from contextlib import closing
from typing import Any

from mlx_worker.models.hub import Hub
from mlx_worker.models.pull import Fetched, Finished, Planned, PullEvent, pull
from mlx_worker.models.store import Pulled, Store

Message = dict[str, Any]


def messages(
    model: str, store: Store, hub: Hub | None, *, draft: str | None, revision: str | None
) -> Generator[Message | None, None, None]:
    """What a client is told; None: nothing, but it goes on. hub None: the usual one.

    Closing it stops the download, of which all that came is kept. Raises as pull does.
    """
    with closing(pull(model, store, hub or Hub(), draft=draft, revision=revision)) as events:
        for event in events:
            yield message(event)


def message(event: PullEvent) -> Message | None:
    match event:
        case Planned():
            return _planned(event)
        case Fetched(n_bytes=0):  # before there is a plan, only configs are read
            return None
        case Fetched(n_present, n_bytes, _, file):
            sizes = {"present_bytes": n_present, "bytes": n_bytes}
            return {"type": "progress", **sizes, "file": file}
        case Finished(pulled, is_new, unchecked):
            drafts = {"draft": _draft(pulled), "draft_note": pulled.draft_note}
            is_so = {"is_new": is_new, **drafts, "unchecked": unchecked}
            return {"type": "done", "id": pulled.id, **is_so}


def _planned(plan: Planned) -> Message:
    pulled = plan.pulled
    return {
        "type": "planned",
        "id": pulled.id,
        "repo": pulled.model.repo,
        "commit": pulled.model.commit,
        "bytes": plan.n_bytes,
        "present_bytes": plan.n_present,
        "free_bytes": plan.free_bytes,
        "draft": _draft(pulled),
        "draft_bytes": pulled.draft.n_bytes if pulled.draft else 0,
        "draft_note": pulled.draft_note,
    }


def _draft(pulled: Pulled) -> str | None:
    return pulled.draft.repo if pulled.draft else None
