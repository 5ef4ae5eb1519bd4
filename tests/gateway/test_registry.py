"""Workers dial in: who may, what they are told, and what is kept of what they say."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlx_worker.errors import NeedsUpdate, NotConnected
from mlx_worker.records import Settings
from mlx_worker.wire.link import (
    DECIDES,
    SETTING,
    Close,
    ModelReport,
    Ping,
    PlatformFrame,
    Pong,
    SettingsFrame,
    SettingsPart,
    Speculation,
    StatusReport,
)
from tests.gateway.fleet import QUICK, Gateway, ScriptedWorker, gateway, says


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path) as running:
        yield running


async def refused(worker: ScriptedWorker, **headers: str) -> int:
    """The status of a handshake that fails."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as raised:
        await worker.open(**headers)
    return raised.value.status


# --- who may ------------------------------------------------------------------------------------


async def test_a_worker_is_greeted(hub: Gateway):
    """By its name there, and with what the platform says."""
    worker = await hub.worker(name="Mac")
    assert worker.welcome
    assert (worker.welcome.name, worker.welcome.organisation) == ("Mac", "acme")
    assert worker.welcome.platform.speculative_decoding == "auto"


async def test_an_unknown_key_opens_nothing(hub: Gateway):
    """401 before the upgrade."""
    enrolled, secret = await hub.enrol()
    assert await refused(hub.scripted(enrolled, secret[:-1] + "x")) == 401


async def test_an_api_key_is_no_workers(hub: Gateway):
    """They are not interchangeable."""
    enrolled, _ = await hub.enrol()
    assert await refused(hub.scripted(enrolled, hub.client.key)) == 401


async def test_a_disabled_workers_key_opens_nothing(hub: Gateway):
    """403 before the upgrade."""
    enrolled, secret = await hub.enrol()
    await hub.store.disable_worker(hub.organisation.id, enrolled.id)
    assert await refused(hub.scripted(enrolled, secret)) == 403


async def test_a_browsers_page_is_no_worker(hub: Gateway):
    """403 for an Origin, even our own."""
    worker = hub.scripted(*await hub.enrol())
    assert await refused(worker, Origin=hub.url) == 403


async def test_a_key_is_of_one_worker(hub: Gateway):
    """Another's id closes the connection, and does not touch the other."""
    other = await hub.worker()
    worker = hub.scripted(*await hub.enrol(), worker_id=other.id)
    await worker.open()
    await worker.send(worker.hello_frame())
    assert await worker.closed() == Close.KEY_REFUSED
    assert other.is_connected
    assert (await hub.client.chat()).status == 200


async def test_an_old_protocol_needs_an_update(hub: Gateway):
    """The close code says so."""
    worker = hub.scripted(*await hub.enrol(), protocol=0)
    await worker.open()
    await worker.send(worker.hello_frame())
    assert await worker.closed() == Close.UPDATE_NEEDED


async def test_without_hello_the_connection_ends(tmp_path: Path):
    """Within its time."""
    async with gateway(tmp_path, replace(QUICK, hello=0.05)) as hub:
        worker = hub.scripted(*await hub.enrol())
        await worker.open()
        assert await worker.closed() == Close.BAD_FRAME


async def test_the_first_frame_is_hello(hub: Gateway):
    """Nothing else is taken from whom nobody knows yet."""
    worker = hub.scripted(*await hub.enrol())
    await worker.open()
    await worker.send(StatusReport())
    assert await worker.closed() == Close.BAD_FRAME


async def test_a_second_connection_takes_the_place_of_the_first(hub: Gateway):
    """The old one is told; requests go on at the new one."""
    first = await hub.worker()
    second = hub.scripted(first.worker, first.secret)
    await second.connect()
    assert await first.closed() == Close.REPLACED
    await hub.until_there(second)
    assert (await hub.client.chat()).status == 200
    assert second.n_begun == 1


