"""A model and its draft from the hub, as one act.

Owns the order of things: what is asked for, which draft belongs to it, whether there is room, then
the files, then the record. Leaves a file to transfer.py and the record to store.py. Blocking; any
thread. Stopped at any moment (a closed generator, Ctrl-C, a lost machine), the same call goes on.
"""

import json
import re
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import yaml

from mlx_worker.errors import (
    GatedModel,
    HubError,
    HubUnreachable,
    ModelError,
    ModelNotFound,
    NoSpace,
    UnsupportedModel,
    shown,
)
from mlx_worker.files import try_lock
from mlx_worker.models import catalogue, pairing
from mlx_worker.models.cache import Cache, RepoFile, Snapshot, free_bytes
from mlx_worker.models.hub import Hub
from mlx_worker.models.locate import HUB_ID, hint_for, is_local
from mlx_worker.models.pairing import (
    CARD,
    CONFIG,
    file_of,
    flaw,
    mismatch,
    vocabulary,
    wanted,
)
from mlx_worker.models.store import Pulled, Store
from mlx_worker.models.transfer import fetch, is_right
from mlx_worker.records import ASSISTANT_TYPES

RESERVE_BYTES = 500_000_000  # of the disk that a pull leaves free
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?$", re.DOTALL | re.MULTILINE)
MAX_CONFIG_BYTES = 5_000_000
MAX_CARD_CHARS = 65_536  # of its front matter
MAX_CANDIDATES = 12
WAITING = "another pull is at it"
ROUNDS = 3  # over all files, should someone delete some meanwhile
LOOK_S = 0.25  # between two looks at whether another pull has ended
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
ADDRESS = re.compile(r"https?://[^/]+/([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)(?:/(?:tree/main)?)?")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Planned:
    """What is about to be downloaded.

    pulled         what there will be
    n_bytes        of all its files; n_present: of those that are here
    free_bytes     of the disk
    """

    pulled: Pulled
    n_bytes: int
    n_present: int
    free_bytes: int


@dataclass(frozen=True)
class Fetched:
    """How far it is. file: the one that is being fetched or checked."""

    n_present: int
    n_bytes: int
    repo: str
    file: str


@dataclass(frozen=True)
class Finished:
    """All of it is here.

    is_new        something came that was not here
    is_unchecked  the hub could not be asked whether there is a newer revision; why
    """

    pulled: Pulled
    is_new: bool
    is_unchecked: str | None = None


PullEvent = Planned | Fetched | Finished
Events = Generator[PullEvent, None, None]


def pull(
    name: str,
    store: Store,
    hub: Hub,
    *,
    draft: str | None = None,
    revision: str | None = None,
) -> Events:
    """Get a model and its draft, or what is missing of them.

    name      a short name of the catalogue, or a hub id
    draft     auto: the one that belongs to it; none; or a hub id
    revision  of the model: a branch, a tag or a commit
    None of either: as the last time, else auto and main

    Raises ModelNotFound, GatedModel, NoSpace, HubUnreachable, HubError, UnsupportedModel for what
    is no model and for a named draft that can't be its; ConfigError where the record
    can't be kept, ModelError where the files can't.
    """
    id = catalogue.canonical(_checked(name))
    try:
        with ExitStack() as stack:
            yield from _alone(id, store, stack)
            before = store.find(id)
            id = before.id if before else id
            last = before and (before.pending or before)
            is_same = before is not None and not _is_other(before, draft, revision)
            draft = draft or (last.asked_draft if last else "auto")
            revision = _checked_revision(id, revision or (last.asked if last else "main"))
            try:
                plan = yield from _plan(id, store, hub, draft, revision)
            except HubUnreachable as error:
                if before is None or not is_same or not store.presence(before).is_whole:
                    raise
                yield from _check_all(before, store)
                yield Finished(before, is_new=False, is_unchecked=error.message)
                return
            yield from _get(plan, before, store, hub)
    except OSError as error:
        place, why = error.filename or store.cache.folder, error.strerror or error
        is_ours = str(place).startswith(str(store.path.parent))
        hint = f"choose another folder with {'MLX_WORKER_HOME' if is_ours else 'HF_HOME'}"
        raise ModelError(f"{place}: can't be used: {why}", hint=hint) from error


