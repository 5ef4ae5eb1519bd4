"""The model hub over HTTP: what a repository holds, and the bytes of a file from any place on.

Owns its addresses, how long to wait for it, and what its refusals mean. Leaves files to transfer.py
and everything that runs to nobody: only data is ever asked for. Blocking; any thread.

huggingface-hub's session is used (proxies, certificates, token, offline mode), not its downloads:
since version 2 an interrupted one begins anew, with 0 bytes kept (docs/DESIGN.md). Xet is not used
for the same reason; the hub serves each file over plain HTTP too.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from httpx2 import HTTPError, InvalidURL, TimeoutException
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from mlx_worker.errors import (
    GatedModel,
    HubError,
    HubUnreachable,
    ModelError,
    ModelNotFound,
    shown,
)
from mlx_worker.models.cache import DIGEST, RepoFile, Snapshot

ANSWERS_S = 20.0  # for an answer to begin, or to go on
ASKED_AGAIN_AFTER_S = (0.5, 1.0, 2.0)  # what takes the hub a moment
COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_PAGES = 200
MAX_FILE_BYTES = 1 << 50
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses that may be others soon


@dataclass(frozen=True)
class Reply:
    """A file's bytes as they come.

    first    the place in the file of the first of them
    pieces   raises TransferBroken where the connection ends too soon
    """

    first: int
    pieces: Iterator[bytes]


class TransferBroken(Exception):
    """A transfer ended for a reason that may pass; wait_s: the hub asks for so much patience."""

    def __init__(self, what: str, wait_s: float | None = None):
        super().__init__(what)
        self.wait_s = wait_s


class Hub:
    """The hub at `endpoint`; token None: the one of HF_TOKEN or `hf auth login`, if any."""

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        """Raises HubUnreachable for what is no address."""
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        if not self.endpoint.startswith(("http://", "https://")):
            raise HubUnreachable(
                f"HF_ENDPOINT: {shown(self.endpoint)}, must begin with http:// or https://"
            )
        self._token = token

    def snapshot(self, repo: str, revision: str = "main") -> Snapshot:
        """What a repository holds at a branch, a tag or a commit: all its files.

        Raises ModelNotFound for a repository or revision that isn't there or isn't ours to see,
        GatedModel, HubUnreachable, HubError.
        """
        with self._explained(repo, revision):
            address = f"{self.endpoint}/api/models/{repo}"
            told = self._ask(f"{address}/revision/{quote(revision, safe='')}").json()
            commit = told.get("sha") if isinstance(told, dict) else None
            if not COMMIT.fullmatch(str(commit)):
                raise HubError(f"{repo}: the hub calls its commit {shown(commit)}")
            files: list[RepoFile] = []
            page: str | None = f"{address}/tree/{commit}?recursive=true"
            for _ in range(MAX_PAGES):
                if page is None:
                    break
                reply = self._ask(page)
                files += [_file(repo, one) for one in _listed(repo, reply.json())]
                page = self._next(repo, reply)
            if page is not None:
                raise HubError(f"{repo}: the hub's list of files has over {MAX_PAGES} pages")
        return Snapshot(repo, str(commit), tuple(files))

    def _ask(self, url: str) -> Any:
        """One answer of the API, asked for again where it may come soon."""
        headers = build_hf_headers(token=self._token)
        reply = get_session().get(url, headers=headers, timeout=ANSWERS_S)
        for wait_s in ASKED_AGAIN_AFTER_S:
            if reply.status_code not in PASSING:
                break
            time.sleep(wait_s)
            reply = get_session().get(url, headers=headers, timeout=ANSWERS_S)
        hf_raise_for_status(reply)
        return reply

    def _next(self, repo: str, reply: Any) -> str | None:
        """The address of a list's next page. Raises HubError for one elsewhere: it gets our key."""
        url: str | None = reply.links.get("next", {}).get("url")
        if url and not url.startswith(f"{self.endpoint}/"):
            raise HubError(f"{repo}: the hub goes on elsewhere: {shown(url)}")
        return url

    @contextmanager
    def open(self, snapshot: Snapshot, file: RepoFile, first: int = 0) -> Iterator[Reply]:
        """Ask for a file's bytes from the place `first` on; the hub may begin earlier.

        Raises TransferBroken for what may pass, ModelError for what won't.
        """
        url = hf_hub_url(snapshot.repo, file.name, revision=snapshot.commit, endpoint=self.endpoint)
        headers = build_hf_headers(token=self._token)
        headers |= {"Accept-Encoding": "identity"} | ({"Range": f"bytes={first}-"} if first else {})
        with (
            self._explained(snapshot.repo, snapshot.commit),
            get_session().stream("GET", url, headers=headers, timeout=ANSWERS_S) as response,
        ):
            if response.status_code in PASSING:
                raise TransferBroken(f"the hub answered {response.status_code}", patience(response))
            if response.status_code == 416:
                raise TransferBroken("the hub has no such bytes of it")
            hf_raise_for_status(response)
            yield Reply(_first_byte(response, first, file.size), _pieces(response))

    def page(self, repo: str) -> str:
        """The address of a repository for a person."""
        return f"{self.endpoint}/{repo}"

    @contextmanager
    def _explained(self, repo: str, revision: str) -> Iterator[None]:
        try:
            yield
        except (ModelError, TransferBroken):
            raise
        except Exception as error:
            explained = self._explain(error, repo, revision)
            if explained is None:
                raise
            raise explained from error

    def _explain(self, error: Exception, repo: str, revision: str) -> ModelError | None:
        """The library's complaint as one of ours; None for what is no complaint of its."""
        match error:
            case GatedRepoError():
                return GatedModel(repo, self.page(repo))
            case RevisionNotFoundError():
                return ModelNotFound(
                    f"{repo} at {revision}",
                    hint="check the revision: a branch, a tag or a whole commit",
                )
            case RepositoryNotFoundError():
                hint = "check the spelling; a private one needs `hf auth login` first"
                return ModelNotFound(f"{repo} on {self.endpoint}", hint=hint)
            case EntryNotFoundError():
                return HubError(f"{repo}: a file that the hub lists isn't there", hint="try again")
            case HFValidationError():
                return ModelNotFound(shown(repo), hint="a hub id looks like owner/name")
            case OfflineModeIsEnabled():
                return HubUnreachable(
                    f"{repo} can't be asked for: HF_HUB_OFFLINE is set", hint="unset it to download"
                )
            case HfHubHTTPError():
                return self._refusal(error, repo)
            case HTTPError():
                what = (
                    "did not answer in time"
                    if isinstance(error, TimeoutException)
                    else reason(error)
                )
                return HubUnreachable(
                    f"{self.endpoint} can't be reached ({what})",
                    hint="check the network, then try again",
                )
            case ValueError() | RecursionError() | InvalidURL():
                return HubUnreachable(
                    f"{self.endpoint} gave no answer that a hub gives ({reason(error)})",
                    hint="a login page of the network may stand in between",
                )
        return None

    def _refusal(self, error: HfHubHTTPError, repo: str) -> ModelError:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            return ModelNotFound(
                f"{repo}: the hub refused it ({status})",
                hint="the token may be wrong or lack access: `hf auth login` with another",
            )
        hint = "try again in a while" if status in PASSING else None
        return HubError(f"{repo}: the hub answered {status}", hint=hint)


