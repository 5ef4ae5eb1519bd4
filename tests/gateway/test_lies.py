"""Workers that lie, over real sockets: nothing of it reaches a client, a row, a page or a log."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.records import MAX_REVISION
from mlx_worker.wire.link import Close, StatusReport
from tests.gateway.fleet import CHAT, PATIENT_S, Gateway, Job, ending, gateway

OPENING = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
WORD = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
END = ending(3)
ODD_SUM = {**END, "usage": {**END["usage"], "total_tokens": 99}}
ENDLESS = {**END, "pendra": {"timing": {"ttft_ms": 1e308}}}


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path) as running:
        yield running


BROKEN: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "no end": [WORD],
    "an end without figures": [{"choices": END["choices"]}],
    "two ends": [END, END],
    "words after the end": [END, WORD],
    "two beginnings": [OPENING, OPENING, END],
    "figures that don't add up": [ODD_SUM],
    "a figure without measure": [ENDLESS],
}


@pytest.mark.parametrize("said", BROKEN.values(), ids=BROKEN.keys())
async def test_a_stream_that_is_no_whole_reply_ends_with_an_error(hub: Gateway, said: list[Any]):
    """Its client hears of it, and the row has it."""

    async def script(job: Job) -> None:
        await job.accept()
        await job.chunk(*said)
        await job.done()

    await hub.worker(script)
    reply = await hub.client.stream()
    code = reply.errors[0]["code"] if reply.events else reply.code
    assert code == "worker_fault"
    assert (await hub.rows(1))[0].error == "worker_fault"


OTHER = {"completion_tokens": 10**9, "ttft_ms": 1.0, "tokens_per_second": 1e6, "cached_tokens": 5}


@pytest.mark.parametrize(("figure", "value"), OTHER.items())
async def test_the_row_has_no_other_figures_than_the_reply(hub: Gateway, figure: str, value: float):
    """A worker that tells the gateway another thing than the client has its reply refused."""

    async def script(job: Job) -> None:
        await job.accept()
        await job.chunk(WORD, END)
        await job.done(**{figure: value})

    await hub.worker(script)
    assert [error["code"] for error in (await hub.client.stream()).errors] == ["worker_fault"]
    assert (await hub.rows(1))[0].completion_tokens is None


async def test_a_figure_without_measure_ends_its_connection_alone(hub: Gateway):
    """The page of all workers stays as it was."""
    worker = await hub.worker()
    lie = '{"type": "status", "n": 2, "models": [{"id": "m", "draft": "d", "speculation": '
    await worker.send_text(lie + '{"state": "on", "speedup": 1e308}}]}')
    assert await worker.closed() == Close.BAD_FRAME
    assert (await hub.client.get("/api/v1/workers")).status == 200


async def test_a_name_with_control_characters_is_none(hub: Gateway):
    """Terminals, logs and pages would obey them."""
    worker = await hub.worker()
    await worker.send_text('{"type": "status", "n": 2, "models": [{"id": "m\\u001b[2J"}]}')
    assert await worker.closed() == Close.BAD_FRAME


async def test_settings_change_at_a_worker_that_claims_the_last_revision(hub: Gateway):
    """It is told the one that is left, again and again."""
    worker = await hub.worker()
    worker.acknowledges = False
    last = StatusReport(
        models=worker.models, settings=worker.settings, settings_revision=MAX_REVISION - 1
    )
    await worker.send(last)
    one = hub.registry.get(worker.id)
    assert one
    await hub.until(lambda: one.report.settings_revision == MAX_REVISION - 1)
    url = f"{hub.url}/api/v1/workers/{worker.id}/speculative-decoding"
    for mode in ("off", "auto"):
        async with hub.client.session.patch(url, json={"mode": mode}) as reply:
            assert reply.status == 202


async def test_a_worker_without_models_that_is_named_for_a_request_without_one(hub: Gateway):
    """Nobody can answer, which is said so."""
    worker = await hub.worker(models=[])
    body = {"messages": CHAT["messages"]}
    reply = await hub.client.chat(body=body, **{"X-Pendra-Worker-Id": worker.id})
    assert (reply.status, reply.code) == (503, "no_worker")


async def test_a_key_that_a_worker_made_up_is_not_in_the_log(
    hub: Gateway, caplog: pytest.LogCaptureFixture
):
    """It may be a part of the reply, or a line that looks like one of ours."""
    logprobs = {"tokens": [], "token_logprobs": [], "text_offset": []}
    logprobs["top_logprobs"] = [{"secret\nline": "x"}]

    async def script(job: Job) -> None:
        await job.accept()
        await job.chunk({"choices": [{"index": 0, "text": "", "logprobs": logprobs}]})

    worker = await hub.worker(script)
    with caplog.at_level("INFO"):
        await hub.client.stream(path="/v1/completions", body={"model": "m", "prompt": "a"})
        assert await worker.closed() == Close.BAD_FRAME
    await hub.until(lambda: hub.registry.get(worker.id) is None)
    assert "secret" not in caplog.text


async def test_a_client_is_not_told_to_wait_for_ages(hub: Gateway):
    """A worker that says so has said no frame."""
    worker = await hub.worker()
    lie = '{"type": "rejected", "n": 2, "id": "%s", "code": "a", "retry_after_ms": 999999999999}'
    await worker.send_text(lie % ("0" * 32))
    assert await worker.closed() == Close.BAD_FRAME


async def test_a_key_has_only_so_many_event_streams(hub: Gateway, monkeypatch: pytest.MonkeyPatch):
    """The next is refused until one has gone; other keys have theirs."""
    monkeypatch.setattr("mlx_worker.gateway.events.MOST_OPEN", 1)
    url, other = f"{hub.url}/api/v1/events", await hub.member()
    async with hub.client.session.get(url) as first:
        assert first.status == 200
        assert (await hub.client.get("/api/v1/events")).code == "too_many_streams"
        async with other.session.get(url) as theirs:
            assert theirs.status == 200
    async with asyncio.timeout(PATIENT_S):
        status = 429
        while status == 429:
            async with hub.client.session.get(url) as again:
                status = again.status
    assert status == 200
