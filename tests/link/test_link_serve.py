"""`mlx-worker serve` with a gateway in its configuration: a real worker, a scripted gateway."""

import asyncio
import json
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mlx_worker import cli
from mlx_worker.wire.link import Close, PlatformFrame, SettingsFrame
from tests.link.switchboard import KEY, Line, Switchboard, id_of, switchboard, text_of, until
from tests.workers import COUNT, STARTS_S, TELL, Worker

ONE = id_of(1)
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 48}


@asynccontextmanager
async def serving(board: Switchboard, home: Path, *arguments: str) -> AsyncIterator[Worker]:
    environ = {"MLX_WORKER_GATEWAY__URL": board.url, "MLX_WORKER_GATEWAY__KEY": KEY}
    worker = await asyncio.to_thread(lambda: Worker(home, *arguments, **environ))
    try:
        yield worker
    finally:
        worker.process.kill()
        await asyncio.to_thread(worker.ended)


async def reply(line: Line, id: str, **body: Any) -> list[Any]:
    await line.ask(id, **{"model": "demo", **body})
    return await line.reply(id)


@pytest.mark.long  # tests/gateway/test_through.py has its sibling
async def test_a_seed_gives_the_same_text_over_the_link_and_locally(tmp_path: Path):
    """Streamed and not; /status shows the link."""
    async with switchboard() as board, serving(board, tmp_path, "--model", "demo") as worker:
        line = await board.welcomed()
        assert [model.id for model in line.hello.models] == ["demo"]
        local = await asyncio.to_thread(lambda: worker.text(messages=TELL, **SEEDED))
        streamed = await reply(line, ONE, messages=TELL, **SEEDED)
        whole = await reply(line, id_of(2), messages=TELL, stream=False, **SEEDED)
        assert text_of(streamed) == local
        assert whole[1].data[0]["choices"][0]["message"]["content"] == local
        assert streamed[-1].usage.cached_tokens == 0  # what this machine asked is not theirs
        assert whole[-1].usage.cached_tokens > 0
        assert streamed[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
        shown = (await asyncio.to_thread(worker.status))["link"]
        assert (shown["state"], shown["name"]) == ("connected", "Mac of Olga")
        assert KEY not in json.dumps(shown)
        await until(lambda: line.statuses[-1].models[0].speculation is not None)


async def test_told_to_stop_it_says_so_finishes_and_leaves(tmp_path: Path):
    """Draining first, then the rest of the reply, then 1001; nothing is dialled after that."""
    async with switchboard() as board, serving(board, tmp_path, "--model", "demo") as worker:
        line = await board.welcomed()
        await line.ask(ONE, model="demo", messages=COUNT, temperature=0, max_tokens=400)
        await line.next("accepted")
        await line.next("chunk")
        worker.process.terminate()
        while (await line.next("draining", "chunk")).type != "draining":
            pass
        await line.ask(id_of(2), model="demo", messages=COUNT)
        found = {"rejected": 0, "done": 0, "chunk": 0}
        while not (found["rejected"] and found["done"]):
            found[(await line.next(*found)).type] += 1
        assert await line.ended() == Close.GOING_AWAY
        out, said = await asyncio.to_thread(lambda: worker.process.communicate(timeout=STARTS_S))
        assert worker.process.returncode == 0
        assert len(board.dials) == 1
        host = board.url[5:].partition("/")[0]
        assert f"gateway: connected to {host} as Mac of Olga of default\n" in said
        assert KEY not in out + said
        assert KEY not in "".join(file.read_text() for file in (tmp_path / "logs").iterdir())


async def test_the_demo_pair_is_not_offered_unless_it_is_named(tmp_path: Path):
    """And whoever started the worker hears what to do; the local API answers with it."""
    async with switchboard() as board, serving(board, tmp_path) as worker:
        line = await board.welcomed()
        assert line.hello.models == ()
        (error,) = await reply(line, ONE, messages=COUNT)
        assert (error.status, error.code) == (404, "model_not_found")
        text = await asyncio.to_thread(lambda: worker.text(temperature=0))
        assert text.startswith("3, 7, 11, 15")
        worker.process.terminate()
        _, said = await asyncio.to_thread(lambda: worker.process.communicate(timeout=STARTS_S))
        assert "gateway: no model is offered to it" in said
        assert "--model demo" in said


@pytest.mark.long  # tests/link/test_link_faults.py has its sibling
async def test_a_gateway_that_rejects_the_key_stops_nothing(tmp_path: Path):
    """It is said once, in one line."""
    async with switchboard() as board:
        board.answers = [lambda _: web.Response(status=401)] * 100
        async with serving(board, tmp_path, "--model", "demo") as worker:
            await until(lambda: len(board.dials) == 1)
            text = await asyncio.to_thread(lambda: worker.text(temperature=0))
            assert text.startswith("3, 7, 11, 15")
            shown = (await asyncio.to_thread(worker.status))["link"]
            assert (shown["state"], shown["name"]) == ("key rejected", None)
            worker.process.terminate()
            _, said = await asyncio.to_thread(lambda: worker.process.communicate(timeout=STARTS_S))
            assert said.count("key rejected") == 1
            assert len(board.dials) == 1


def patch(worker: Worker, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    address = f"{worker.url}/api/settings"
    change = urllib.request.Request(address, body, headers, method="PATCH")
    urllib.request.urlopen(change).close()


async def test_settings_of_both_ends_meet_in_the_workers_file(tmp_path: Path):
    """A change from there is kept, and one made here is newer."""
    file = tmp_path / "policies.json"
    async with switchboard() as board:
        async with serving(board, tmp_path, "--model", "demo") as worker:
            line = await board.welcomed()
            await line.say(SettingsFrame(revision=4, speculative_decoding="off"))
            assert (await line.next("settings_ack")).revision == 4
            assert json.loads(file.read_text()) == {
                "speculative_decoding_disabled": True,
                "revision": 4,
            }
            await asyncio.to_thread(patch, worker, b'{"run_requests_together": true}')
            await until(lambda: line.statuses[-1].settings_revision == 5)
            assert line.statuses[-1].settings.run_requests_together
            await line.say(PlatformFrame(revision=1, speculative_decoding="off"))
            frames = await reply(line, ONE, messages=COUNT, speculation="on")
            notice = frames[-2].data[-1]["pendra"]["notice"]
            assert notice["message"].endswith("switched off by Pendra")
            assert "platform" not in file.read_text()


@pytest.mark.long  # tests/link/test_link_faults.py has its sibling
async def test_a_worker_that_starts_again_shows_its_file(tmp_path: Path):
    """Whatever it holds now, with its revision."""
    values = {"run_requests_together": True, "revision": 5}
    (tmp_path / "policies.json").write_text(json.dumps(values))
    async with switchboard() as board, serving(board, tmp_path, "--model", "demo"):
        line = await board.welcomed()
        assert line.hello.settings is not None
        assert line.hello.settings.speculative_decoding == "auto"
        assert line.hello.settings.run_requests_together
        assert line.hello.settings_revision == 5


def test_half_of_what_a_gateway_needs_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Told before anything is loaded, with what to do."""
    monkeypatch.setenv("MLX_WORKER_GATEWAY__URL", "wss://gateway.example")
    monkeypatch.setattr(sys, "argv", ["mlx-worker", "serve", "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "gateway.key: is missing beside gateway.url" in capsys.readouterr().err