def _check_all(pulled: Pulled, store: Store) -> Generator[PullEvent, None, None]:
    """Read every file. Raises HubUnreachable for one that is broken: nobody is there to mend it."""
    n_bytes = pulled.n_bytes
    for snapshot in pulled.snapshots:
        for file in snapshot.files:
            steps = is_right(store.cache.blob(snapshot.repo, file), file)
            if not (yield from _quietly(steps, snapshot, file, (n_bytes, n_bytes))):
                raise HubUnreachable(
                    f"{pulled.id}: {file.name} is broken, and the hub can't be asked to mend it",
                    hint="the same command mends it once the hub can be reached",
                )


def _alone(id: str, store: Store, stack: ExitStack) -> Generator[PullEvent, None, None]:
    """Wait until nobody else is at the same model; meanwhile theirs is the progress."""
    while (lock := try_lock(store.lock(id))) is None:
        pulled = store.find(id)
        plan = pulled and (pulled.pending or pulled)
        if plan:
            n_present = store.presence(plan).n_bytes
            yield Fetched(n_present, plan.n_bytes, plan.model.repo, WAITING)
        else:
            yield Fetched(0, 0, id, WAITING)
        time.sleep(LOOK_S)
    stack.callback(lock.close)


def _checked_revision(id: str, revision: str) -> str:
    """Raises ModelNotFound for what no branch can be called; it becomes a file's path."""
    parts = revision.split("/")
    if not REVISION.fullmatch(revision) or any(part in ("", ".", "..") for part in parts):
        hint = "a revision is a branch, a tag or a whole commit"
        raise ModelNotFound(f"{id} at {shown(revision)}", hint=hint)
    return revision


def _checked(name: str) -> str:
    """Raises ModelNotFound for what the hub can't have."""
    if is_local(name):
        raise ModelNotFound(
            shown(name), hint="only what is on the hub can be pulled; a folder is served as it is"
        )
    if found := ADDRESS.fullmatch(name):
        return found[1]
    if catalogue.find(name) is None and not HUB_ID.fullmatch(name):
        raise ModelNotFound(shown(name), hint=hint_for(name))
    return name


def _is_other(before: Pulled, draft: str | None, revision: str | None) -> bool:
    """Whether something else is asked for than was pulled."""
    has = before.draft.repo if before.draft else None
    if draft not in (None, "auto") and has != (
        None if draft == "none" else catalogue.repo_of(draft)
    ):
        return True
    return revision not in (None, before.asked, before.model.commit)


# --- what to get


def _plan(
    id: str, store: Store, hub: Hub, draft: str, revision: str
) -> Generator[PullEvent, None, Pulled]:
    """Ask the hub what there is, and read the configs. Only small files are fetched."""
    everything = hub.snapshot(catalogue.repo_of(id), revision)
    if problem := flaw(everything):
        raise UnsupportedModel(f"{everything.repo}: {problem}", hint="look for an MLX conversion")
    model = wanted(everything)
    with TemporaryDirectory(prefix="mlx-worker-") as scratch:
        reader = _Reader(store.cache, Cache(Path(scratch)), hub)
        config = yield from _checked_config(model, reader)
        found, note = yield from _find_draft(model, config, reader, draft)
    now = time.time()
    return Pulled(id, model, found, note, asked=revision, asked_draft=draft, added_s=now)


def _checked_config(
    model: Snapshot, reader: "_Reader"
) -> Generator[PullEvent, None, dict[str, Any]]:
    """A model's config. Raises UnsupportedModel for a draft, and for weights that aren't there."""
    config = yield from reader.json(model, CONFIG)
    if config.get("model_type") in ASSISTANT_TYPES:
        raise UnsupportedModel(
            f"{model.repo} is a draft ({config['model_type']}), not a model",
            hint="pull its model; the draft comes along",
        )
    if problem := (yield from reader.missing_shards(model)):
        raise UnsupportedModel(f"{model.repo}: {problem}", hint="it is not whole on the hub either")
    return config


