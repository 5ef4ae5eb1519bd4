"""GET / and /page/…: the console page, a static one.

Owns which files it has and how browsers may keep them. What it shows, its scripts ask of the API;
the files hold no data, so they need no key. They are read once, when this module is imported.
Event loop; nothing here waits.
"""

import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from aiohttp import web

from mlx_worker.server.front import NO_CONTENT_POLICY, PAGE_POLICY

FOLDER = Path(__file__).parent / "page"
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
    """Every file of the page by its name."""
    paths = (path for path in sorted(folder.iterdir()) if path.suffix in CONTENT_TYPES)
    return {path.name: read_file(path) for path in paths}


def read_file(path: Path) -> File:
    body = path.read_bytes()
    return File(body, CONTENT_TYPES[path.suffix], sha256(body).hexdigest()[:16])


FILES = read_files(FOLDER)
FILE_PATH = f"/page/{{name:{'|'.join(map(re.escape, FILES))}}}"


async def index(request: web.Request) -> web.Response:
    return file_reply(request, FILES[INDEX])


async def part(request: web.Request) -> web.Response:
    """A style, a script or the icon."""
    return file_reply(request, FILES[request.match_info["name"]])


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
