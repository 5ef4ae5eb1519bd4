"""The answers of the local hub: its routes, who may read what, and the list of what was asked.

Runs on the hub's own thread, without a socket of its own; hub.py starts and stops it.
"""

import hashlib
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from aiohttp import web

from tests.hub_bodies import Body, Unsatisfiable, parse_range, send
from tests.hub_faults import Fault, Faults, Kind, Place
from tests.hub_repos import Commit, HubFile, Repo, tree

HOST = "127.0.0.1"
CDN_HOST = "localhost"  # the same server, but another host to a client
BAD_TOKEN = "Invalid credentials in Authorization header"


@dataclass
class Request:
    """One request, listed as soon as it came; status is 0 until it is answered.

    path           without the query
    repo, file     None where the path has none, or names no repository we have
    range_start    of its Range header, None without one
    n_bytes        of the body so far; 0 for HEAD. Exact, except that of a client which left or
                   does not read, the last piece (16 KiB at most) counts whole
    authorization  the header, None without one
    """

    method: str
    host: str
    path: str
    repo: str | None
    file: str | None
    range_start: int | None
    authorization: str | None
    status: int = 0
    n_bytes: int = 0

    @property
    def is_cdn(self) -> bool:
        return self.path.startswith("/cdn/")

    def count(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes


RECORD = web.RequestKey("record", Request)
REDIRECTS_TO_NOBODY = web.RequestKey("redirects_to_nobody", bool)


class Refused(Exception):
    """An error as the hub words it."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **headers}
        if code:
            self.headers["X-Error-Code"] = code

    def response(self) -> web.Response:
        return web.json_response({"error": str(self)}, status=self.status, headers=self.headers)


class Service:
    """What the hub answers.

    page_size           entries of one page of a tree; None: all
    rate                bytes per second of every body; None: as fast as the client reads
    relative_redirects  whether small files are redirected too, within the hub, as the real one does
    tokens              of users who exist, beside the tokens of the repositories
    """

    def __init__(self, port: int) -> None:
        self.page_size: int | None = None
        self.rate: float | None = None
        self.relative_redirects = False
        self.tokens: set[str] = set()
        self.faults = Faults(self._names)
        self._port = port
        self._nobody_port = 0  # where nobody listens
        self._repos: dict[str, Repo] = {}
        self._requests: list[Request] = []

    @property
    def endpoint(self) -> str:
        """For HF_ENDPOINT; the same after stop() and start()."""
        assert self._port, "the hub was never started"
        return f"http://{HOST}:{self._port}"

    def _names(self) -> Mapping[str, Collection[str]]:
        """Of all files that each repository ever had."""
        return {
            repo_id: {name for commit in repo.commits.values() for name in commit.files}
            for repo_id, repo in list(self._repos.items())
        }

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._answer])
        model = "/api/models/{owner}/{name}"
        for path, handler in {
            "/api/whoami-v2": self._whoami,
            model: self._info,
            model + "/revision/{rev}": self._info,
            model + "/tree/{rev}": self._tree,
            model + "/tree/{rev}/{folder:.+}": self._tree,
            model + "/refs": self._refs,
            model + "/xet-read-token/{rev}": self._xet_token,
            "/api/resolve-cache/models/{owner}/{name}/{rev}/{file:.+}": self._cached,
            "/{owner}/{name}/resolve/{rev}/{file:.+}": self._resolve,
            "/cdn/{owner}/{name}/{rev}/{file:.+}": self._cdn,
        }.items():
            app.router.add_get(path, handler)
        return app

    @web.middleware
    async def _answer(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """List the request, and let a fault or the handler answer it."""
        record = request[RECORD] = self._record(request)
        self._requests.append(record)
        fault = self._fault(request, record)
        request[REDIRECTS_TO_NOBODY] = fault is not None and fault.kind == "refuse"
        if fault is not None and fault.kind == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        try:
            if fault is not None and fault.kind == "status":
                raise _failure(fault)
            response = await handler(request)
        except Refused as refused:
            response = refused.response()
        except web.HTTPException as error:
            record.status = error.status
            raise
        record.status = response.status
        if isinstance(response, web.Response) and request.method == "GET":
            record.n_bytes = len(response.body) if isinstance(response.body, bytes) else 0
        return response

    def _record(self, request: web.Request) -> Request:
        info = request.match_info
        repo = f"{info['owner']}/{info['name']}" if "owner" in info else None
        try:
            asked = parse_range(request.headers.get("Range"), sys.maxsize)
        except Unsatisfiable:
            asked = None
        return Request(
            method=request.method,
            host=request.host,
            path=request.path,
            repo=repo if repo in self._repos else None,
            file=info.get("file"),
            range_start=asked[0] if asked else None,
            authorization=request.headers.get("Authorization"),
        )

    def _fault(self, request: web.Request, record: Request) -> Fault | None:
        """Instead of an answer; a "refuse" changes where the answer redirects to."""
        if record.repo is None:
            return None
        if record.file is None:
            rest = record.path.removeprefix(f"/api/models/{record.repo}").lstrip("/")
            return self.faults.take_answer(record.method, "api", record.repo, rest, redirects=False)
        commit = self._repos[record.repo].commit(request.match_info["rev"])
        file = commit.files.get(record.file) if commit else None
        place: Place = "cdn" if record.is_cdn else "resolve"
        return self.faults.take_answer(
            record.method,
            place,
            record.repo,
            record.file,
            redirects=file is not None and file.sha256 is not None,
        )

    # --- who may read what

    def _token(self, request: web.Request) -> str | None:
        """The bearer token. Raises Refused for one that nobody has."""
        header = request.headers.get("Authorization")
        if header is None:
            return None
        token = header.removeprefix("Bearer ")
        known = self.tokens | {r.token for r in list(self._repos.values()) if r.token}
        if token not in known:
            raise Refused(401, BAD_TOKEN)
        return token

    def _repo(self, request: web.Request) -> Repo:
        """The repository of the path. Raises Refused where there is none for this client."""
        token = self._token(request)
        repo = self._repos.get(f"{request.match_info['owner']}/{request.match_info['name']}")
        if repo is None or (repo.private and token != repo.token):
            raise Refused(401 if token is None else 404, "Repository not found", "RepoNotFound")
        return repo

    def _commit(self, request: web.Request) -> tuple[Repo, Commit]:
        repo = self._repo(request)
        revision = request.match_info.get("rev", "main")
        commit = repo.commit(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, commit

    def _file(self, request: web.Request) -> tuple[Repo, Commit, HubFile]:
        repo, commit = self._commit(request)
        if repo.gated:
            token = self._token(request)
            told = f"Access to model {repo.repo_id} is restricted"
            if token is None:
                told += ". You must have access to it and be authenticated to access it."
                raise Refused(401, told + " Please log in.", "GatedRepo")
            if token != repo.token:
                told += " and you are not in the authorized list."
                told += f" Visit https://huggingface.co/{repo.repo_id} to ask for access."
                raise Refused(403, told, "GatedRepo")
        file = commit.files.get(request.match_info["file"])
        if file is None:
            raise Refused(
                404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.commit_id}
            )
        return repo, commit, file

    # --- the routes

    async def _whoami(self, request: web.Request) -> web.Response:
        if self._token(request) is None:
            raise Refused(401, "Invalid username or password.")
        return web.json_response({"type": "user", "name": "tester", "orgs": []})

    async def _info(self, request: web.Request) -> web.Response:
        repo, commit = self._commit(request)
        with_blobs = request.query.get("blobs", "").lower() in ("1", "true")
        return web.json_response(repo.info(commit, with_blobs))

    async def _refs(self, request: web.Request) -> web.Response:
        return web.json_response(self._repo(request).ref_list())

    async def _xet_token(self, request: web.Request) -> web.Response:
        self._commit(request)
        raise Refused(503, "Service Unavailable")

    async def _tree(self, request: web.Request) -> web.Response:
        _, commit = self._commit(request)
        recursive = request.query.get("recursive", "").lower() in ("1", "true")
        entries = tree(commit, request.match_info.get("folder", ""), recursive)
        if entries is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        start = int(request.query.get("cursor", "0"))
        stop = len(entries) if self.page_size is None else start + self.page_size
        headers = {}
        if stop < len(entries):
            query = {**request.query, "cursor": str(stop)}
            following = f"{self.endpoint}{request.rel_url.with_query(query)}"
            headers["Link"] = f'<{following}>; rel="next"'
        return web.json_response(entries[start:stop], headers=headers)

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        repo, commit, file = self._file(request)
        path = f"{repo.repo_id}/{commit.commit_id}/{quote(file.name)}"
        if file.sha256:
            port = self._nobody_port if request.get(REDIRECTS_TO_NOBODY) else self._port
            host = HOST if request.get(REDIRECTS_TO_NOBODY) else CDN_HOST
            url = f"http://{host}:{port}/cdn/{path}?X-Signature={_signature(file)}"
            return self._redirect(302, url, repo, commit, file)
        if self.relative_redirects:
            url = f"/api/resolve-cache/models/{path}?etag={quote(_quoted(file.etag), safe='')}"
            return self._redirect(307, url, repo, commit, file)
        return await self._send(request, "resolve", repo, commit, file)

    async def _cached(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, "resolve", *self._file(request))

    async def _cdn(self, request: web.Request) -> web.StreamResponse:
        """A signed address: who has it may read; who also sends a token is refused, as by S3."""
        info = request.match_info
        repo = self._repos.get(f"{info['owner']}/{info['name']}")
        commit = repo.commits.get(info["rev"]) if repo else None
        file = commit.files.get(info["file"]) if commit else None
        if not (repo and commit and file):
            raise Refused(404, "NoSuchKey")
        if "Authorization" in request.headers:
            raise Refused(400, "Only one auth mechanism allowed")
        if request.query.get("X-Signature") != _signature(file):
            raise Refused(403, "SignatureDoesNotMatch")
        return await self._send(request, "cdn", repo, commit, file)

    def _redirect(
        self, status: int, url: str, repo: Repo, commit: Commit, file: HubFile
    ) -> web.Response:
        headers = self._headers(repo, commit, file) | {"Location": url}
        if file.sha256:
            headers["X-Linked-Size"] = str(file.size)
            headers["X-Linked-Etag"] = _quoted(file.etag)
        text = f"Found. Redirecting to {url}"
        return web.Response(status=status, headers=headers, text=text)

    def _headers(self, repo: Repo, commit: Commit, file: HubFile) -> dict[str, str]:
        headers = {
            "ETag": _quoted(file.etag),
            "X-Repo-Commit": commit.commit_id,
            "Accept-Ranges": "bytes",
        }
        if file.xet_hash:
            token_url = f"{self.endpoint}/api/models/{repo.repo_id}/xet-read-token"
            headers["X-Xet-Hash"] = file.xet_hash
            headers["Link"] = f'<{token_url}/{commit.commit_id}>; rel="xet-auth"'
        return headers

    async def _send(
        self, request: web.Request, place: Place, repo: Repo, commit: Commit, file: HubFile
    ) -> web.StreamResponse:
        """The file's answer with its body, or as much of it as the faults allow."""
        headers = self._headers(repo, commit, file)
        if place == "cdn":
            headers = {"ETag": headers["ETag"], "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(file.size)})

        def take(*kinds: Kind) -> list[Fault]:
            span = asked or (0, file.size)
            return self.faults.take_body(place, repo.repo_id, file.name, kinds, span, bool(asked))

        asked = _asked(request, file)
        if take("ignore_range"):
            asked = None
        size = max(0, file.size - sum(f.n_bytes or 0 for f in take("short")))
        start, stop = asked or (0, size)
        stop = max(start, min(stop, size))
        if asked:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        response = web.StreamResponse(status=206 if asked else 200, headers=headers)
        response.content_type = "application/octet-stream"
        record = request[RECORD]
        record.status = response.status
        shown = take("cut", "reset", "stall", "slow", "flip")
        body = Body(file.source, start, stop, shown, lambda: self.rate, record.count)
        await send(request, response, body)
        return response


def _asked(request: web.Request, file: HubFile) -> tuple[int, int] | None:
    """(start, stop) that the client asks for; None: the whole file. Raises Refused with 416."""
    if request.headers.get("If-Range", _quoted(file.etag)) != _quoted(file.etag):
        return None
    try:
        return parse_range(request.headers.get("Range"), file.size)
    except Unsatisfiable:
        headers = {"Content-Range": f"bytes */{file.size}"}
        raise Refused(416, "Range Not Satisfiable", **headers) from None


def _quoted(etag: str) -> str:
    return f'"{etag}"'


def _signature(file: HubFile) -> str:
    return hashlib.sha256(f"signed {file.etag}".encode()).hexdigest()[:32]


def _failure(fault: Fault) -> Refused:
    assert fault.status is not None
    headers = dict(fault.headers)
    if fault.retry_after_s is not None:
        headers["Retry-After"] = str(fault.retry_after_s)
    return Refused(fault.status, f"fault: status {fault.status}", **headers)
