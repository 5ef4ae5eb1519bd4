"""What was pulled: which revision of which repository, and where its files are.

Owns `models.json`, in the folder of config.yaml. The files themselves are in huggingface-hub's own
cache (cache.py). Leaves getting them to pull.py. Blocking, never on the network; any thread, any
process.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlx_worker.config import home
from mlx_worker.errors import ConfigError, ModelBusy, shown
from mlx_worker.files import is_locked, locked, try_lock, write_whole
from mlx_worker.models.cache import DIGEST, Cache, RepoFile, Snapshot, size_of

FILE = "models.json"
FORMAT = 1
NOTHING = Snapshot("", "", ())
LOOKS, LOOK_S = 20, 0.05  # at a lock, before it counts as held
MEND = "mend the file, or delete it and pull the models again; nothing is downloaded twice"


@dataclass(frozen=True)
class SmallerDraft:
    """A quantised copy of the draft, made on this machine.

    is_chosen  it was measured to be faster, so it is used in the other's place
    of_commit  of the draft that it was made of; for another it counts for nothing
    """

    folder: Path
    bits: int
    is_chosen: bool = False
    of_commit: str = ""
    group_size: int = 64


@dataclass(frozen=True)
class Pulled:
    """A model that was asked for, with its draft.

    id          what clients call it: its short name in the catalogue, else the repository
    draft_note  why it has no draft
    asked       the revision that was asked for: a branch, a tag, or a commit
    asked_draft  the draft that was: auto, none or a repository
    added_s     when it was first asked for, in seconds since 1970
    pending     what takes its place once that is whole: a newer revision, or another draft
    """

    id: str
    model: Snapshot
    draft: Snapshot | None = None
    draft_note: str | None = None
    asked: str = "main"
    asked_draft: str = "auto"
    added_s: float = 0.0
    smaller_draft: SmallerDraft | None = None
    pending: "Pulled | None" = None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        return (self.model,) if self.draft is None else (self.model, self.draft)

    @property
    def n_bytes(self) -> int:
        return sum(snapshot.n_bytes for snapshot in self.snapshots)

    @property
    def own_smaller_draft(self) -> SmallerDraft | None:
        """The quantised copy of this very draft; one of another commit is void."""
        smaller, draft = self.smaller_draft, self.draft
        return smaller if smaller and draft and smaller.of_commit == draft.commit else None


@dataclass(frozen=True)
class Presence:
    """How much of it is here.

    n_bytes         of whole files and of those on their way
    missing         the files that are not whole
    is_downloading  someone is at it
    """

    n_bytes: int
    missing: tuple[str, ...]
    is_downloading: bool

    @property
    def is_whole(self) -> bool:
        return not self.missing


class Store:
    """The models of one folder, and the cache that their files are in."""

    def __init__(self, folder: Path, cache: Cache) -> None:
        self.path = folder / FILE
        self.cache = cache
        self.drafts = folder / "drafts"
        self._locks = folder / "pulls"

    @classmethod
    def default(cls) -> "Store":
        return cls(home(), Cache.default())

    def models(self) -> list[Pulled]:
        """Everything that was asked for, whole or not, in the order it was.

        Raises ConfigError for a file that can't be read.
        """
        return self._read()[0]

    def _read(self) -> tuple[list[Pulled], list[Snapshot]]:
        """The models, and what was about to be deleted. Raises ConfigError."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: can't be read: {error}", hint=MEND) from None
        try:
            values = json.loads(text)
            found = values["format"]
            if found != FORMAT:
                raise ConfigError(
                    f"{self.path}: format {shown(found)}, this version reads {FORMAT}",
                    hint="update mlx-worker",
                )
            abandoned = [_snapshot(value) for value in values.get("abandoned", ())]
            return [_pulled(value) for value in values["models"]], abandoned
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self.path}: can't be read: {what}", hint=MEND) from None

    def find(self, id: str) -> Pulled | None:
        """By its id; letters' case doesn't count, as it doesn't on every disk."""
        return next((one for one in self.models() if is_same(one.id, id)), None)

    def put(self, pulled: Pulled) -> None:
        """Keep it, in the place of the one with its id. Raises ConfigError."""
        self._change(lambda models: _with(models, pulled))

    def renew(self) -> None:
        """Write the record as it is, so that whoever watches it looks again. Raises ConfigError."""
        self._change(lambda models: models)

    def presence(self, pulled: Pulled) -> Presence:
        """Of what it is now; of what will take its place, presence(pulled.pending)."""
        wanted = [(one, file) for one in pulled.snapshots for file in one.files]
        once = {(one.repo, file.digest): (one, file) for one, file in wanted}.values()
        return Presence(
            n_bytes=sum(self.cache.n_bytes(one.repo, file) for one, file in once),
            missing=tuple(f.name for one, f in wanted if not self.cache.is_whole(one, f)),
            is_downloading=is_locked(self.lock(pulled.id)),
        )

    def remove(self, pulled: Pulled) -> int:
        """Delete a model, and its draft where no other uses it; returns the bytes freed.

        Raises ModelBusy while it is downloaded, ConfigError.
        """
        with ExitStack() as stack:
            for _ in range(LOOKS):  # somebody who only looks holds the lock for a moment
                lock = try_lock(self.lock(pulled.id))
                if lock:
                    stack.callback(lock.close)
                    freed, left = self._change(
                        lambda models: [one for one in models if not is_same(one.id, pulled.id)]
                    )
                    _raise_for(pulled, left)
                    return freed
                time.sleep(LOOK_S)
        raise ModelBusy(pulled.id)

    def finish(self, pulled: Pulled) -> None:
        """What was pulled is whole: it takes the place of what was there. Raises ConfigError.

        A quantised copy of its draft stays, one of another draft goes.
        """

        def change(models: list[Pulled]) -> list[Pulled]:
            return [
                replace(one, smaller_draft=one.own_smaller_draft)
                if is_same(one.id, pulled.id)
                else one
                for one in _with(models, pulled)
            ]

        self._change(change)

    def keep_smaller(self, id: str, smaller: SmallerDraft) -> None:
        """Keep a quantised copy of a model's draft; an earlier one in another folder is deleted.

        Raises ConfigError, also where the model was removed or got another draft meanwhile.
        """

        def kept(one: Pulled) -> Pulled:
            changed = replace(one, smaller_draft=smaller)
            return changed if one.id == id and changed.own_smaller_draft else one

        self._change(lambda models: [kept(one) for one in models])
        after = self.find(id)
        if after is None or after.smaller_draft != smaller:
            self._delete_copies([Pulled(id, NOTHING, smaller_draft=smaller)], self.models())
            raise ConfigError(
                f"{id}: was removed, or got another draft, while its draft was quantised",
                hint="see mlx-worker models, then run this again",
            )

    def _delete_copy(self, smaller: SmallerDraft) -> int:
        """Delete its folder, which is one of ours; returns the bytes freed."""
        folder = smaller.folder
        if folder.parent != self.drafts:
            return 0
        freed = sum(size_of(file) or 0 for file in folder.glob("*"))
        shutil.rmtree(folder, ignore_errors=True)
        return freed

    def lock(self, id: str) -> Path:
        """Held by whoever downloads or removes this model."""
        return self._locks / f"{hashlib.sha256(id.casefold().encode()).hexdigest()[:16]}.lock"

    def _change(
        self, change: Callable[[list[Pulled]], list[Pulled]]
    ) -> tuple[int, list[tuple[Snapshot, OSError]]]:
        """Change the record, then delete what no model needs any more.

        Returns the bytes freed, and what could not be deleted; the next change tries again.

        What is to go is kept in the record until it is gone, so that whoever is stopped in between
        leaves nothing for ever. One at a time, of all processes: what one deletes, another that
        came before has kept, or one that comes after fetches again.
        """
        try:
            with locked(self.path.with_suffix(".lock")):
                before, abandoned = self._read()
                models = change(before)
                kept = [snapshot for one in models for snapshot in every(one)]
                gone = _without([*abandoned, *(s for one in before for s in every(one))], kept)
                self._write(models, gone)
                freed, left = 0, list[tuple[Snapshot, OSError]]()
                for one in gone:
                    try:
                        freed += self.cache.delete(one, kept)
                    except OSError as error:
                        left.append((one, error))
                if gone:
                    self._write(models, [one for one, _ in left])
                return freed + self._delete_copies(before, models), left
        except OSError as error:
            place = error.filename or self.path
            raise ConfigError(f"{place}: can't be written: {error.strerror}") from None

    def _write(self, models: list[Pulled], abandoned: list[Snapshot]) -> None:
        values = {
            "format": FORMAT,
            "models": [asdict(one) for one in models],
            "abandoned": [asdict(one) for one in abandoned],
        }
        write_whole(self.path, json.dumps(values, indent=1, default=str) + "\n")

    def _delete_copies(self, before: list[Pulled], after: list[Pulled]) -> int:
        kept = {one.smaller_draft.folder for one in after if one.smaller_draft}
        copies = [one.smaller_draft for one in before if one.smaller_draft]
        return sum(self._delete_copy(copy) for copy in copies if copy.folder not in kept)


