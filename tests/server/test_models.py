"""/api/models: what there is, removing it, and who may: a real server, hub and files."""

import asyncio
import subprocess
import sys
from contextlib import ExitStack

import pytest

from mlx_worker.errors import ModelInUse
from mlx_worker.files import locked
from mlx_worker.models.store import Store
from mlx_worker.server import pulls
from tests.hub import LocalHub
from tests.server.library import (
    DRAFT,
    MODEL,
    N_DRAFT,
    WEIGHTS,
    Library,
    downloading,
    library,
    listening,
    model_files,
    post,
    pulled,
    remove,
    until,
    until_ended,
    until_stalled,
)
from tests.server.local import BEARER, JSON, KEYED, serving

# --- removing ----------------------------------------------------------------------------------


async def test_a_removed_model_is_neither_served_nor_on_the_disk(hub: LocalHub, store: Store):
    """Its draft goes with it; the reply says what that freed."""
    async with downloading(hub, store) as local:
        size = (await pulled(local))[0]["bytes"]
        reply = await remove(local)
        assert reply.json() == {"id": MODEL, "freed_bytes": size}
        found = await library(local)
        assert (found["models"], found["pulls"]) == ([], [])
        assert [one["id"] for one in (await local.get("/v1/models")).json()["data"]] == ["demo"]
        assert list(store.cache.folder.glob("models--*")) == []


async def test_a_draft_that_another_model_needs_stays(hub: LocalHub, store: Store):
    """It is not counted as freed."""
    hub.add("org/second", model_files(5000, b"s"))
    async with downloading(hub, store) as local:
        size = (await pulled(local))[0]["bytes"]
        await pulled(local, "org/second", draft=DRAFT)
        assert (await remove(local)).json()["freed_bytes"] < size - N_DRAFT
        (row,) = (await library(local))["models"]
        assert (row["id"], row["state"]) == ("org/second", "ready")


async def test_a_model_in_use_is_not_removed(hub: LocalHub, store: Store):
    """Nothing of it is touched; later it goes."""
    async with downloading(hub, store) as local:
        await pulled(local)
        assert isinstance(local.engine, Library)
        local.engine.in_use = ModelInUse(MODEL, n_requests=2)
        reply = await remove(local)
        assert (reply.status, reply.code) == (409, "model_in_use")
        assert (await library(local))["models"][0]["state"] == "ready"
        local.engine.in_use = None
        assert (await remove(local)).status == 200


async def test_a_model_that_is_coming_is_stopped_and_removed(hub: LocalHub, store: Store):
    """Its download writes nothing afterwards."""
    gate = hub.gate(WEIGHTS, 400_000, repo=MODEL)
    async with downloading(hub, store) as local, listening(local) as listener:
        await listener.until("planned")
        await until_stalled(local, gate, 400_000)
        removal = asyncio.create_task(remove(local))
        assert (await listener.rest())[-1]["type"] == "stopped"
        busy = await post(local, "pull", model=MODEL)
        assert (busy.status, busy.code) == (409, "model_busy")
        gate.release()
        assert (await removal).json()["freed_bytes"] >= 400_000
        assert (await library(local))["models"] == []
        assert list(store.cache.folder.glob("models--*")) == []


async def test_a_download_that_does_not_end_holds_its_removal_up(
    hub: LocalHub, store: Store, monkeypatch
):
    """Whoever asked is told to come back; the model is still there."""
    monkeypatch.setattr(pulls, "STOPS_S", 0.2)
    gate = hub.gate(WEIGHTS, 400_000, repo=MODEL)
    async with downloading(hub, store) as local, listening(local) as listener:
        await listener.until("planned")
        await until_stalled(local, gate, 400_000)
        reply = await remove(local)
        assert (reply.status, reply.code) == (503, "overloaded")
        assert len((await library(local))["models"]) == 1
        gate.release()
        monkeypatch.setattr(pulls, "STOPS_S", 10.0)
        assert (await remove(local)).status == 200


async def test_a_model_that_another_program_downloads_is_not_removed(hub: LocalHub, store: Store):
    """It would write it anew."""
    async with downloading(hub, store) as local:
        await pulled(local)
        with ExitStack() as other:
            await asyncio.to_thread(other.enter_context, locked(store.lock(MODEL)))
            reply = await remove(local)
        assert (reply.status, reply.code) == (409, "model_busy")
        assert (await library(local))["models"][0]["is_served"] is True


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [("org/nothing", 404, "model_not_found"), ("demo", 400, "invalid_request")],
)
async def test_what_was_not_downloaded_cannot_be_removed(
    hub: LocalHub, store: Store, model: str, status: int, code: str
):
    """The demo and folders are no downloads."""
    async with downloading(hub, store) as local:
        reply = await remove(local, model)
        assert (reply.status, reply.code) == (status, code)
        assert reply.json()["error"]["param"] == "model"


