"""Downloads by /api/models: a real server, hub and files, with faults on the way."""

import asyncio
import json
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.models.store import Store
from mlx_worker.server import job as jobs
from tests.hub import LocalHub
from tests.hub_faults import Fault
from tests.server.library import (
    DRAFT,
    MODEL,
    N_DRAFT,
    N_WEIGHTS,
    WEIGHTS,
    downloading,
    gone_on_at,
    library,
    listening,
    model_files,
    post,
    pulled,
    state_of,
    until,
    until_ended,
    until_stalled,
)
from tests.server.local import JSON, Local
from tests.workers import Worker


def progress_of(messages: list[dict[str, Any]]) -> list[int]:
    return [one["present_bytes"] for one in messages if one["type"] in ("planned", "progress")]


async def until_state(local: Local, state: str) -> None:
    async def is_so() -> bool:
        return (await state_of(local))["state"] == state

    await until(is_so)


# --- a download --------------------------------------------------------------------------------


async def test_a_model_comes_with_its_draft_and_is_served_at_once(hub: LocalHub, store: Store):
    """The plan first, the end last; without a restart."""
    async with downloading(hub, store) as local:
        first, *_, last = await pulled(local)
        assert first["type"] == "planned"
        assert (first["id"], first["repo"], first["draft"]) == (MODEL, MODEL, DRAFT)
        assert first["bytes"] > first["present_bytes"] + N_WEIGHTS
        assert first["draft_bytes"] > N_DRAFT
        assert last == {
            "type": "done", "id": MODEL, "is_new": True, "draft": DRAFT, "draft_note": None,
            "unchecked": None,
        }  # fmt: skip
        (row,) = (await library(local))["models"]
        assert (row["id"], row["state"], row["is_served"]) == (MODEL, "ready", True)
        assert row["present_bytes"] == row["bytes"] == first["bytes"]
        served = (await local.get("/v1/models")).json()["data"]
        assert [one["id"] for one in served] == ["demo", MODEL]
        assert (await state_of(local))["state"] == "done"


async def test_progress_grows_to_the_whole_and_comes_at_most_five_times_a_second(
    hub: LocalHub, store: Store
):
    """However many pieces there are; the last of it is told."""
    hub.rate = 1_000_000
    async with downloading(hub, store) as local:
        began = time.monotonic()
        messages = await pulled(local)
        took_s = time.monotonic() - began
        told = progress_of(messages)
        assert told == sorted(told)
        assert told[-1] == messages[0]["bytes"]
        assert 3 <= len(told) <= 3 + took_s / jobs.EVERY_S


async def test_a_model_that_is_here_is_only_looked_at_again(hub: LocalHub, store: Store):
    """No byte of it twice."""
    async with downloading(hub, store) as local:
        await pulled(local)
        sent = hub.bytes_sent()
        assert (await pulled(local))[-1]["is_new"] is False
        assert hub.bytes_sent() == sent


async def test_a_model_can_be_had_without_its_draft(hub: LocalHub, store: Store):
    """And with another one than its own, if it is named."""
    hub.add("org/other-draft", {**model_files(1000)})
    async with downloading(hub, store) as local:
        done = (await pulled(local, draft="none"))[-1]
        assert (done["draft"], done["draft_note"]) == (None, "none was wanted")
        assert (await pulled(local, draft="org/other-draft"))[-1]["draft"] == "org/other-draft"


async def test_a_revision_can_be_named(hub: LocalHub, store: Store):
    """A branch that is not main."""
    commit = hub.add(MODEL, model_files(5000))
    hub.branch(MODEL, "old", commit)
    hub.add(MODEL, model_files())
    async with downloading(hub, store) as local:
        assert (await pulled(local, revision="old"))[0]["commit"] == commit
        (row,) = (await library(local))["models"]
        assert (row["revision"], row["commit"]) == ("old", commit)


async def test_what_a_hub_cannot_say_again_is_said_of_a_model_that_is_here(
    hub: LocalHub, store: Store
):
    """It stays, and the end says why it was not looked at."""
    async with downloading(hub, store) as local:
        await pulled(local)
        hub.stop()
        done = (await pulled(local))[-1]
        assert (done["type"], done["is_new"]) == ("done", False)
        assert "can't be reached" in done["unchecked"]
        hub.start()


# --- who listens -------------------------------------------------------------------------------


async def test_a_download_goes_on_when_its_listener_leaves(hub: LocalHub, store: Store):
    """A page that is reloaded must not stop 18 GB."""
    gate = hub.gate(WEIGHTS, 300_000, repo=MODEL)
    async with downloading(hub, store) as local:
        async with listening(local) as listener:
            await listener.until("planned")
            await until_stalled(local, gate, 300_000)
        assert (await state_of(local))["state"] == "running"
        gate.release()
        await until_state(local, "done")
        assert hub.bytes_sent(MODEL, WEIGHTS) == N_WEIGHTS


