"""A local server that speaks the Hugging Face hub's protocol, with faults on demand.

It runs in a thread and a loop of its own, so that tests without a loop and other processes can use
it. This file owns the thread, and what a test does with the hub; its answers are hub_service.py's,
files and commits hub_repos.py's, faults hub_faults.py's, and how a body is sent hub_bodies.py's.

By hand: python tests/hub.py FOLDER serves each FOLDER/owner/name as a repository.
"""

import argparse
import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import web

if not __package__:  # run by hand
    sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hub_faults import Fault, Gate, Place
from tests.hub_repos import Repo, read_files
from tests.hub_service import HOST, Request, Service

START_S = 10.0
SHUTDOWN_S = 0.01  # aiohttp takes 0 for ever


class LocalHub(Service):
    """The hub: a context manager, started by `with`.

    store  copies of all files lie here
    port   0: any free one
    """

    def __init__(self, store: Path, *, port: int = 0) -> None:
        super().__init__(port)
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None
        self._nobody: socket.socket | None = None  # bound, not listening: for kind "refuse"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread:
            self.stop()

    def add(
        self,
        repo_id: str,
        contents: Path | Mapping[str, bytes],
        *,
        lfs: Iterable[str] | None = None,
        xet: bool = False,
        gated: bool = False,
        token: str | None = None,
        copy: bool = True,
    ) -> str:
        """A new commit of a new or known repository, to which `main` moves. Returns its id.

        contents  a folder, or names to contents: all files of the commit
        lfs       patterns of names that are in LFS; None: by suffix and size, as the hub does
        xet       LFS files are said to be in Xet too, whose service always fails
        gated     files need the token, the model's page does not; without token: nobody has access
        token     without gated: the repository is private, and unknown without the token
        copy      False: a folder's files are served where they lie, and must not change

        The newest gated and token hold for the whole repository.
        """
        if repo_id.count("/") != 1 or not all(repo_id.split("/")):
            raise ValueError(f"a repository is owner/name, not {repo_id!r}")
        files = read_files(contents, lfs=lfs, xet=xet, store=self._store if copy else None)
        repo = self._repos.get(repo_id) or Repo(repo_id)
        repo.gated, repo.token = gated, token
        commit_id = repo.append(files)
        self._repos[repo_id] = repo
        return commit_id

    def branch(self, repo_id: str, name: str, commit_id: str) -> None:
        """A branch, or `main`, stands at this commit."""
        repo = self._known(repo_id)
        if commit_id not in repo.commits:
            raise ValueError(f"{repo_id} has no commit {commit_id!r}: {list(repo.commits)}")
        repo.refs[name] = commit_id

    def remove(self, repo_id: str) -> None:
        """The repository is gone, with all its commits."""
        del self._repos[self._known(repo_id).repo_id]

    def gate(
        self,
        file: str,
        after_bytes: int,
        *,
        repo: str | None = None,
        times: int | None = 1,
        place: Place | None = None,
    ) -> Gate:
        """Bodies of file stop after after_bytes.

        Next: gate.reached.wait(timeout), then gate.release().
        """
        return self.faults.add(
            Fault("stall", file, repo, times, place, after_bytes=after_bytes)
        ).gate

    @property
    def requests(self) -> list[Request]:
        """All so far, the oldest first; those under way still change."""
        return list(self._requests)

    def forget(self) -> None:
        """requests is empty again."""
        self._requests.clear()

    def bytes_sent(self, repo: str | None = None, file: str | None = None) -> int:
        """Bytes of files, not of errors, redirects and lists.

        Raises ValueError for an unknown repository, and for a file that it, or none, ever had.
        """
        names = {repo: self._names()[self._known(repo).repo_id]} if repo else self._names()
        if file is not None and not any(file in ns for ns in names.values()):
            raise ValueError(f"unknown file {file!r}")
        return sum(
            r.n_bytes
            for r in self._requests
            if r.file is not None
            and r.status in (200, 206)
            and repo in (None, r.repo)
            and file in (None, r.file)
        )

    def start(self) -> None:
        """Listen, after stop() on the same port."""
        assert not self._thread, "the hub is running"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="local-hub")
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Close every connection and listen no more; repositories and requests stay."""
        assert self._thread, "the hub is not running"
        assert self._loop
        if self._runner:
            cleanup = asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop)
            cleanup.result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._nobody:
            self._nobody.close()
        self._thread = self._loop = self._runner = self._nobody = None

    # --- the hub's thread

    async def _listen(self) -> None:
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        site = web.TCPSite(runner, HOST, self._port, reuse_address=True)
        await site.start()
        self._runner, self._port = runner, runner.addresses[0][1]
        self._nobody = socket.socket()
        self._nobody.bind((HOST, 0))
        self._nobody_port = self._nobody.getsockname()[1]

    def _known(self, repo_id: str) -> Repo:
        if repo_id not in self._repos:
            raise ValueError(f"unknown repository {repo_id!r}; there are {sorted(self._repos)}")
        return self._repos[repo_id]


def main(args: list[str] | None = None) -> None:
    """Serve a folder until interrupted; the endpoint is the first line of stdout."""
    parser = argparse.ArgumentParser(description="Serve FOLDER/owner/name as a Hugging Face hub.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=float, metavar="BYTES", help="bytes per second of a file")
    given = parser.parse_args(args)
    folders = [p for p in sorted(given.folder.glob("*/*")) if p.is_dir()]
    if not folders:
        parser.error(f"no owner/name folder in {given.folder}")
    with LocalHub(given.folder, port=given.port) as hub:
        hub.rate = given.rate
        for folder in folders:
            repo_id = folder.relative_to(given.folder).as_posix()
            print(f"{repo_id} {hub.add(repo_id, folder, copy=False)}", file=sys.stderr, flush=True)
        print(hub.endpoint, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