def _find_draft(
    model: Snapshot, config: dict[str, Any], reader: "_Reader", draft: str
) -> Generator[PullEvent, None, tuple[Snapshot | None, str | None]]:
    """The first that the hub has and that fits, and why there is none."""
    if draft == "none":
        return None, "none was wanted"
    is_named = draft != "auto"
    if is_named:
        repos: Sequence[str] = [catalogue.repo_of(_checked_draft(draft))]
    else:
        repos = yield from _candidates(model, config, reader)
    notes: list[str] = []
    for repo in repos:
        try:
            found = wanted(reader.hub.snapshot(repo))
            problem = yield from _problem(found, config, reader)
            if problem is None:
                return found, None
            notes.append(f"{repo}: {problem}")
        except HubUnreachable:
            raise
        except (ModelNotFound, GatedModel, HubError, UnsupportedModel) as error:
            if is_named:
                raise
            if not isinstance(error, ModelNotFound):
                notes.append(str(error))
    if is_named:
        raise UnsupportedModel(notes[0], hint="choose a draft made for this model, or --no-draft")
    return None, "; ".join(notes) or "the hub has none for it"


def _problem(
    draft: Snapshot, config: dict[str, Any], reader: "_Reader"
) -> Generator[PullEvent, None, str | None]:
    """Why a repository can't be the draft of a model with this config; None: it seems to be."""
    if problem := flaw(draft):
        return problem
    if problem := mismatch(config, (yield from reader.json(draft, CONFIG))):
        return problem
    return (yield from reader.missing_shards(draft))


def _checked_draft(draft: str) -> str:
    if draft == "lookup":
        raise UnsupportedModel(
            "draft lookup has no files that could be pulled",
            hint="mlx-worker config set models.ID.draft lookup",
        )
    if is_local(draft):
        raise ModelNotFound(
            shown(draft),
            hint="one in a folder needs no pull: `mlx-worker config set models.ID.draft FOLDER`",
        )
    return draft


def _candidates(
    model: Snapshot, config: dict[str, Any], reader: "_Reader"
) -> Generator[PullEvent, None, list[str]]:
    """Repositories that may hold its draft: the catalogue's, `<id>-assistant`, its base's."""
    found = [*catalogue.drafts_of(model.repo), f"{model.repo}-assistant"]
    bases = [config.get("base_model"), config.get("_name_or_path")]
    bases += yield from reader.bases(model)
    for base in bases:
        if isinstance(base, str) and HUB_ID.fullmatch(base):
            found += [*catalogue.drafts_of(base), f"{base}-assistant"]
    return list(dict.fromkeys(found))[:MAX_CANDIDATES]


class _Reader:
    """Reads small files of repositories, of which nothing is kept: nobody may want them.

    cache    where they are if they are here; scratch: where they are put if not
    """

    def __init__(self, cache: Cache, scratch: Cache, hub: Hub) -> None:
        self.cache = cache
        self.scratch = scratch
        self.hub = hub

    def text(self, snapshot: Snapshot, file: RepoFile) -> Generator[PullEvent, None, str]:
        if file.size > MAX_CONFIG_BYTES:
            raise UnsupportedModel(
                f"{snapshot.repo}: {file.name} has {file.size:,} bytes; "
                f"at most {MAX_CONFIG_BYTES:,} are read"
            )
        blob = self.cache.blob(snapshot.repo, file)
        if (yield from _quietly(is_right(blob, file), snapshot, file)):
            with suppress(FileNotFoundError):  # a removal of another model may take it along
                return blob.read_text(encoding="utf-8", errors="replace")
        yield from _quietly(fetch(self.hub, self.scratch, snapshot, file), snapshot, file)
        blob = self.scratch.blob(snapshot.repo, file)
        return blob.read_text(encoding="utf-8", errors="replace")

    def json(self, snapshot: Snapshot, name: str) -> Generator[PullEvent, None, dict[str, Any]]:
        """Raises UnsupportedModel for a file that isn't a JSON object."""
        file = file_of(snapshot, name)
        assert file, "flaw() looked for it"
        text = yield from self.text(snapshot, file)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UnsupportedModel(f"{snapshot.repo}: its {name} is no JSON object")
        return value

    def missing_shards(self, snapshot: Snapshot) -> Generator[PullEvent, None, str | None]:
        """What the index of the weights names and the repository lacks; None: nothing."""
        if file_of(snapshot, INDEX) is None:
            return None
        shards = (yield from self.json(snapshot, INDEX)).get("weight_map")
        named = set(map(str, shards.values())) if isinstance(shards, dict) else set[str]()
        lacking = sorted(named - {file.name for file in snapshot.files})
        return f"its {INDEX} names {shown(lacking[0])}, which isn't there" if lacking else None

    def bases(self, snapshot: Snapshot) -> Generator[PullEvent, None, list[Any]]:
        """What its card says it was made from; [] where it has none, or none that can be read."""
        file = file_of(snapshot, CARD)
        if file is None or file.size > MAX_CONFIG_BYTES:
            return []
        text = yield from self.text(snapshot, file)
        found = FRONT_MATTER.search(text[:MAX_CARD_CHARS])
        try:
            front = yaml.safe_load(found[1]) if found else None
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
            return []
        bases = front.get("base_model") if isinstance(front, dict) else None
        return bases if isinstance(bases, list) else [bases]