async def test_a_second_request_joins_the_download(hub: LocalHub, store: Store):
    """Both hear the plan and the same end; the bytes come once."""
    gate = hub.gate(WEIGHTS, 300_000, repo=MODEL)
    async with downloading(hub, store) as local, listening(local) as one:
        plan = await one.until("planned")
        await until_stalled(local, gate, 300_000)
        async with listening(local) as two:
            assert await two.next() == plan
            gate.release()
            ends = (await one.rest())[-1], (await two.rest())[-1]
            assert ends[0] == ends[1]
            assert ends[0]["type"] == "done"
    assert hub.bytes_sent(MODEL, WEIGHTS) == N_WEIGHTS


async def test_another_wish_for_a_model_that_is_coming_is_refused(hub: LocalHub, store: Store):
    """Joining would leave it out without a word."""
    gate = hub.gate(WEIGHTS, 300_000, repo=MODEL)
    async with downloading(hub, store) as local, listening(local):
        reply = await post(local, "pull", model=MODEL, draft="none")
        assert (reply.status, reply.code) == (409, "model_busy")
        assert "with another draft" in reply.json()["error"]["message"]
        gate.release()


async def test_two_models_come_side_by_side(hub: LocalHub, store: Store):
    """One that stalls keeps no other waiting."""
    hub.add("org/second", model_files(5000, b"s"))
    gate = hub.gate(WEIGHTS, 300_000, repo=MODEL)
    async with downloading(hub, store) as local, listening(local) as first:
        await first.until("planned")
        assert (await pulled(local, "org/second"))[-1]["type"] == "done"
        states = {one["model"]: one["state"] for one in (await library(local))["pulls"]}
        assert states == {MODEL: "running", "org/second": "done"}
        gate.release()
        assert (await first.rest())[-1]["type"] == "done"


async def test_there_are_at_most_four_downloads(hub: LocalHub, store: Store):
    """A fifth is told to come back."""
    names = [f"org/model-{n}" for n in range(5)]
    for name in names:
        hub.add(name, model_files(50_000, name[-1].encode()))
    gates = [hub.gate(WEIGHTS, 10_000, repo=name) for name in names[:4]]
    async with downloading(hub, store) as local:
        for name in names[:4]:
            async with listening(local, name) as listener:
                await listener.until("planned")
        reply = await post(local, "pull", model=names[4])
        assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "overloaded", "60")
        for gate in gates:
            gate.release()


async def test_a_silent_stream_shows_that_it_lives(hub: LocalHub, store: Store, monkeypatch):
    """By a comment, which no client takes for a message; also before there is a plan."""
    monkeypatch.setattr(jobs, "SILENCE_S", 0.1)
    gate = hub.gate("config.json", 5, repo=MODEL)
    async with downloading(hub, store) as local, listening(local) as listener:
        gate.release()
        await listener.until("done")
        assert listener.comments
        assert all(line.startswith(":") for line in listener.comments)


async def test_the_loop_answers_while_bytes_come(hub: LocalHub, store: Store):
    """All that blocks is elsewhere: the guard of conftest.py, and how long others wait."""
    hub.add(MODEL, model_files(20_000_000))
    async with downloading(hub, store) as local:
        task = asyncio.create_task(pulled(local))
        longest_s = 0.0
        while not task.done():
            began = time.monotonic()
            assert (await local.get("/health")).status == 200
            longest_s = max(longest_s, time.monotonic() - began)
        assert (await task)[-1]["type"] == "done"
        assert longest_s < 2.0  # seconds, on a busy machine


# --- stopping ----------------------------------------------------------------------------------


async def test_a_stopped_download_keeps_what_came_and_goes_on_from_there(
    hub: LocalHub, store: Store
):
    """No byte twice."""
    gate = hub.gate(WEIGHTS, 400_000, repo=MODEL)
    async with downloading(hub, store) as local:
        async with listening(local) as listener:
            await listener.until("planned")
            await until_stalled(local, gate, 400_000)
            reply = await post(local, "stop", model=MODEL)
            assert (reply.status, reply.json()["state"]) == (200, "stopped")
            assert (await listener.rest())[-1]["type"] == "stopped"
        gate.release()
        messages = await pulled(local)
        assert messages[-1]["type"] == "done"
        assert progress_of(messages) == sorted(progress_of(messages))
    assert (gone_on_at(hub) or 0) >= 400_000