async def test_a_disabled_worker_is_sent_away(hub: Gateway):
    """At once, with the reason as a close code, and its key opens nothing any more."""
    worker = await hub.worker()
    await hub.store.disable_worker(hub.organisation.id, worker.id)
    await hub.registry.close(worker.id, Close.DISABLED, "it was disabled")
    assert await worker.closed() == Close.DISABLED
    assert await refused(worker) == 403


async def test_fifty_workers_come_back_at_once(hub: Gateway):
    """All of them are there, and each answers."""
    workers = [await hub.worker(name=f"w{i}") for i in range(50)]
    await asyncio.gather(*(worker.cut() for worker in workers))
    await asyncio.gather(*(worker.again() for worker in workers))
    await hub.until(lambda: len(hub.registry.all(hub.organisation.id)) == 50)
    replies = await asyncio.gather(
        *(hub.client.chat(X_Pendra_Worker_Id=worker.id) for worker in workers)
    )
    assert [reply.headers["X-Worker-Id"] for reply in replies] == [w.id for w in workers]


# --- liveness -----------------------------------------------------------------------------------


async def test_a_ping_is_answered(hub: Gateway):
    """A worker sees that the gateway itself lives, not only a proxy."""
    worker = await hub.worker()
    await worker.send(Ping())
    await worker.until(lambda: bool(worker.got(Pong)))


async def test_a_silent_worker_is_dead(tmp_path: Path):
    """Although its socket, or a proxy, answers the WebSocket's own pings."""
    async with gateway(tmp_path, replace(QUICK, ping=0.05, silence=0.2)) as hub:
        worker = await hub.worker()
        worker.answers_pings = False
        assert await worker.closed() == Close.GOING_AWAY
        await hub.until(lambda: hub.registry.get(worker.id) is None)


async def test_a_worker_that_answers_stays(tmp_path: Path):
    """Pings alone keep it."""
    async with gateway(tmp_path, replace(QUICK, ping=0.02, silence=0.1)) as hub:
        worker = await hub.worker()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await worker.closed()
        assert worker.is_connected


async def test_a_worker_that_reads_nothing_is_dropped(tmp_path: Path):
    """What is sent to it would pile up; others are not held up."""
    async with gateway(tmp_path, replace(QUICK, drain=0.2)) as hub:
        stuck = hub.scripted(*await hub.enrol("stuck"))
        socket = await stuck.open()
        await stuck.send(stuck.hello_frame())
        await hub.until(lambda: hub.registry.get(stuck.id) is not None)
        assert socket._response.connection
        transport: Any = socket._response.connection.transport
        transport.pause_reading()
        large = [{"role": "user", "content": "x" * 4_000_000}]
        pin = {"X_Pendra_Worker_Id": stuck.id}
        asked = [asyncio.create_task(hub.client.chat(messages=large, **pin)) for _ in range(3)]
        other = await hub.worker(name="other")
        assert (await hub.client.chat(X_Pendra_Worker_Id=other.id)).status == 200
        await hub.until(lambda: hub.registry.get(stuck.id) is None)
        replies = await asyncio.gather(*asked)
        assert {reply.status for reply in replies} == {502}
        transport.abort()


# --- what is kept -------------------------------------------------------------------------------


async def kept(hub: Gateway, worker: ScriptedWorker) -> Any:
    await hub.registry.keep()
    found = await hub.store.worker(None, worker.id)
    assert found
    return found.report


async def test_what_a_worker_says_is_kept(hub: Gateway):
    """Hello and status, so that a console shows it while the worker is away."""
    worker = await hub.worker(settings=SettingsPart(speculative_decoding="off"))
    report = await kept(hub, worker)
    assert report.version == "1.0"
    assert DECIDES in report.capabilities
    assert report.settings == Settings(speculative_decoding="off")
    assert [model.id for model in report.models] == ["m"]


async def test_the_latest_status_holds(hub: Gateway):
    """Models that are loaded, measured or gone."""
    worker = await hub.worker()
    measured = ModelReport(id="n", draft="d", speculation=Speculation(state="on", speedup=0.2))
    await worker.send(StatusReport(models=(measured,)))
    await hub.until(lambda: hub.registry.get(worker.id).models == ["n"])  # type: ignore[union-attr]
    report = await kept(hub, worker)
    assert report.models == (measured,)