def _with(models: list[Pulled], pulled: Pulled) -> list[Pulled]:
    """The models with this one in its place; a copy of its draft that was made meanwhile stays."""
    before = next((one for one in models if is_same(one.id, pulled.id)), None)
    if before is None:
        return [*models, pulled]
    new = replace(pulled, smaller_draft=pulled.smaller_draft or before.smaller_draft)
    return [new if one is before else one for one in models]


def _raise_for(pulled: Pulled, left: list[tuple[Snapshot, OSError]]) -> None:
    """Raises ConfigError for what of a model could not be deleted."""
    mine = {_key(one) for one in every(pulled)}
    for snapshot, error in left:
        if _key(snapshot) in mine:
            raise ConfigError(
                f"{pulled.id} is served no more, but {error.filename or snapshot.repo} "
                f"can't be deleted: {error.strerror}",
                hint="see whose it is; the next pull or removal tries again",
            )


def is_same(id: str, other: str) -> bool:
    return id.casefold() == other.casefold()


def _without(snapshots: Iterable[Snapshot], kept: Iterable[Snapshot]) -> list[Snapshot]:
    """Each once, but for those that are kept."""
    keys = {_key(one) for one in kept}
    return list({_key(one): one for one in snapshots if _key(one) not in keys}.values())


def _key(snapshot: Snapshot) -> tuple[str, str]:
    return snapshot.repo.casefold(), snapshot.commit


def every(pulled: Pulled) -> tuple[Snapshot, ...]:
    """All that a model is or will be made of."""
    return pulled.snapshots + (every(pulled.pending) if pulled.pending else ())


def _pulled(value: dict[str, Any]) -> Pulled:
    """Raises KeyError, TypeError."""
    smaller = value["smaller_draft"]
    read = {
        "model": _snapshot(value["model"]),
        "draft": value["draft"] and _snapshot(value["draft"]),
        "smaller_draft": smaller and SmallerDraft(**{**smaller, "folder": Path(smaller["folder"])}),
        "pending": value["pending"] and _pulled(value["pending"]),
    }
    return Pulled(**{**value, **read})


def _snapshot(value: dict[str, Any]) -> Snapshot:
    """Raises KeyError, TypeError, ValueError: names and digests become paths."""
    files = tuple(RepoFile(**file) for file in value["files"])
    for file in files:
        is_sound = isinstance(file.name, str) and type(file.size) is int
        if not is_sound or not DIGEST.fullmatch(str(file.digest)):
            raise ValueError(f"no file: {shown(file)}")
    return Snapshot(str(value["repo"]), str(value["commit"]), files)