async def test_a_download_that_is_asked_for_again_waits_until_the_stopped_one_has_ended(
    hub: LocalHub, store: Store
):
    """The hub stalls meanwhile; then it goes on from there."""
    gate = hub.gate(WEIGHTS, 400_000, repo=MODEL)
    async with downloading(hub, store) as local:
        async with listening(local) as listener:
            await listener.until("planned")
            await until_stalled(local, gate, 400_000)
            await post(local, "stop", model=MODEL)
        again = asyncio.create_task(pulled(local))
        await until_state(local, "running")
        assert sum(one.name.startswith("pull ") for one in threading.enumerate()) == 1
        gate.release()
        assert (await again)[-1]["type"] == "done"
    assert (gone_on_at(hub) or 0) >= 400_000


async def test_a_download_can_be_stopped_before_there_is_a_plan(hub: LocalHub, store: Store):
    """Whoever waits for it is told; nothing is kept of it."""
    gate = hub.gate("config.json", 5, repo=MODEL)
    async with downloading(hub, store) as local:
        waiting = asyncio.create_task(pulled(local))
        await asyncio.to_thread(gate.reached.wait, 10)
        await post(local, "stop", model=MODEL)
        stopped = {"type": "stopped", "id": MODEL, "present_bytes": 0, "bytes": 0}
        assert await waiting == [stopped]
        gate.release()
        await until_ended()
        assert (await library(local))["models"] == []


async def test_a_stopped_model_is_shown_as_incomplete(hub: LocalHub, store: Store):
    """With what is here of it."""
    gate = hub.gate(WEIGHTS, 400_000, repo=MODEL)
    async with downloading(hub, store) as local, listening(local) as listener:
        await listener.until("planned")
        await until_stalled(local, gate, 400_000)
        await post(local, "stop", model=MODEL)
        gate.release()
        await until_ended()
        row = (await library(local))["models"][0]
        assert row["state"] == "incomplete"
        assert 400_000 <= row["present_bytes"] < row["bytes"]
        assert row["is_served"] is False


@pytest.mark.parametrize("model", [MODEL, "nothing/here"])
async def test_what_is_not_coming_cannot_be_stopped(hub: LocalHub, store: Store, model: str):
    """Whether it is known or not."""
    async with downloading(hub, store) as local:
        reply = await post(local, "stop", model=model)
        assert (reply.status, reply.code) == (404, "no_download")


async def test_a_worker_stops_at_once_while_the_hub_stalls(hub: LocalHub, store: Store):
    """Whoever listens is told, and the next worker goes on."""
    gate = hub.gate(WEIGHTS, 400_000, repo=MODEL)
    async with downloading(hub, store) as local, listening(local) as listener:
        await listener.until("planned")
        await until_stalled(local, gate, 400_000)
        began = time.monotonic()
        await local.app.shutdown()
        end = (await listener.rest())[-1]
        assert end["error"]["code"] == "shutting_down"
        assert time.monotonic() - began < 1.0
        reply = await post(local, "pull", model=MODEL)
        assert (reply.status, reply.code) == (503, "shutting_down")
        gate.release()
    await until_ended()
    async with downloading(hub, store) as local:
        assert (await pulled(local))[-1]["type"] == "done"
    assert (gone_on_at(hub) or 0) >= 400_000


# --- faults ------------------------------------------------------------------------------------


async def test_a_connection_that_breaks_off_is_gone_on_with(hub: LocalHub, store: Store):
    """Within the same download."""
    hub.faults.add(Fault("cut", WEIGHTS, MODEL, after_bytes=200_000))
    async with downloading(hub, store) as local:
        messages = await pulled(local)
        assert messages[-1]["type"] == "done"
        assert progress_of(messages) == sorted(progress_of(messages))
    assert hub.bytes_sent(MODEL, WEIGHTS) == N_WEIGHTS


async def test_a_download_that_failed_in_the_middle_says_so_and_goes_on_when_asked(
    hub: LocalHub, store: Store, monkeypatch
):
    """The error is the stream's last message; a second request brings only what is missing."""
    monkeypatch.setattr("mlx_worker.models.transfer.TRIES", 2)
    monkeypatch.setattr("mlx_worker.models.transfer.FIRST_WAIT_S", 0.01)
    hub.faults.add(Fault("cut", WEIGHTS, MODEL, after_bytes=200_000))
    hub.faults.add(Fault("drop", WEIGHTS, MODEL, times=2, place="resolve"))
    async with downloading(hub, store) as local:
        first, *_, last = await pulled(local)
        assert first["type"] == "planned"
        assert last["error"]["code"] == "hub_unreachable"
        now = await state_of(local)
        assert (now["state"], now["error"]) == ("failed", last["error"])
        assert now["present_bytes"] < now["bytes"]
        assert (await pulled(local))[-1]["type"] == "done"
        assert (await state_of(local))["error"] is None
    assert hub.bytes_sent(MODEL, WEIGHTS) == N_WEIGHTS


