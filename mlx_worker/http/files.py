"""The files of a page, a static one.

Owns what they are read as and how browsers may keep them. They hold no data, so they need no key,
and are read once, when a server's module is imported. Event loop; nothing here waits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from aiohttp import web

from mlx_worker.http.front import NO_CONTENT_POLICY, PAGE_POLICY

SHARED = Path(__file__).parent / "page"  # what the pages of all servers have in common
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class File:
    """A file of the page. etag: changes with its bytes."""

    body: bytes
    content_type: str
    etag: str


def read_files(folder: Path) -> dict[str, File]:
    """Every file of the page by its name, those that it shares with others included."""
    paths = [path for shelf in (SHARED, folder) for path in sorted(shelf.iterdir())]
    return {path.name: read_file(path) for path in paths if path.suffix in CONTENT_TYPES}


def read_file(path: Path) -> File:
    body = path.read_bytes()
    return File(body, CONTENT_TYPES[path.suffix], sha256(body).hexdigest()[:16])


def paths_of(files: Mapping[str, File]) -> str:
    """The route of all of them: /page/NAME."""
    return f"/page/{{name:{'|'.join(map(re.escape, files))}}}"


def file_reply(request: web.Request, file: File) -> web.Response:
    """The file, or 304 for a browser that has it; either way with the policy of its kind.

    A browser takes the headers of a 304 over into what it has kept.
    """
    is_page = file.content_type == "text/html"
    headers = {
        "Cache-Control": "no-cache",  # keep it, and ask before each use
        "Content-Security-Policy": PAGE_POLICY if is_page else NO_CONTENT_POLICY,
    }
    if has_it(request, file):
        reply = web.Response(status=304, headers=headers)
    else:
        reply = web.Response(
            body=file.body, headers=headers, content_type=file.content_type, charset="utf-8"
        )
    reply.etag = file.etag
    return reply


def has_it(request: web.Request, file: File) -> bool:
    """Whether If-None-Match names what we would send."""
    return any(tag.value == file.etag for tag in request.if_none_match or ())
