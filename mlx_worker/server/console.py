"""GET / and /page/…: the console page.

Owns which files it has. What it shows, its scripts ask of the API. Event loop; nothing here waits.
"""

from pathlib import Path

from aiohttp import web

from mlx_worker.http.files import INDEX, file_reply, paths_of, read_files

FOLDER = Path(__file__).parent / "page"
FILES = read_files(FOLDER)
FILE_PATH = paths_of(FILES)


async def index(request: web.Request) -> web.Response:
    return file_reply(request, FILES[INDEX])


async def part(request: web.Request) -> web.Response:
    """A style, a script or the icon."""
    return file_reply(request, FILES[request.match_info["name"]])
