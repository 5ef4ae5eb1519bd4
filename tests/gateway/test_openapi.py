"""The OpenAPI document: it names what there is, and a running gateway answers as it says."""

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from aiohttp import web
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    ensure_resource_availability,
    positive_data_acceptance,
    unsupported_method,
    use_after_free,
)

from mlx_worker.gateway.app import make_gateway
from mlx_worker.gateway.hub import join
from mlx_worker.gateway.openapi import DOCUMENT
from mlx_worker.gateway.registry import Registry
from mlx_worker.gateway.settings import GatewaySettings
from mlx_worker.gateway.store import Store
from tests.gateway.office import Office, opened

NOT_DESCRIBED = {"/", "/ws/worker"}  # the page and its files, and the link, which is no HTTP
# Answered otherwise on purpose: 503 is said where a worker isn't there, ids are seldom anybody's.
EXCLUDED = [
    not_a_server_error,
    positive_data_acceptance,
    ensure_resource_availability,
    use_after_free,
    unsupported_method,
]
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT, config=SchemathesisConfig())
ORGANISATIONS = SCHEMA.exclude(path_regex="/platform/|/events$")
PLATFORM = SCHEMA.include(path_regex="/platform/")
LIGHT = settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class Running:
    """A gateway on a loop of its own thread, as the tests here are no coroutines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.url, self.key, self.platform_key = self._do(self._open())

    def close(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _open(self) -> tuple[str, str, str]:
        self._store = store = await Store.open(self._folder / "gateway.db")
        mine = await store.add_organisation("acme")
        _, key = await store.add_key(mine.id, "boss", "owner")
        _, platform_key = await store.add_key(None, "us")
        await store.add_worker(mine.id, "mac")
        registry = Registry(store)
        app = make_gateway(store, registry, GatewaySettings(port=0))
        join(app, store, registry)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}", key, platform_key

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._store.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    one = Running(tmp_path_factory.mktemp("gateway"))
    yield one
    one.close()


def asked(case: Any, running: Running, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    reply = case.call_and_validate(
        base_url=running.url, headers=headers, excluded_checks=EXCLUDED, timeout=20
    )
    assert reply.status_code != 500


@ORGANISATIONS.parametrize()
@LIGHT
def test_replies_are_what_the_document_says(case: Any, running: Running):
    """Status, kind and form of each reply, to bodies and queries that fit and that don't."""
    asked(case, running, running.key)


@PLATFORM.parametrize()
@LIGHT
def test_replies_to_the_platform_are_what_the_document_says(case: Any, running: Running):
    """With its own key."""
    asked(case, running, running.platform_key)


async def test_every_route_is_in_the_document(tmp_path: Path):
    """And nothing there that is no route."""
    async with opened(tmp_path) as office:
        found = (await office.get("/openapi.json", key=None)).json()
        described = {(m.upper(), path) for path, item in found["paths"].items() for m in item}
        assert described == routes(office)


def routes(office: Office) -> set[tuple[str, str]]:
    registry = Registry(office.store)
    app = make_gateway(office.store, registry, GatewaySettings(port=0))
    join(app, office.store, registry)
    found = {
        (route.method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    return {one for one in found if one[1] not in NOT_DESCRIBED and "/page/" not in one[1]}
