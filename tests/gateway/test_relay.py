"""A client's request through a gateway: who answers it, what comes back, what is written down."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from mlx_worker.errors import NotConnected
from mlx_worker.gateway.relay import MAX_BODY_BYTES
from mlx_worker.wire.link import Cancel, ModelReport, Queue, Received, StatusReport
from tests.gateway.fleet import (
    CHAT,
    COUNTS,
    QUICK,
    Gateway,
    Job,
    Script,
    ScriptedWorker,
    gateway,
    read_event,
    says,
)

OTHER = ModelReport(id="other")


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path) as running:
        yield running


def held(*, accepts: bool = True) -> tuple[Script, asyncio.Event]:
    """A script that waits, once it has been given a request, for the event."""
    go = asyncio.Event()

    async def script(job: Job) -> None:
        if accepts:
            await job.accept()
        await go.wait()
        await says("late")(job)

    return script, go


def refuses(retry_after_ms: int = 3000) -> Script:
    async def script(job: Job) -> None:
        await job.reject(retry_after_ms=retry_after_ms)

    return script


def fails(**error: Any) -> Script:
    async def script(job: Job) -> None:
        await job.accept()
        await job.error(**error)

    return script


# --- replies ------------------------------------------------------------------------------------


async def test_a_whole_reply_comes_through(hub: Gateway):
    """The worker's text, under the gateway's names."""
    worker = await hub.worker(name="Mac of Olga ü")
    reply = await hub.client.chat()
    assert reply.status == 200
    assert reply.text == "one two three"
    content = reply.json()
    assert content["pendra"]["worker"] == {
        "id": worker.id,
        "name": "Mac of Olga ü",
        "version": "1.0",
    }
    assert content["pendra"]["request_id"] == reply.headers["X-Request-Id"]
    assert content["id"] == f"chatcmpl-{reply.headers['X-Request-Id']}"
    assert reply.headers["X-Worker-Id"] == worker.id
    assert reply.headers["X-Worker-Name"] == "Mac of Olga %C3%BC"
    assert reply.headers["Server-Timing"].startswith("gateway;dur=")


async def test_a_stream_comes_through(hub: Gateway):
    """Joined, it is the whole reply; it ends as every stream does, and says who answers."""
    worker = await hub.worker()
    reply = await hub.client.stream()
    assert reply.text == "one two three"
    assert reply.events[-1] is None
    assert len(reply.events) > 4
    assert reply.headers["X-Worker-Id"] == worker.id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_comes_through(hub: Gateway, stream: bool):
    """The older endpoint."""
    await hub.worker()
    ask = hub.client.stream if stream else hub.client.chat
    reply = await ask(body={"model": "m", "prompt": "hi"}, path="/v1/completions")
    assert reply.text == "one two three"


async def test_the_official_client_reads_it(hub: Gateway):
    """Both forms, with our own block beside."""
    await hub.worker()
    async with openai.AsyncOpenAI(api_key=hub.client.key, base_url=f"{hub.url}/v1") as client:
        ask: Any = client.chat.completions.create
        whole = await ask(**CHAT)
        pieces = [chunk async for chunk in await ask(**CHAT, stream=True)]
    assert whole.choices[0].message.content == "one two three"
    assert "".join(c.choices[0].delta.content or "" for c in pieces if c.choices) == (
        "one two three"
    )
    assert whole.model_extra["pendra"]["timing"]["ttft_ms"] > 0


async def test_the_clients_own_request_id_is_kept(hub: Gateway):
    """It is not what the worker knows the request by."""
    worker = await hub.worker()
    reply = await hub.client.chat(X_Request_Id="mine")
    assert reply.headers["X-Request-Id"] == reply.json()["pendra"]["request_id"] == "mine"
    (received,) = await _received(worker)
    assert received.id != "mine"


async def _received(worker: ScriptedWorker) -> list[Received]:
    await worker.until(lambda: bool(worker.got(Received)))
    return worker.got(Received)


async def test_the_worker_may_forget_a_reply_that_came(hub: Gateway):
    """It is told that every frame is here."""
    worker = await hub.worker()
    await hub.client.chat()
    await worker.until(lambda: not worker.jobs)
    assert hub.registry.n_requests == 0


async def test_what_a_worker_learns_of_a_caller_is_an_opaque_scope(hub: Gateway):
    """Another key has another; the same key has the same."""
    scopes: list[str] = []

    async def script(job: Job) -> None:
        scopes.append(job.request.cache_scope)
        await COUNTS(job)

    await hub.worker(script)
    other = await hub.member()
    for client in (hub.client, hub.client, other):
        await client.chat()
    assert scopes[0] == scopes[1] != scopes[2]
    assert hub.organisation.id not in scopes[0]


# --- who is asked -------------------------------------------------------------------------------


async def test_without_a_worker_there_is_nobody_to_ask(hub: Gateway):
    """503, and when to come again."""
    reply = await hub.client.chat()
    assert (reply.status, reply.code) == (503, "no_worker")
    assert reply.headers["Retry-After"] == "5"


async def test_an_unknown_model_is_answered_with_those_there_are(hub: Gateway):
    """404, and no worker hears of it."""
    worker = await hub.worker(models=[OTHER])
    reply = await hub.client.chat()
    assert (reply.status, reply.code) == (404, "model_not_found")
    assert "served here: other" in reply.json()["error"]["message"]
    assert worker.n_begun == 0


async def test_a_model_whose_worker_is_away_is_not_unknown(hub: Gateway):
    """503: it may come back."""
    away = await hub.worker()
    await hub.worker(models=[OTHER])
    await away.cut()
    await hub.until(lambda: hub.registry.get(away.id) is None)
    assert (await hub.client.chat()).status == 503


async def test_a_bad_body_reaches_no_worker(hub: Gateway):
    """400, with its parameter."""
    worker = await hub.worker()
    reply = await hub.client.chat(temperature=-1)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "temperature")
    assert worker.n_begun == 0


async def test_a_body_that_fits_in_no_frame_is_refused(hub: Gateway):
    """413, with the limit."""
    await hub.worker()
    message = {"role": "user", "content": "x" * MAX_BODY_BYTES}
    reply = await hub.client.chat(messages=[message])
    assert (reply.status, reply.code) == (413, "body_too_large")


async def test_a_body_just_below_the_limit_is_served(hub: Gateway):
    """It fits in a frame with all that stands around it."""
    worker = await hub.worker()
    message = {"role": "user", "content": "x" * (MAX_BODY_BYTES - 100)}
    reply = await hub.client.chat(messages=[message])
    assert reply.status == 200
    assert worker.n_begun == 1


async def test_a_request_may_name_its_worker(hub: Gateway):
    """That one is asked, whatever it has to do."""
    workers = [await hub.worker(name=name) for name in "abc"]
    for worker in workers:
        reply = await hub.client.chat(X_Pendra_Worker_Id=worker.id)
        assert reply.headers["X-Worker-Id"] == worker.id


async def test_another_organisations_worker_is_as_if_absent(hub: Gateway):
    """404 by name; and nobody's requests go there."""
    theirs = await hub.store.add_organisation("others")
    stranger = await hub.worker(organisation=theirs)
    named = await hub.client.chat(X_Pendra_Worker_Id=stranger.id)
    assert (named.status, named.code) == (404, "worker_not_found")
    assert (await hub.client.chat()).status == 503
    assert (await hub.client.get("/v1/models")).json()["data"] == []