T = TypeVar("T")


def _quietly(
    steps: Generator[int, None, T],
    snapshot: Snapshot,
    file: RepoFile,
    counts: tuple[int, int] = (0, 0),
) -> Generator[PullEvent, None, T]:
    """The same steps, of which nobody counts the bytes."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value
        yield Fetched(*counts, snapshot.repo, file.name)


# --- getting it


def _get(plan: Pulled, before: Pulled | None, store: Store, hub: Hub) -> Events:
    """The files, then the record. While they come, what was here before is still served."""
    n_present = store.presence(plan).n_bytes
    free = free_bytes(store.cache.folder)
    need = plan.n_bytes - n_present
    if need > max(0, free - RESERVE_BYTES):
        raise NoSpace(store.cache.folder, need_bytes=need + RESERVE_BYTES, free_bytes=free)
    if before:
        plan = replace(plan, added_s=before.added_s)
    store.put(replace(before, pending=plan) if before and _serves(before, plan, store) else plan)
    yield Planned(plan, plan.n_bytes, n_present, free)
    is_new = need > 0
    for _ in range(ROUNDS):
        seen = _Count(n_present, plan.n_bytes)
        yield from _fetch_all(plan, store, hub, seen, is_weights=False)
        plan = _with_same_vocabulary(plan, store)
        yield from _fetch_all(plan, store, hub, seen, is_weights=True)
        is_new = is_new or seen.has_grown
        presence = store.presence(plan)
        if presence.is_whole:
            break
        n_present = presence.n_bytes
    else:
        raise ModelError(
            f"{plan.id}: files vanish while it is pulled", hint="see what deletes them"
        )
    for snapshot in plan.snapshots:
        store.cache.point(snapshot.repo, _branch(plan, snapshot), snapshot.commit)
    is_new = is_new or before is None or before.snapshots != plan.snapshots
    store.finish(plan)
    yield Finished(plan, is_new)


@dataclass
class _Count:
    """Bytes that are here, of all."""

    n_present: int
    n_bytes: int
    has_grown: bool = False


def _fetch_all(
    plan: Pulled, store: Store, hub: Hub, seen: _Count, *, is_weights: bool
) -> Generator[PullEvent, None, None]:
    """All weights, or all else, of which a fault shows sooner."""
    for snapshot in plan.snapshots:
        for file in sorted(snapshot.files, key=lambda file: file.size):
            if pairing.is_weights(file.name) is not is_weights:
                continue
            for n in fetch(hub, store.cache, snapshot, file):
                seen.n_present += n
                seen.has_grown = seen.has_grown or n > 0
                yield Fetched(seen.n_present, seen.n_bytes, snapshot.repo, file.name)


def _serves(before: Pulled, plan: Pulled, store: Store) -> bool:
    """Whether there is something to go on serving meanwhile."""
    return before.snapshots != plan.snapshots and store.presence(before).is_whole


def _branch(plan: Pulled, snapshot: Snapshot) -> str:
    return plan.asked if snapshot == plan.model else "main"


def _with_same_vocabulary(plan: Pulled, store: Store) -> Pulled:
    """Without its draft, if the tokenizers' contents differ; a draft need not have one."""
    if plan.draft is None:
        return plan
    ours = vocabulary(store.cache.snapshot_folder(plan.model))
    theirs = vocabulary(store.cache.snapshot_folder(plan.draft))
    if theirs is None or ours == theirs:
        return plan
    what = f"the model's vocabulary is {ours}, its own is {theirs} (SHA-256)"
    note = f"{plan.draft.repo}: {what}"
    return replace(plan, draft=None, draft_note=note)
