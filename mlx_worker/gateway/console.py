"""GET / and /page/…: the console.

Owns which files it has. They hold no data, so they need no key; what the console shows, its scripts
ask of the API. Event loop; nothing here waits.
"""

from pathlib import Path

from aiohttp import web

from mlx_worker.http.files import INDEX, file_reply, paths_of, read_files

FOLDER = Path(__file__).parent / "page"
FILES = read_files(FOLDER)


async def index(request: web.Request) -> web.Response:
    return file_reply(request, FILES[INDEX])


async def part(request: web.Request) -> web.Response:
    """A style, a script or the icon."""
    return file_reply(request, FILES[request.match_info["name"]])


def add_to(app: web.Application) -> None:
    app.router.add_get("/", index, name="page")
    app.router.add_get(paths_of(FILES), part, name="page.file")