async def test_a_named_worker_that_is_away_is_waited_for_by_nobody(hub: Gateway):
    """503 with its name."""
    worker = await hub.worker(name="mine")
    await hub.worker()
    await worker.cut()
    await hub.until(lambda: hub.registry.get(worker.id) is None)
    reply = await hub.client.chat(X_Pendra_Worker_Id=worker.id)
    assert (reply.status, reply.code) == (503, NotConnected.code)


async def test_requests_are_spread_over_free_slots(hub: Gateway):
    """Four at once on two workers are two each."""
    script, go = held()
    workers = [await hub.worker(script, name=name, slots=2) for name in "ab"]
    asked = [asyncio.create_task(hub.client.chat(prompt_cache_key=str(i))) for i in range(4)]
    for worker in workers:
        await worker.until(lambda worker=worker: worker.n_begun == 2)
    go.set()
    assert all(reply.status == 200 for reply in await asyncio.gather(*asked))


async def test_the_shortest_queue_is_chosen(hub: Gateway):
    """What a worker says of its own doors counts."""
    busy = await hub.worker()
    idle = await hub.worker()
    report = StatusReport(models=busy.models, queue=Queue(running=1, waiting=3, slots=1))
    await busy.send(report)
    await hub.until(lambda: hub.registry.get(busy.id).load == 4)  # type: ignore[union-attr]
    for i in range(4):
        reply = await hub.client.chat(prompt_cache_key=str(i))
        assert reply.headers["X-Worker-Id"] == idle.id


async def test_a_conversation_stays_with_its_worker(hub: Gateway):
    """Its next turn goes where its beginning is cached; others are spread."""
    for name in "abc":
        await hub.worker(name=name)
    turns = list(CHAT["messages"])
    seen: set[str] = set()
    for _ in range(4):
        reply = await hub.client.chat(messages=turns)
        seen.add(reply.headers["X-Worker-Id"])
        turns += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "on"}]
        await hub.client.chat(prompt_cache_key=str(len(turns)))
    assert len(seen) == 1