async def test_a_console_is_told_of_changes(hub: Gateway):
    """A worker that comes, and a request that was answered."""
    changes = hub.registry.changes(hub.organisation.id)
    first = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    await hub.worker()
    assert (await first)["workers"]
    await hub.client.chat()
    async with asyncio.timeout(5):
        while not (await anext(changes))["usage"]:
            pass
    await changes.aclose()


async def test_another_organisation_is_told_of_nothing(hub: Gateway):
    """Not even that something has changed."""
    theirs = await hub.store.add_organisation("others")
    changes = hub.registry.changes(theirs.id)
    told = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    await hub.worker()
    await hub.client.chat()
    assert not told.done()
    told.cancel()
    await asyncio.gather(told, return_exceptions=True)


# --- settings -----------------------------------------------------------------------------------


async def pending(hub: Gateway, worker: ScriptedWorker) -> tuple[dict[str, Any], int]:
    found = await hub.store.worker(None, worker.id)
    assert found
    return found.pending, found.pending_revision


async def test_a_change_is_sent_and_acknowledged(hub: Gateway):
    """Then nothing waits any more, and the worker's own word is shown."""
    worker = await hub.worker()
    revision = await hub.registry.change(worker.worker, {"speculative_decoding": "off"})
    assert revision == 1
    one = hub.registry.get(worker.id)
    assert one
    await hub.until(lambda: one.report.settings == Settings(speculative_decoding="off"))
    await hub.registry.settle()
    assert (await pending(hub, worker))[0] == {}


async def test_a_change_outlives_a_lost_acknowledgement(hub: Gateway):
    """It is sent again to a worker that doesn't have it."""
    worker = await hub.worker()
    worker.acknowledges = False
    await hub.registry.change(worker.worker, {"kv_prefix_cache": False})
    await worker.until(lambda: bool(worker.got(SettingsFrame)))
    assert await pending(hub, worker) == ({"kv_prefix_cache": False}, 1)
    await worker.cut()
    worker.acknowledges = True
    await worker.again()
    await hub.until(lambda: not hub.registry.pending(worker.worker))
    assert len(worker.got(SettingsFrame)) == 2
    assert worker.settings == SettingsPart(kv_prefix_cache=False)


async def test_a_change_that_the_worker_has_is_not_sent_again(hub: Gateway):
    """Its revision says so, and its own later word counts."""
    worker = await hub.worker()
    worker.acknowledges = False
    await hub.registry.change(worker.worker, {"kv_prefix_cache": False})
    await worker.until(lambda: bool(worker.got(SettingsFrame)))
    await worker.cut()
    own = SettingsPart(speculative_decoding="off")
    worker.revision, worker.settings = 2, own
    worker.reports = StatusReport(models=tuple(worker.models), settings=own, settings_revision=2)
    await worker.again()
    await hub.until(lambda: not hub.registry.pending(worker.worker))
    assert len(worker.got(SettingsFrame)) == 1
    assert (await kept(hub, worker)).settings == Settings(speculative_decoding="off")


async def test_changes_that_wait_are_sent_together(hub: Gateway):
    """The later of two values, under the latest revision."""
    worker = await hub.worker()
    worker.acknowledges = False
    await hub.registry.change(worker.worker, {"speculative_decoding": "off"})
    await hub.registry.change(worker.worker, {"kv_prefix_cache": False})
    revision = await hub.registry.change(worker.worker, {"speculative_decoding": "auto"})
    await worker.until(lambda: len(worker.got(SettingsFrame)) == 3)
    last = worker.got(SettingsFrame)[-1]
    assert (last.revision, last.changes) == (
        revision,
        {"speculative_decoding": "auto", "kv_prefix_cache": False},
    )


async def test_a_change_survives_the_gateways_restart(tmp_path: Path):
    """It is in the database until the worker has it."""
    async with gateway(tmp_path) as hub:
        worker = await hub.worker()
        worker.acknowledges = False
        await hub.registry.change(worker.worker, {"speculative_decoding": "off"})
    async with gateway(tmp_path) as hub:
        again = hub.scripted(worker.worker, worker.secret)
        await again.connect()
        await hub.until(lambda: not hub.registry.pending(again.worker))
        assert again.settings == SettingsPart(speculative_decoding="off")