async def test_a_hub_that_is_down_is_an_error_with_its_status(hub: LocalHub, store: Store):
    """Before there is a stream; nothing is remembered of it."""
    async with downloading(hub, store) as local:
        hub.stop()
        reply = await post(local, "pull", model=MODEL)
        assert (reply.status, reply.code) == (502, "hub_unreachable")
        assert (await library(local))["pulls"] == []
        hub.start()
        assert (await pulled(local))[-1]["type"] == "done"


async def test_a_gated_model_says_where_its_licence_is(hub: LocalHub, store: Store):
    """A person can open the page; we can't accept for them."""
    hub.add("org/gated", model_files(), gated=True)
    async with downloading(hub, store) as local:
        reply = await post(local, "pull", model="org/gated")
        assert (reply.status, reply.code) == (403, "gated_model")
        assert f"{hub.endpoint}/org/gated" in reply.json()["error"]["message"]


@pytest.mark.parametrize("model", ["org/nothing", "gemma-5", "demo", "/etc", "..", "a/b/c"])
async def test_an_unknown_name_is_404(hub: LocalHub, store: Store, model: str):
    """Whatever kind of name it is."""
    async with downloading(hub, store) as local:
        reply = await post(local, "pull", model=model)
        assert (reply.status, reply.code) == (404, "model_not_found")
        assert (await library(local))["models"] == []


async def test_what_is_no_model_is_refused(hub: LocalHub, store: Store):
    """Before its bytes come."""
    hub.add("org/gguf", {"config.json": b"{}", "model.gguf": bytes(100_000)})
    async with downloading(hub, store) as local:
        reply = await post(local, "pull", model="org/gguf")
        assert reply.code == "unsupported_model"
        assert "gguf" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"{}", "model"),
        (b'{"model": 3}', "model"),
        (b'{"model": ""}', "model"),
        (b'{"model": "a\\u0000/b"}', "model"),
        (json.dumps({"model": "x" * 201}).encode(), "model"),
        (b'{"model": "org/tiny", "draft": true}', "draft"),
        (b'{"model": "org/tiny", "revision": ""}', "revision"),
        (b'{"model": "org/tiny", "drafts": "none"}', "drafts"),
    ],
)
async def test_a_bad_body_is_400_and_names_the_key(hub: LocalHub, store: Store, body, param):
    """And nothing is begun."""
    async with downloading(hub, store) as local:
        reply = await local.post(JSON, body=body, path="/api/models/pull")
        assert reply.status == 400
        assert reply.json()["error"]["param"] == param
        assert (await library(local))["pulls"] == []
        assert hub.requests == []


async def test_a_folder_that_cannot_be_written_is_told_in_the_stream(hub: LocalHub, store: Store):
    """With its name."""
    store.cache.folder.write_text("a file is in the way")
    async with downloading(hub, store) as local:
        error = (await pulled(local))[-1]["error"]
        assert error["code"] == "model_error"
        assert str(store.cache.folder) in error["message"]


async def test_a_mistake_of_ours_shows_nothing_of_itself(
    hub: LocalHub, store: Store, monkeypatch, caplog
):
    """The log has it."""
    monkeypatch.setattr("mlx_worker.models.pull._plan", lambda *_: 1 / 0)
    async with downloading(hub, store) as local:
        reply = await post(local, "pull", model=MODEL)
        assert reply.status == 500
        assert "ZeroDivision" not in reply.body.decode()
        assert "ZeroDivisionError" in caplog.text


# --- a worker as its users have it -------------------------------------------------------------


def test_a_worker_that_is_told_to_stop_ends_although_the_hub_stalls(hub: LocalHub, tmp_path: Path):
    """Nothing waits for the download's thread; the next worker goes on from what came."""
    gate = hub.gate(WEIGHTS, 400_000, repo=MODEL)
    settings = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint}
    worker = Worker(tmp_path / "home", **settings)
    try:
        request = urllib.request.Request(
            f"{worker.url}/api/models/pull",
            json.dumps({"model": MODEL}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert json.loads(reply.readline().removeprefix(b"data: "))["type"] == "planned"
            assert gate.reached.wait(10)
            began = time.monotonic()
            worker.process.send_signal(signal.SIGTERM)
            assert b'"shutting_down"' in reply.read()
        assert worker.ended() == 0
        assert time.monotonic() - began < 5.0  # the engine's own end included
    finally:
        worker.process.kill()
        worker.ended()
    gate.release()