async def test_a_removal_ends_although_its_client_has_left(hub: LocalHub, store: Store):
    """Half a removal would help nobody."""
    gate = hub.gate(WEIGHTS, 400_000, repo=MODEL)
    async with downloading(hub, store) as local, listening(local) as listener:
        await listener.until("planned")
        await until_stalled(local, gate, 400_000)
        removal = asyncio.create_task(remove(local))
        await listener.rest()
        removal.cancel()
        gate.release()
        await until_ended()

        async def is_gone() -> bool:
            return not (await library(local))["models"]

        await until(is_gone)


# --- what there is -----------------------------------------------------------------------------


async def test_the_list_has_models_the_catalogue_and_the_disk(hub: LocalHub, store: Store):
    """With what the engine knows of each."""
    async with downloading(hub, store) as local:
        await pulled(local)
        fact = {"id": MODEL, "is_loaded": True, "speculation": "On, +24%"}
        local.engine.facts = {"models": [fact]}
        found = await library(local)
        assert found.keys() == {"models", "catalogue", "disk", "pulls"}
        (row,) = found["models"]
        assert (row["is_loaded"], row["is_default"]) == (True, False)
        assert row["speculation"] == "On, +24%"
        assert {"id", "title", "bytes", "need_bytes", "fits", "is_pulled"} <= found["catalogue"][
            0
        ].keys()
        assert found["disk"]["folder"] == str(store.cache.folder)
        assert found["disk"]["free_bytes"] > 0


async def test_the_catalogue_fits_by_the_memory_that_the_worker_has(store: Store):
    """As it was told."""
    for budget_bytes, is_enough in ((1, False), (10**13, True)):
        async with serving(Library(store), store=store, budget_bytes=budget_bytes) as local:
            fits = [one["fits"] for one in (await library(local))["catalogue"]]
            assert fits == [is_enough] * len(fits)


async def test_a_list_that_cannot_be_read_is_an_error(store: Store):
    """With the file's name and what to do."""
    store.path.parent.mkdir(parents=True)
    store.path.write_text("{")
    async with serving(store=store) as local:
        reply = await local.get("/api/models")
        assert (reply.status, reply.code) == (500, "config_error")
        assert "models.json" in reply.json()["error"]["message"]


async def test_many_look_at_once_and_see_the_same(hub: LocalHub, store: Store):
    """Nobody's look makes another see a download."""
    async with downloading(hub, store) as local:
        await pulled(local)
        found = await asyncio.gather(*(library(local) for _ in range(20)))
        assert {one["models"][0]["state"] for one in found} == {"ready"}


# --- who may -----------------------------------------------------------------------------------

ASKS = [
    ("GET", "/api/models"),
    ("POST", "/api/models/pull"),
    ("POST", "/api/models/stop"),
    ("DELETE", "/api/models/org/tiny"),
]


@pytest.mark.parametrize(("method", "path"), ASKS)
async def test_every_path_needs_the_key(store: Store, method: str, path: str):
    """Where there is one."""
    async with serving(store=store, **KEYED) as local:
        assert (await local.ask(method, path, JSON, body=b"{}")).status == 401
        reply = await local.ask(method, path, JSON, BEARER, body=b"{}")
        assert reply.status in (200, 400, 404)


@pytest.mark.parametrize(("method", "path"), ASKS[1:])
async def test_no_other_page_and_no_form_changes_anything(store: Store, method: str, path: str):
    """By the same rules as everywhere."""
    async with serving(store=store) as local:
        foreign = await local.ask(method, path, JSON, "Origin: https://evil.example", body=b"{}")
        assert (foreign.status, foreign.code) == (403, "foreign_origin")
        form = await local.ask(method, path, "Content-Type: text/plain", body=b"{}")
        assert form.status == 415
        assert (await local.ask(method, path, JSON, body=b"{}", host="evil.example")).status == 421


def test_a_server_starts_without_the_library_of_the_hub():
    """It takes long to load, and is only needed for a download."""
    script = (
        "import sys, mlx_worker.server.app\n"
        "print([name for name in sys.modules if name.startswith('huggingface_hub')])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
