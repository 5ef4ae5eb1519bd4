"""The repositories of the local hub: files, commits and refs, and how the hub's API lists them.

Nothing here knows of sockets or faults. Contents lie on disk, so that a repository may be large.
"""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

DATE = "2026-01-01T00:00:00.000Z"
LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".npz", ".pt", ".h5")
LFS_BYTES = 10 * 2**20  # the hub keeps larger files in LFS, whatever their name
READ_BYTES = 2**20


@dataclass(frozen=True)
class HubFile:
    """One version of one file.

    oid       git's sha1 of the blob; of the pointer, for an LFS file
    sha256    of the contents of an LFS file, else None
    xet_hash  of a file that the hub also serves by Xet, else None
    """

    name: str
    source: Path
    size: int
    oid: str
    sha256: str | None
    pointer_size: int
    xet_hash: str | None

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid

    def tree_entry(self) -> dict[str, Any]:
        """As /tree lists it."""
        entry: dict[str, Any] = {"type": "file", "oid": self.oid, "size": self.size}
        if self.sha256:
            entry["lfs"] = {
                "oid": self.sha256,
                "size": self.size,
                "pointerSize": self.pointer_size,
            }
        if self.xet_hash:
            entry["xetHash"] = self.xet_hash
        return {**entry, "path": self.name}

    def sibling(self, with_blobs: bool) -> dict[str, Any]:
        """As a model's page lists it."""
        if not with_blobs:
            return {"rfilename": self.name}
        entry: dict[str, Any] = {
            "rfilename": self.name,
            "size": self.size,
            "blobId": self.oid,
        }
        if self.sha256:
            entry["lfs"] = {
                "sha256": self.sha256,
                "size": self.size,
                "pointerSize": self.pointer_size,
            }
        return entry


@dataclass(frozen=True)
class Commit:
    commit_id: str
    files: dict[str, HubFile]


@dataclass
class Repo:
    """One model repository.

    token     that may read it; None: everybody may, or nobody where it is gated
    gated     its page and list are public, its files are not
    refs      branch to commit id
    commits   all that there ever were, oldest first
    """

    repo_id: str
    token: str | None = None
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        return self.token is not None and not self.gated

    def commit(self, revision: str) -> Commit | None:
        """What a branch or a whole commit id names."""
        return self.commits.get(self.refs.get(revision, revision))

    def append(self, files: Mapping[str, HubFile]) -> str:
        """A new commit, to which `main` moves. Returns its id."""
        told = f"{self.repo_id} {len(self.commits)} {[f.oid for f in files.values()]}"
        commit_id = hashlib.sha1(told.encode()).hexdigest()
        self.commits[commit_id] = Commit(commit_id, dict(files))
        self.refs["main"] = commit_id
        return commit_id

    def info(self, commit: Commit, with_blobs: bool) -> dict[str, Any]:
        """GET /api/models/{repo_id}."""
        return {
            "_id": hashlib.sha1(self.repo_id.encode()).hexdigest()[:24],
            "id": self.repo_id,
            "modelId": self.repo_id,
            "author": self.repo_id.split("/")[0],
            "sha": commit.commit_id,
            "lastModified": DATE,
            "createdAt": DATE,
            "private": self.private,
            "gated": "manual" if self.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": ["mlx", "safetensors"],
            "library_name": "mlx",
            "usedStorage": sum(f.size for f in commit.files.values()),
            "siblings": [f.sibling(with_blobs) for f in commit.files.values()],
        }

    def ref_list(self) -> dict[str, Any]:
        """GET /api/models/{repo_id}/refs."""
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit_id}
            for name, commit_id in self.refs.items()
        ]
        return {"tags": [], "branches": branches, "converts": [], "pullRequests": []}


def tree(commit: Commit, folder: str, recursive: bool) -> list[dict[str, Any]] | None:
    """GET …/tree/{revision}/{folder}, all pages of it. None: there is no such folder."""
    prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
    below = [f for name, f in commit.files.items() if name.startswith(prefix)]
    if prefix and not below:
        return None
    folders: set[str] = set()
    for file in below:
        parts = file.name.removeprefix(prefix).split("/")[:-1]
        folders.update(prefix + "/".join(parts[: n + 1]) for n in range(len(parts)))
    entries = [
        {
            "type": "directory",
            "oid": hashlib.sha1(name.encode()).hexdigest(),
            "size": 0,
            "path": name,
        }
        for name in folders
    ] + [f.tree_entry() for f in below]
    if not recursive:
        entries = [e for e in entries if "/" not in e["path"].removeprefix(prefix)]
    return sorted(entries, key=lambda e: (e["type"], e["path"]))


def read_files(
    contents: Path | Mapping[str, bytes],
    *,
    lfs: Iterable[str] | None,
    xet: bool,
    store: Path | None,
) -> dict[str, HubFile]:
    """Hash contents, and copy them into store; where store is None they're served where they lie.

    lfs  patterns of names that are in LFS; None: by suffix and size, as the hub does

    Raises ValueError for no files and for a pattern that names none of them.
    """
    sources = _sources(contents, store)
    if not sources:
        raise ValueError(f"a repository needs files: {contents!r}")
    patterns = None if lfs is None else list(lfs)
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in sources):
            raise ValueError(f"lfs: {pattern!r} matches none of {sorted(sources)}")
    return {name: _read_file(name, sources[name], patterns, xet, store) for name in sorted(sources)}


def _sources(contents: Path | Mapping[str, bytes], store: Path | None) -> dict[str, Path]:
    if isinstance(contents, Path):
        if not contents.is_dir():
            raise ValueError(f"not a folder: {contents}")
        return {p.relative_to(contents).as_posix(): p for p in contents.rglob("*") if p.is_file()}
    if store is None:
        raise ValueError("contents that lie in no folder must be copied")
    sources = {}
    for name, data in contents.items():
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"not a name inside a repository: {name!r}")
        sources[name] = store / hashlib.sha256(data).hexdigest()
        store.mkdir(parents=True, exist_ok=True)
        sources[name].write_bytes(data)
    return sources


def _read_file(
    name: str, source: Path, patterns: list[str] | None, xet: bool, store: Path | None
) -> HubFile:
    size = source.stat().st_size
    git, contents = hashlib.sha1(b"blob %d\0" % size), hashlib.sha256()
    with source.open("rb") as f:
        while data := f.read(READ_BYTES):
            git.update(data)
            contents.update(data)
    sha256 = contents.hexdigest()
    if store is not None and source.parent != store:
        store.mkdir(parents=True, exist_ok=True)
        source = Path(shutil.copyfile(source, store / sha256))
    if patterns is None:
        is_lfs = name.endswith(LFS_SUFFIXES) or size > LFS_BYTES
    else:
        is_lfs = any(fnmatchcase(name, p) for p in patterns)
    if not is_lfs:
        return HubFile(name, source, size, git.hexdigest(), None, 0, None)
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )
    oid = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
    xet_hash = hashlib.sha256(b"xet" + sha256.encode()).hexdigest() if xet else None
    return HubFile(name, source, size, oid, sha256, len(pointer), xet_hash)
