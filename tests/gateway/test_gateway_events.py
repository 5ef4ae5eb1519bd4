"""The stream by which a console hears of changes, and the console's files, without a browser."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientResponse, ClientSession

from mlx_worker.gateway.console import FILES, FOLDER
from mlx_worker.http.files import SHARED
from mlx_worker.http.front import PAGE_POLICY
from tests.gateway.console_site import Site, site

PATH = "/api/v1/events"


@asynccontextmanager
async def stream(here: Site, role: str = "owner") -> AsyncIterator[ClientResponse]:
    """Opened with a key."""
    headers = {"Authorization": f"Bearer {here.keys[role]}"}
    async with ClientSession(f"http://127.0.0.1:{here.port}", headers=headers) as client:
        async with client.get(PATH) as reply:
            assert reply.status == 200
            assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert await part(reply) == ": here"
            yield reply


async def part(reply: ClientResponse) -> str:
    async with asyncio.timeout(5):
        return (await reply.content.readuntil(b"\n\n")).decode().strip()


async def change(reply: ClientResponse) -> dict[str, bool]:
    """The next that is no comment."""
    while (text := await part(reply)).startswith(":"):
        assert text == ": here"
    name, _, data = text.partition("\n")
    assert name == "event: changed"
    return json.loads(data.removeprefix("data: "))


async def test_a_change_is_told_by_its_kind(tmp_path: Path):
    """Workers or usage; what has changed is asked of the API."""
    async with site(tmp_path) as here, stream(here) as reply:
        here.registry.tell(here.organisation.id, usage=True)
        assert await change(reply) == {"workers": False, "usage": True}
        here.registry.tell(here.organisation.id, workers=True)
        assert await change(reply) == {"workers": True, "usage": False}


async def test_changes_of_another_organisation_are_not_told(tmp_path: Path):
    """Silence has its own comments."""
    async with site(tmp_path) as here, stream(here) as reply:
        other = await here.store.add_organisation("Other")
        here.registry.tell(other.id, workers=True, usage=True)
        assert [await part(reply) for _ in range(3)] == [": here"] * 3


async def test_it_ends_with_the_key(tmp_path: Path):
    """Soon after that was revoked, though nothing else happens."""
    async with site(tmp_path) as here, stream(here, "member") as reply:
        keys = await here.store.keys(here.organisation.id)
        await here.store.revoke_key(here.organisation.id, keys[-1].id)
        async with asyncio.timeout(5):
            while await reply.content.readany():
                pass


async def test_it_ends_with_its_session(tmp_path: Path):
    """A browser has no key, only its cookie."""
    async with site(tmp_path) as here:
        async with ClientSession(f"http://127.0.0.1:{here.port}") as client:
            async with client.post("/api/v1/session", json={"key": here.keys["owner"]}) as reply:
                token = reply.cookies["mlx_gateway_session"].value
            cookie = {"Cookie": f"mlx_gateway_session={token}"}
            async with client.get(PATH, headers=cookie) as reply:
                assert await part(reply) == ": here"
                await here.store.end_session(token)
                async with asyncio.timeout(5):
                    while await reply.content.readany():
                        pass


async def test_a_gateway_that_goes_ends_it(tmp_path: Path):
    """It doesn't wait for consoles to leave."""
    async with site(tmp_path) as here, stream(here):
        async with asyncio.timeout(2):
            await here.stop()


async def test_nobody_hears_of_changes_without_a_key(tmp_path: Path):
    """As everywhere."""
    async with site(tmp_path) as here, ClientSession() as client:
        async with client.get(f"http://127.0.0.1:{here.port}{PATH}") as reply:
            assert reply.status == 401


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
async def test_the_files_need_no_key(tmp_path: Path, path: str):
    """They hold no data."""
    async with site(tmp_path) as here, ClientSession() as client:
        async with client.get(f"http://127.0.0.1:{here.port}{path}") as reply:
            assert reply.status == 200
            assert await reply.read() == FILES[path.rpartition("/")[2] or "index.html"].body
            if path == "/":
                assert reply.headers["Content-Security-Policy"] == PAGE_POLICY
                assert reply.headers["X-Frame-Options"] == "DENY"


def test_the_console_loads_nothing_from_elsewhere_and_has_nothing_inline():
    """What the policy would refuse isn't there to begin with."""
    for path in (*SHARED.iterdir(), *FOLDER.iterdir()):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        text = text.replace('"https:"', "")  # the scheme of its own address, for a worker's lines
        assert not re.search(r"https?:|<style|\sstyle=|\son\w+=|innerHTML|outerHTML", text), path
    html = FILES["index.html"].body.decode()
    assert re.findall(r"<script(.*?)>(.*?)</script>", html) == [
        (' type="module" src="/page/page.js"', "")
    ]


def test_no_file_of_the_console_takes_the_name_of_a_shared_one():
    """It would be served in its place."""
    assert not {path.name for path in SHARED.iterdir()} & {path.name for path in FOLDER.iterdir()}
