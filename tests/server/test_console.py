"""The files of the console page, as a browser gets them."""

import re

import pytest

from mlx_worker.http.files import SHARED
from mlx_worker.http.front import NO_CONTENT_POLICY, PAGE_POLICY
from mlx_worker.server.console import FILES, FOLDER
from tests.server.local import KEYED, serving

PATHS = ["/", *(f"/page/{name}" for name in FILES)]
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.mark.parametrize("path", PATHS)
async def test_each_file_has_its_kind(path: str):
    """A browser runs no script and takes no style of another kind."""
    async with serving() as local:
        reply = await local.get(path)
        kind = KINDS[path.rpartition(".")[2] if path != "/" else "html"]
        assert (reply.status, reply.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.body == FILES[path.rpartition("/")[2] or "index.html"].body


@pytest.mark.parametrize("path", PATHS)
async def test_a_browser_that_has_a_file_gets_no_second_copy(path: str):
    """The policy comes along: a browser replaces the kept one by what a 304 says."""
    async with serving() as local:
        first = await local.get(path)
        tag = first.headers["etag"]
        again = await local.get(path, f"If-None-Match: {tag}")
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
        policy = PAGE_POLICY if path in ("/", "/page/index.html") else NO_CONTENT_POLICY
        assert again.headers["content-security-policy"] == policy
        assert first.headers["content-security-policy"] == policy
        assert (await local.get(path, 'If-None-Match: "other"')).status == 200


async def test_the_page_needs_no_key_and_nothing_near_it_goes_without():
    """Its files hold no data; what is no file of it is refused like everything else."""
    async with serving(**KEYED) as local:
        for path in PATHS:
            assert (await local.get(path)).status == 200, path
            assert (await local.ask("HEAD", path)).status == 200, path
        for path in ("/page", "/page/", "/page/x.js", "/page/../status", "/page/page.js/", "//"):
            assert (await local.get(path)).status == 401, path


async def test_what_is_no_file_of_the_page_is_404():
    """No folder can be read through it."""
    async with serving() as local:
        for path in ("/page/", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/pageXjs"):
            assert (await local.get(path)).status == 404, path


def test_the_page_loads_nothing_from_elsewhere_and_has_nothing_inline():
    """What the policy would refuse isn't there to begin with."""
    for path in (*SHARED.iterdir(), *FOLDER.iterdir()):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert not re.search(r"https?:|<style|\sstyle=|\son\w+=|innerHTML|outerHTML", text), path
    html = FILES["index.html"].body.decode()
    assert re.findall(r"<script(.*?)>(.*?)</script>", html) == [
        (' type="module" src="/page/page.js"', "")
    ]
