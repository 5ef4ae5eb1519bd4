"""huggingface-hub's own cache: where a repository's files are in it, and which are there.

Owns the paths, as the library documents them, so that what is pulled here is found by every other
program, and the other way round. Leaves getting files to transfer.py. Blocking, never on the
network; any thread, any process.

    models--OWNER--NAME/snapshots/COMMIT/FILE      a link to ...
    models--OWNER--NAME/blobs/DIGEST               a whole file
    models--OWNER--NAME/blobs/DIGEST.incomplete    one that is on its way
    models--OWNER--NAME/refs/NAME                  the commit that a branch or tag was last seen at
    .locks/models--OWNER--NAME/DIGEST.lock         held by whoever is getting the file
"""

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_worker.files import write_whole

DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SF_DATALESS = 0x40000000  # of macOS's <sys/stat.h>: the file's content is not on this disk


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository.

    digest  of its content, as the hub tells it and as its blob is called: SHA-256 (64 digits), or
            for small files git's SHA-1 (40 digits)
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, and what is wanted of it."""

    repo: str
    commit: str
    files: tuple[RepoFile, ...]

    @property
    def n_bytes(self) -> int:
        """Of what is fetched: the same content under two names comes once."""
        return sum({file.digest: file.size for file in self.files}.values())


class Cache:
    """The cache in `folder`; it may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def default(cls) -> "Cache":
        from huggingface_hub import constants

        return cls(Path(constants.HF_HUB_CACHE))

    def repo_folder(self, repo: str) -> Path:
        return self.folder / f"models--{repo.replace('/', '--')}"

    def snapshot_folder(self, snapshot: Snapshot) -> Path:
        return self.repo_folder(snapshot.repo) / "snapshots" / snapshot.commit

    def blob(self, repo: str, file: RepoFile) -> Path:
        return self.repo_folder(repo) / "blobs" / file.digest

    def partial(self, repo: str, file: RepoFile) -> Path:
        """A file on its way; older versions of the library keep theirs under the same name."""
        return self.repo_folder(repo) / "blobs" / f"{file.digest}.incomplete"

    def lock(self, repo: str, file: RepoFile) -> Path:
        """The lock that the library takes for the same file."""
        return self.folder / ".locks" / self.repo_folder(repo).name / f"{file.digest}.lock"

    def n_bytes(self, repo: str, file: RepoFile) -> int:
        """Bytes of the file that are here."""
        blob = self.blob(repo, file)
        if size_of(blob) == file.size:
            return file.size
        return min(size_of(self.partial(repo, file)) or 0, file.size)

    def is_whole(self, snapshot: Snapshot, file: RepoFile) -> bool:
        """Whether the file is in its snapshot with all its bytes; what they are isn't looked at."""
        return size_of(self.snapshot_folder(snapshot) / file.name) == file.size

    def commit_of(self, repo: str, revision: str) -> str | None:
        """The commit that a branch was at when it was last asked for; None: it never was."""
        file = self.repo_folder(repo) / "refs" / revision
        try:
            return file.read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def point(self, repo: str, revision: str, commit: str) -> None:
        """Keep which commit a branch is at, for other programs; one that can't be is let be."""
        file = self.repo_folder(repo) / "refs" / revision
        if revision == commit:
            return
        with suppress(OSError):
            if file.is_symlink():  # not one of ours: what it names isn't either
                file.unlink()
            write_whole(file, commit, mode=0o644)

    def link(self, snapshot: Snapshot, file: RepoFile) -> None:
        """Let the file of a snapshot be its blob, which is there. Raises OSError."""
        folder = self.snapshot_folder(snapshot)
        if folder.is_symlink():
            folder.unlink()
        place = folder / file.name
        blob = self.blob(snapshot.repo, file)
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{file.digest[:8]}.{os.getpid()}.new")
        draft.unlink(missing_ok=True)
        draft.symlink_to(os.path.relpath(blob, place.parent))
        draft.replace(place)

    def delete(self, snapshot: Snapshot, kept: Iterable[Snapshot] = ()) -> int:
        """Delete a snapshot's files, and of its blobs those that nothing else uses.

        kept  others whose files stay, whole or on their way

        Returns the bytes freed. What other programs fetched of the same commit stays. Raises
        OSError; the same call goes on.
        """
        repo, folder = self.repo_folder(snapshot.repo), self.snapshot_folder(snapshot)
        if folder.is_symlink():
            folder.unlink()
        for file in snapshot.files:
            (folder / file.name).unlink(missing_ok=True)
        _rmdir(folder)
        used = self._used(repo) | {
            file.digest for one in kept if _is_same(one, snapshot) for file in one.files
        }
        freed = 0
        for file in snapshot.files:
            if file.digest not in used:
                freed += _unlinked(self.blob(snapshot.repo, file))
                freed += _unlinked(self.partial(snapshot.repo, file))
        if not folder.exists():
            self._tidy(repo, snapshot)
        return freed

    def _used(self, repo: Path) -> set[str]:
        """Digests that some snapshot still links to."""
        links = (path for path in repo.glob("snapshots/*/**/*") if path.is_symlink())
        return {os.path.basename(os.readlink(link)) for link in links}

    def _tidy(self, repo: Path, snapshot: Snapshot) -> None:
        """No branch is at a commit that is gone; a repository of which nothing is left is too."""
        for ref in repo.glob("refs/**/*"):
            with suppress(OSError):
                if ref.read_bytes().strip() == snapshot.commit.encode():
                    ref.unlink()
        (repo / "trees" / f"{snapshot.commit}.json").unlink(missing_ok=True)
        if not any((repo / "snapshots").glob("*")) and not any((repo / "blobs").glob("*")):
            shutil.rmtree(repo, ignore_errors=True)


def _is_same(one: Snapshot, other: Snapshot) -> bool:
    return one.repo.casefold() == other.repo.casefold()


def _unlinked(path: Path) -> int:
    """Delete a file; returns the bytes that frees."""
    size = size_of(path) or 0
    path.unlink(missing_ok=True)
    return size


def _rmdir(folder: Path) -> None:
    """Delete a folder unless something is in it; what Finder left doesn't count."""
    with suppress(OSError):
        (folder / ".DS_Store").unlink(missing_ok=True)
        folder.rmdir()


def size_of(path: Path) -> int | None:
    """Bytes of a file; None where there is none, only a link to one that is gone, or only a name
    whose content iCloud took away."""
    try:
        found = path.stat()
    except OSError:
        return None
    return None if getattr(found, "st_flags", 0) & SF_DATALESS else found.st_size


def free_bytes(folder: Path) -> int:
    """Bytes that the disk of a folder has room for; the folder may not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