def reason(error: Exception) -> str:
    """What a library says, as one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def patience(response: Any) -> float | None:
    """Seconds of Retry-After; None where it names none."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 9 else None


def _listed(repo: str, page: object) -> list[dict[str, Any]]:
    """The files of a page of a tree."""
    if not isinstance(page, list) or not all(isinstance(one, dict) for one in page):
        raise HubError(f"{repo}: the hub's list of files is none")
    return [one for one in page if one.get("type") == "file"]


def _file(repo: str, listed: dict[str, Any]) -> RepoFile:
    """Raises HubError for what can't be a file's: its name and digest become paths here."""
    large = listed.get("lfs")
    of = large if isinstance(large, dict) else listed
    name, size, digest = listed.get("path"), of.get("size"), of.get("oid")
    if (
        not DIGEST.fullmatch(str(digest))
        or type(size) is not int
        or not 0 <= size <= MAX_FILE_BYTES
    ):
        raise HubError(f"{repo}: the hub lists {shown(name)} with a size or digest that is none")
    parts = str(name).split("/")
    if type(name) is not str or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise HubError(f"{repo}: the hub lists {shown(name)}, which can't be a file's name")
    return RepoFile(name, size, str(digest))


def _first_byte(response: Any, asked: int, size: int) -> int:
    """Where its body begins: the hub may answer with all of a file, whatever was asked for.

    Raises TransferBroken for what is no part of this file, as a network's login page is.
    """
    if response.status_code == 206:
        found = re.match(r"bytes (\d+)-\d+/(\d+|\*)$", response.headers.get("Content-Range", ""))
        if found and int(found[1]) <= asked and found[2] in ("*", str(size)):
            return int(found[1])
    elif response.headers.get("Content-Length", str(size)) == str(size):
        return 0
    raise TransferBroken("the answer has other bytes than were asked for")


def _pieces(response: Any) -> Iterator[bytes]:
    try:
        yield from response.iter_bytes()
    except HTTPError as error:
        raise TransferBroken(f"the connection broke off ({reason(error)})") from error