async def test_a_revision_is_above_what_the_worker_has(hub: Gateway):
    """A local change may have raised it."""
    worker = hub.scripted(*await hub.enrol())
    worker.revision = 7
    await worker.connect()
    assert await hub.registry.change(worker.worker, {"speculative_decoding": "off"}) == 8


async def test_a_worker_that_is_away_takes_no_setting(hub: Gateway):
    """The caller is told so."""
    enrolled, _ = await hub.enrol()
    with pytest.raises(NotConnected):
        await hub.registry.change(enrolled, {"speculative_decoding": "off"})


async def test_an_older_worker_takes_no_setting(hub: Gateway):
    """Each setting has its capability."""
    worker = await hub.worker(capabilities=(DECIDES, SETTING))
    await hub.registry.change(worker.worker, {"speculative_decoding": "off"})
    with pytest.raises(NeedsUpdate):
        await hub.registry.change(worker.worker, {"kv_prefix_cache": False})


# --- the platform -------------------------------------------------------------------------------


async def test_the_platforms_switch_reaches_every_worker(hub: Gateway):
    """With a revision that grows; policies stay the worker's."""
    workers = [await hub.worker(name=name) for name in "ab"]
    await hub.store.switch_platform("off")
    await hub.registry.platform_changed()
    for worker in workers:
        await worker.until(lambda worker=worker: bool(worker.got(PlatformFrame)))
        (frame,) = worker.got(PlatformFrame)
        assert frame.speculative_decoding == "off"
        assert worker.welcome
        assert frame.revision > worker.welcome.platform.revision


async def test_the_platforms_switch_reaches_one_worker(hub: Gateway):
    """The other hears nothing."""
    one, other = [await hub.worker(name=name) for name in "ab"]
    await hub.store.switch_platform("off", [one.id])
    await hub.registry.platform_changed()
    await one.until(lambda: bool(one.got(PlatformFrame)))
    await hub.client.chat(X_Pendra_Worker_Id=other.id)
    assert other.got(PlatformFrame) == []


async def test_what_is_not_offered_is_unavailable(hub: Gateway):
    """To an organisation's workers, on change and in welcome."""
    worker = await hub.worker()
    await hub.store.offer_speculation(hub.organisation.id, False)
    await hub.registry.platform_changed()
    await worker.until(lambda: bool(worker.got(PlatformFrame)))
    assert worker.got(PlatformFrame)[0].speculative_decoding == "unavailable"
    other = await hub.worker(name="other")
    assert other.welcome
    assert other.welcome.platform.speculative_decoding == "unavailable"


async def test_a_change_that_concerns_nobody_is_not_sent(hub: Gateway):
    """Of another organisation."""
    worker = await hub.worker()
    theirs = await hub.store.add_organisation("others")
    await hub.store.offer_speculation(theirs.id, False)
    await hub.registry.platform_changed()
    await hub.client.chat()
    assert worker.got(PlatformFrame) == []


# --- the end ------------------------------------------------------------------------------------


async def test_a_gateway_that_goes_says_so(tmp_path: Path):
    """Its workers redial at once."""
    async with gateway(tmp_path) as hub:
        worker = await hub.worker()
        await hub.registry.shut()
        assert await worker.closed() == Close.GOING_AWAY


async def test_a_gateway_that_drains_finishes_what_it_has(hub: Gateway):
    """And takes nothing new."""
    go = asyncio.Event()

    async def wait(_: int) -> None:
        await go.wait()

    worker = await hub.worker(says("a", step=wait))
    asked = asyncio.create_task(hub.client.stream())
    await worker.until(lambda: worker.n_begun == 1)
    draining = asyncio.create_task(hub.registry.drain(5))
    await asyncio.sleep(0)
    assert (await hub.client.chat()).code == "shutting_down"
    go.set()
    await draining
    assert (await asked).text == "a"