async def test_a_conversation_does_not_wait_for_a_busy_worker(hub: Gateway):
    """If another has a free slot."""
    script, go = held()
    first = await hub.worker(script, slots=1)
    asked = asyncio.create_task(hub.client.chat(prompt_cache_key="mine"))
    await first.until(lambda: first.n_begun == 1)
    second = await hub.worker(slots=1)
    reply = await hub.client.chat(prompt_cache_key="mine")
    assert reply.headers["X-Worker-Id"] == second.id
    go.set()
    await asked


async def test_a_worker_that_rejects_is_passed_over(hub: Gateway):
    """Another answers, and the client sees nothing of it."""
    await hub.worker(refuses(), name="full", slots=9)
    other = await hub.worker(slots=1)
    for i in range(3):
        reply = await hub.client.chat(prompt_cache_key=str(i))
        assert (reply.status, reply.headers["X-Worker-Id"]) == (200, other.id)


async def test_when_all_reject_the_client_is_told_when_to_come_again(hub: Gateway):
    """503, after the shortest of their waits."""
    await hub.worker(refuses(9000))
    await hub.worker(refuses(2000))
    reply = await hub.client.chat()
    assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "overloaded", "2")


async def test_a_worker_that_drains_gets_no_more(hub: Gateway):
    """It is still connected."""
    from mlx_worker.wire.link import Draining

    worker = await hub.worker()
    await worker.send(Draining())
    await hub.until(lambda: hub.registry.get(worker.id).is_draining)  # type: ignore[union-attr]
    assert (await hub.client.chat()).status == 503


