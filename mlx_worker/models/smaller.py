"""A quantised copy of a pulled model's draft: what it is made of, and where it lies.

Owns which model and draft are meant. Leaves making the copy to the engine, measuring it to the
bench, and remembering it to store.py. Blocking, never on the network; any thread.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_worker.errors import ConfigError, IncompleteModel, shown
from mlx_worker.models import catalogue
from mlx_worker.models.locate import DEMO, hint_for, is_local
from mlx_worker.models.pairing import CONFIG
from mlx_worker.models.store import SmallerDraft, Store


@dataclass(frozen=True)
class Plan:
    """A copy to make, or to measure again.

    id         of the model
    draft      its repository; model_folder, draft_folder: where the files of both are
    copy       as it will be kept; chosen where the same copy was before
    is_made    it is there already, of the same draft and made in the same way
    """

    id: str
    draft: str
    model_folder: Path
    draft_folder: Path
    copy: SmallerDraft
    is_made: bool


def plan(name: str, store: Store, bits: int, group_size: int) -> Plan:
    """What a copy of this model's draft would be; nothing is written.

    Raises ConfigError for a model that was not pulled or has no draft, IncompleteModel.
    """
    pulled = store.find(catalogue.canonical(name))
    if pulled is None:
        raise _not_pulled(name, store)
    if missing := store.presence(pulled).missing:
        n_files = sum(len(one.files) for one in pulled.snapshots)
        raise IncompleteModel(pulled.id, missing, n_files=n_files)
    if pulled.draft is None:
        why = f": {pulled.draft_note}" if pulled.draft_note else ""
        raise ConfigError(
            f"{pulled.id} has no draft that could be quantised{why}",
            hint=f"mlx-worker pull {pulled.id} --draft OWNER/NAME",
        )
    folder = store.drafts / folder_name(pulled.id, bits)
    wanted = SmallerDraft(folder, bits, of_commit=pulled.draft.commit, group_size=group_size)
    before = pulled.own_smaller_draft
    is_made = before is not None and replace(before, is_chosen=False) == wanted
    is_made = is_made and (folder / CONFIG).exists()
    return Plan(
        id=pulled.id,
        draft=pulled.draft.repo,
        model_folder=store.cache.snapshot_folder(pulled.model),
        draft_folder=store.cache.snapshot_folder(pulled.draft),
        copy=before if before and is_made else wanted,
        is_made=is_made,
    )


def folder_name(id: str, bits: int) -> str:
    """gemma-4-e2b:8bit → gemma-4-e2b--8bit-assistant-4bit: safe as a name, no path."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '--', id).lstrip('.-')}-assistant-{bits}bit"


def _not_pulled(name: str, store: Store) -> ConfigError:
    known = ", ".join(one.id for one in store.models()) or "none"
    if name == DEMO or is_local(name):
        hint = f"only the draft of a pulled model is quantised; pulled: {known}"
    else:
        hint = f"{hint_for(name)}; pulled: {known}"
    return ConfigError(f"{shown(name)} was not pulled", hint=hint)