async def test_models_are_those_of_all_workers(hub: Gateway):
    """Each once, as OpenAI lists them."""
    await hub.worker()
    await hub.worker(models=[OTHER, ModelReport(id="m")])
    listed = (await hub.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["m", "other"]
    assert (await hub.client.get("/v1/models/other")).json()["id"] == "other"
    assert (await hub.client.get("/v1/models/none")).status == 404


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_refusal_keeps_its_status(hub: Gateway, stream: bool):
    """What it says of the client's request is the client's to know."""
    error = {"code": "context_length_exceeded", "status": 400, "param": "messages"}
    worker = await hub.worker(fails(**error, message="too long"))
    ask = hub.client.stream if stream else hub.client.chat
    reply = await ask()
    assert (reply.status, reply.code) == (400, "context_length_exceeded")
    assert reply.json()["error"]["param"] == "messages"
    assert reply.headers["X-Worker-Id"] == worker.id


async def test_no_worker_signs_anyone_out(hub: Gateway):
    """A status that is not for it to say becomes a bad gateway."""
    await hub.worker(fails(code="Bad Code", status=401))
    reply = await hub.client.chat()
    assert (reply.status, reply.code) == (502, "worker_error")


async def test_an_error_in_a_stream_is_its_last_event(hub: Gateway):
    """Then [DONE], as clients expect."""

    async def script(job: Job) -> None:
        await job.accept()
        await job.chunk({"choices": [{"index": 0, "delta": {"content": "a"}}]})
        await job.error("generation_failed")

    await hub.worker(script)
    reply = await hub.client.stream()
    assert reply.text == "a"
    assert [error["code"] for error in reply.errors] == ["generation_failed"]
    assert reply.events[-1] is None


async def test_a_worker_that_goes_down_is_replaced_once(hub: Gateway):
    """Nothing had come yet, so another begins anew."""
    await hub.worker(fails(code="shutting_down", status=503, retryable=True), slots=9)
    other = await hub.worker(slots=1)
    for i in range(2):
        reply = await hub.client.chat(prompt_cache_key=str(i))
        assert (reply.status, reply.headers["X-Worker-Id"]) == (200, other.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_worker(hub: Gateway, stream: bool):
    """The request is cancelled at once, and written down as left."""
    script, _ = held()
    worker = await hub.worker(script)
    asked = asyncio.create_task((hub.client.stream if stream else hub.client.chat)())
    await worker.until(lambda: worker.n_begun == 1)
    asked.cancel()
    await worker.until(lambda: bool(worker.got(Cancel)))
    (row,) = await hub.rows(1)
    assert (row.error, row.worker_id) == ("client_gone", worker.id)
    await hub.until(lambda: hub.registry.n_requests == 0)


async def test_a_client_that_leaves_in_mid_stream_frees_the_worker(hub: Gateway):
    """After its first chunk too."""

    async def script(job: Job) -> None:
        await job.accept()
        await job.chunk({"choices": [{"index": 0, "delta": {"content": "a"}}]})
        await asyncio.Event().wait()

    worker = await hub.worker(script)
    async with hub.client.post({**CHAT, "stream": True}) as got:
        assert await read_event(got.content)
    await worker.until(lambda: bool(worker.got(Cancel)))
    (row,) = await hub.rows(1)
    assert row.error == "client_gone"


async def test_late_frames_of_a_request_that_was_left_are_ignored(hub: Gateway):
    """The worker had not heard of it yet; its connection stays."""
    script, _ = held()
    worker = await hub.worker(script)
    asked = asyncio.create_task(hub.client.chat())
    await worker.until(lambda: worker.n_begun == 1)
    (job,) = worker.jobs.values()
    asked.cancel()
    await worker.until(lambda: bool(worker.got(Cancel)))
    job.seq = -1
    await job.chunk({"choices": []})
    await job.done()
    worker.script = COUNTS
    assert (await hub.client.chat()).status == 200
    assert worker.is_connected


async def test_a_client_that_reads_slowly_holds_up_nobody(tmp_path: Path):
    """Its stream is bounded, then cut; another stream of the same worker is whole."""
    piece = {"choices": [{"index": 0, "delta": {"content": "x" * 60_000}}]}

    async def script(job: Job) -> None:
        await job.accept()
        is_large = job.asked.affinity == "large"
        for _ in range(2000 if is_large else 3):
            await job.chunk(piece)
            await asyncio.sleep(0)
        await job.finish()

    async with gateway(tmp_path, replace(QUICK, unread=0.3)) as hub:
        worker = await hub.worker(script)
        large = {**CHAT, "stream": True, "prompt_cache_key": "large"}
        async with hub.client.post(large) as slow:
            await read_event(slow.content)
            small = await hub.client.stream()
            assert len(small.text) == 180_000
            await worker.until(lambda: bool(worker.got(Cancel)))
            rows = await hub.rows(2)
            assert {row.error for row in rows} == {None, "client_too_slow"}
            with pytest.raises((aiohttp.ClientError, EOFError, ConnectionError)):
                async for _ in slow.content:
                    pass


# --- usage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_written_down(hub: Gateway, stream: bool):
    """With the figures of its end."""
    worker = await hub.worker(says("a", "b", drafted=4, accepted=3), name="mine")
    await (hub.client.stream if stream else hub.client.chat)(X_Request_Id="r1")
    (row,) = await hub.rows(1)
    assert (row.request_id, row.model, row.endpoint, row.is_streamed) == ("r1", "m", "chat", stream)
    assert (row.worker_id, row.worker_name) == (worker.id, "mine")
    assert (row.prompt_tokens, row.completion_tokens) == (7, 2)
    assert row.draft_acceptance_rate == 0.75
    assert row.tokens_per_second == 50.0
    assert 20.0 < row.ttft_ms < 1000.0
    assert (row.finish_reason, row.error) == ("stop", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_model_that_answers_is_written_down(hub: Gateway, stream: bool):
    """Also where the request named none."""
    await hub.worker()
    await (hub.client.stream if stream else hub.client.chat)(model=None)
    (row,) = await hub.rows(1)
    assert row.model == "m"


async def test_a_named_worker_that_is_none_is_told_of_by_name(hub: Gateway):
    """With where the ids are."""
    reply = await hub.client.chat(X_Pendra_Worker_Id="abc")
    assert "'abc', there is none. hint: GET /api/v1/workers" in reply.json()["error"]["message"]


async def test_without_a_draft_there_is_no_rate(hub: Gateway):
    """Null in the row, absent in the reply."""
    await hub.worker()
    reply = await hub.client.chat()
    (row,) = await hub.rows(1)
    assert row.draft_acceptance_rate is None
    assert "draft_acceptance_rate" not in reply.json()["pendra"]["timing"]


@pytest.mark.parametrize(
    ("script", "error"),
    [(None, "no_worker"), (refuses(), "overloaded"), (fails(code="timed_out"), "timed_out")],
)
async def test_a_request_that_failed_is_written_down(
    hub: Gateway, script: Script | None, error: str
):
    """With its code."""
    if script:
        await hub.worker(script)
    await hub.client.chat()
    (row,) = await hub.rows(1)
    assert (row.error, row.finish_reason) == (error, None)


async def test_a_database_that_fails_breaks_no_reply(
    hub: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The log says so."""
    await hub.worker()
    await hub.store._database.write("DROP TABLE usage")
    assert (await hub.client.chat()).text == "one two three"
    await hub.registry.settle()
    assert "could not be kept" in caplog.text
