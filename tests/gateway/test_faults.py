"""What breaks between clients, gateway and workers: nothing is lost, doubled or mixed."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.gateway.store import Store
from mlx_worker.gateway.times import Times
from mlx_worker.wire.link import MAX_FRAME, Chunk, Close
from tests.gateway.fleet import (
    CHAT,
    QUICK,
    Client,
    Gateway,
    Job,
    Policy,
    Script,
    ScriptedWorker,
    gateway,
    proxy,
    read_event,
    says,
)

WORDS = ("one ", "two ", "three ", "four")
TEXT = "".join(WORDS)
AT_ONCE = says(*WORDS)
UP, DOWN = "up", "down"
PINGED = replace(QUICK, ping=0.05, grace=5.0)


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path) as running:
        yield running


def chunk(content: str, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": content}}]}


OPENING = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


# --- what lies between --------------------------------------------------------------------------


def cut(direction: str, at: int) -> Policy:
    """The connection breaks off instead of the frame with this number, once."""
    is_cut = False

    async def policy(way: str, n: int, text: str) -> list[str] | None:
        nonlocal is_cut
        if way == direction and n == at and not is_cut:
            is_cut = True
            return None
        return [text]

    return policy


def cut_after(direction: str, at: int) -> Policy:
    """The frame comes, and the connection breaks off with the next one of any side."""
    is_cut = has_come = False

    async def policy(way: str, n: int, text: str) -> list[str] | None:
        nonlocal is_cut, has_come
        if has_come and not is_cut:
            is_cut = True
            return None
        has_come = has_come or (way == direction and n == at)
        return [text]

    return policy


def instead(direction: str, at: int, change: Callable[[str], list[str]]) -> Policy:
    """Another thing is sent on instead of one frame, once."""
    is_done = False

    async def policy(way: str, n: int, text: str) -> list[str] | None:
        nonlocal is_done
        if way == direction and n == at and not is_done:
            is_done = True
            return change(text)
        return [text]

    return policy


async def twice(way: str, n: int, text: str) -> list[str] | None:
    """Everything comes twice."""
    return [text, text]


async def late(way: str, n: int, text: str) -> list[str] | None:
    """Everything takes its time."""
    await asyncio.sleep(0.01)
    return [text]


FAULTS: dict[str, Callable[[str, int], Policy]] = {
    "cut": cut,
    "cut after": cut_after,
    "swallowed": lambda way, at: instead(way, at, lambda text: []),
    "truncated": lambda way, at: instead(way, at, lambda text: [text[: len(text) // 2]]),
    "doubled": lambda way, at: instead(way, at, lambda text: [text, text]),
}
PLACES = [(UP, at) for at in range(1, 10)] + [(DOWN, at) for at in range(1, 4)]


async def behind(
    hub: Gateway, policy: Policy, address: str, script: Script = AT_ONCE
) -> ScriptedWorker:
    worker = hub.scripted(*await hub.enrol(), script=script, url=address)
    await worker.connect()
    worker.persist()
    return worker


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_at_any_frame_changes_no_text(tmp_path: Path, fault: str, stream: bool):
    """The reply goes on after it; no chunk is lost or doubled, and nothing is generated twice."""
    n_again = 0
    async with gateway(tmp_path, PINGED) as hub:
        for way, at in PLACES:
            policy = FAULTS[fault](way, at)
            async with proxy(hub.url, policy) as address:
                worker = await behind(hub, policy, address)
                await hub.until_there(worker)
                ask = hub.client.stream if stream else hub.client.chat
                reply = await ask(X_Pendra_Worker_Id=worker.id)
                assert (reply.status, reply.text) == (200, TEXT), (way, at, reply)
                assert worker.n_begun == 1, (way, at)
                n_again += worker.n_connections - 1
                await worker.stop()
            await hub.until(lambda worker=worker: hub.registry.get(worker.id) is None)
    assert n_again >= (0 if fault == "doubled" else 6 if stream else 4)


@pytest.mark.parametrize("policy", [twice, late])
async def test_a_proxy_that_doubles_or_delays_everything_changes_no_text(
    tmp_path: Path, policy: Policy
):
    """Both ways, from hello on."""
    async with gateway(tmp_path, PINGED) as hub, proxy(hub.url, policy) as address:
        worker = await behind(hub, policy, address)
        await hub.until_there(worker)
        assert (await hub.client.stream()).text == TEXT
        assert (await hub.client.chat()).text == TEXT


@pytest.mark.parametrize("every", [3, 7])
async def test_a_link_that_breaks_all_the_time_changes_no_text(tmp_path: Path, every: int):
    """Eight streams at once over one connection that is cut again and again."""
    are_given = asyncio.Event()

    async def wait(i: int) -> None:
        await are_given.wait()

    async def policy(way: str, n: int, text: str) -> list[str] | None:
        return None if way == UP and n >= every + 2 and are_given.is_set() else [text]

    async with gateway(tmp_path, PINGED) as hub, proxy(hub.url, policy) as address:
        await behind(hub, policy, address, says(*WORDS, step=wait))
        await hub.until(lambda: bool(hub.registry.all(hub.organisation.id)))
        asked = [asyncio.create_task(hub.client.stream()) for _ in range(8)]
        await hub.until(lambda: hub.registry.n_requests == 8)
        are_given.set()
        replies = await asyncio.gather(*asked)
        assert [reply.text for reply in replies] == [TEXT] * 8


async def test_another_connection_of_the_same_worker_goes_on_with_its_streams(hub: Gateway):
    """Although the first was still open: the proxy had not told anyone that it was dead."""
    go = asyncio.Event()

    async def wait(i: int) -> None:
        if i == 2:
            await go.wait()

    worker = await hub.worker(says(*WORDS, step=wait))
    asked = asyncio.create_task(hub.client.stream())
    await worker.until(lambda: any(job.seq >= 2 for job in worker.jobs.values()))
    older = worker.socket
    worker._reader = None  # forgotten, and left open
    await worker.connect()
    assert older
    go.set()
    assert (await asked).text == TEXT
    assert worker.n_begun == 1
    await older.close()


async def test_fifty_workers_that_come_back_at_once_go_on_with_their_streams(tmp_path: Path):
    """All connections break off in the middle; every text is whole, and its own."""
    gate = asyncio.Event()

    def script(name: str) -> Callable[[Job], Awaitable[None]]:
        async def wait(i: int) -> None:
            if i == 2:
                await gate.wait()

        return says(name, *WORDS, step=wait)

    async with gateway(tmp_path, replace(PINGED, ping=1.0)) as hub:
        workers = [await hub.worker(script(f"{i}: "), name=f"w{i}") for i in range(50)]
        asked = [
            asyncio.create_task(hub.client.stream(X_Pendra_Worker_Id=worker.id))
            for worker in workers
        ]
        for worker in workers:
            await worker.until(
                lambda worker=worker: any(job.seq >= 1 for job in worker.jobs.values())
            )
        await asyncio.gather(*(worker.cut() for worker in workers))
        gate.set()
        await asyncio.gather(*(worker.again() for worker in workers))
        texts = [reply.text for reply in await asyncio.gather(*asked)]
        assert texts == [f"{i}: {TEXT}" for i in range(50)]
        assert {worker.n_begun for worker in workers} == {1}


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_clock_that_jumps_ends_no_stream(
    hub: Gateway, monkeypatch: pytest.MonkeyPatch, jump_s: float
):
    """Spans and limits are measured by a clock that nobody sets."""
    real = time.time

    async def jump(i: int) -> None:
        if i == 2:
            monkeypatch.setattr(time, "time", lambda: real() + jump_s)

    await hub.worker(says(*WORDS, step=jump))
    assert (await hub.client.stream()).text == TEXT
    (row,) = await hub.rows(1)
    assert 0 < row.ttft_ms < 10_000


# --- workers that are lost ----------------------------------------------------------------------


def stalls_after(*words: str) -> Callable[[Job], Awaitable[None]]:
    """Says these, and nothing more."""

    async def script(job: Job) -> None:
        await job.accept()
        if job.asked.call.is_streamed:
            await job.chunk(OPENING)
        for word in words:
            await job.chunk(chunk(word))
        await asyncio.Event().wait()

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_killed_before_its_first_word_is_replaced(hub: Gateway, stream: bool):
    """Another begins anew, once; the opening of the stream wasn't sent yet."""
    lost = await hub.worker(stalls_after(), slots=9)
    other = await hub.worker(says(*WORDS), slots=1)
    asked = asyncio.create_task((hub.client.stream if stream else hub.client.chat)())
    await lost.until(lambda: any(len(job.frames) > stream for job in lost.jobs.values()))
    await lost.cut()
    reply = await asked
    assert (reply.text, reply.headers["X-Worker-Id"]) == (TEXT, other.id)
    if stream:
        roles = [c["delta"].get("role") for e in reply.events if e for c in e["choices"]]
        assert roles.count("assistant") == 1
    rows = await hub.rows(1)
    assert [(row.worker_id, row.error) for row in rows] == [(other.id, None)]


async def test_a_request_is_not_retried_again_and_again(hub: Gateway):
    """Its second worker was lost as well: whoever kills workers gets no third."""
    workers = [await hub.worker(stalls_after(), name=name) for name in "abc"]
    asked = asyncio.create_task(hub.client.chat())
    for _ in range(2):
        await hub.until(lambda: any(worker.jobs for worker in workers if worker.is_connected))
        (hit,) = [worker for worker in workers if worker.jobs and worker.is_connected]
        await hit.cut()
        await hub.until(lambda hit=hit: hub.registry.get(hit.id) is None)
    reply = await asked
    assert (reply.status, reply.code) == (502, "worker_lost")
    assert sum(worker.n_begun for worker in workers) == 2


async def test_a_worker_killed_in_mid_stream_ends_it_with_an_error(hub: Gateway):
    """After the grace, inside the stream, then [DONE]: no other could go on with it."""
    worker = await hub.worker(stalls_after("a", "b"), slots=9)
    await hub.worker(slots=1)
    asked = asyncio.create_task(hub.client.stream())
    await worker.until(lambda: any(job.seq >= 2 for job in worker.jobs.values()))
    await worker.cut()
    reply = await asked
    assert reply.text == "ab"
    assert [error["code"] for error in reply.errors] == ["worker_lost"]
    assert reply.events[-1] is None
    (row,) = await hub.rows(1)
    assert (row.error, row.worker_id) == ("worker_lost", worker.id)


async def test_a_worker_that_starts_anew_has_lost_its_requests(tmp_path: Path):
    """At once: its new epoch says so, and nobody waits for the grace."""
    async with gateway(tmp_path, replace(QUICK, grace=30.0)) as hub:
        worker = await hub.worker(stalls_after("a"))
        asked = asyncio.create_task(hub.client.stream())
        await worker.until(lambda: any(job.seq >= 1 for job in worker.jobs.values()))
        await worker.cut()
        worker.epoch, worker.jobs = "another", {}
        await worker.again()
        assert [error["code"] for error in (await asked).errors] == ["worker_lost"]


async def test_a_request_that_never_came_is_sent_again(hub: Gateway):
    """The worker is back and doesn't know it: nothing had begun."""

    async def policy(way: str, n: int, text: str) -> list[str] | None:
        is_first = "request" in text and not seen
        if way == DOWN and is_first:
            seen.append(text)
            return None
        return [text]

    seen: list[str] = []
    async with proxy(hub.url, policy) as address:
        worker = await behind(hub, policy, address)
        await hub.until_there(worker)
        reply = await hub.client.chat(X_Pendra_Worker_Id=worker.id)
        assert (reply.text, worker.n_begun) == (TEXT, 1)


async def test_a_named_worker_is_waited_for(hub: Gateway):
    """Nobody else may answer, so its client waits for it to come back."""
    worker = await hub.worker(stalls_after())
    await hub.worker()
    asked = asyncio.create_task(hub.client.chat(X_Pendra_Worker_Id=worker.id))
    await worker.until(lambda: worker.n_begun == 1)
    await worker.cut()
    await hub.until(lambda: hub.registry.get(worker.id) is None)
    for job in worker.jobs.values():
        job.frames, job.seq = [], -1
        if job.task:
            job.task.cancel()
        await says(*WORDS)(job)
    await worker.again()
    assert (await asked).text == TEXT


# --- workers that lie ---------------------------------------------------------------------------


async def raw(job: Job, *lines: str) -> None:
    for line in lines:
        await job.worker.send_text(line)
    await asyncio.Event().wait()


def numbered(job: Job, frame: dict[str, Any], n: int | None = None) -> str:
    assert job.worker.wire
    own = job.worker.wire._n_written
    job.worker.wire._n_written += 1
    return json.dumps({"n": own if n is None else n, **frame})


async def no_json(job: Job) -> None:
    await raw(job, "not JSON at all")


async def no_type(job: Job) -> None:
    await raw(job, numbered(job, {"id": job.id}))


async def a_gateways_frame(job: Job) -> None:
    await raw(job, numbered(job, {"type": "cancel", "id": job.id}))


async def a_second_hello(job: Job) -> None:
    await job.worker.send(job.worker.hello_frame())
    await asyncio.Event().wait()


async def a_gap(job: Job) -> None:
    await raw(job, numbered(job, {"type": "ping"}, n=999))


async def a_foreign_id(job: Job) -> None:
    await job.worker.send(Chunk(id="f" * 32, seq=0, data=[chunk("injected")]))
    await asyncio.Event().wait()


async def another_workers_id(job: Job) -> None:
    """Found out somehow: the streams of the honest worker are its own."""
    await job.worker.send(Chunk(id=VICTIM[0], seq=0, data=[chunk("injected")]))
    await asyncio.Event().wait()


async def a_sequence_that_jumps(job: Job) -> None:
    await job.accept()
    await job.worker.send(Chunk(id=job.id, seq=5, data=[chunk("x")]))
    await asyncio.Event().wait()


async def a_sequence_that_repeats(job: Job) -> None:
    await job.chunk(chunk("x"))
    await job.worker.send(Chunk(id=job.id, seq=0, data=[chunk("x")]))
    await asyncio.Event().wait()


async def a_choice_too_many(job: Job) -> None:
    await job.chunk(chunk("x", index=1))
    await asyncio.Event().wait()


async def an_injected_event(job: Job) -> None:
    await job.chunk({"choices": "\n\ndata: [DONE]\n\n"})
    await asyncio.Event().wait()


async def a_number_that_is_none(job: Job) -> None:
    line = numbered(job, {"type": "chunk", "id": job.id, "seq": 0, "data": [1]})
    await raw(job, line.replace("[1]", '[{"choices": [{"index": NaN, "delta": {}}]}]'))


async def a_huge_frame(job: Job) -> None:
    await raw(job, numbered(job, {"type": "ping", "x": "x" * (MAX_FRAME + 1)}))


async def a_frame_of_brackets(job: Job) -> None:
    line = numbered(job, {"type": "chunk", "id": job.id, "seq": 0, "data": [1]})
    await raw(job, line.replace("[1]", "[" + "[]," * 1_000_000 + "[]]"))


async def bytes_instead_of_text(job: Job) -> None:
    assert job.worker.socket
    await job.worker.socket.send_bytes(b"{}")
    await asyncio.Event().wait()


VICTIM: list[str] = []  # the id of the honest worker's request
LIES = [
    no_json, no_type, a_gateways_frame, a_second_hello, a_gap, a_foreign_id, another_workers_id,
    a_sequence_that_jumps, a_sequence_that_repeats, a_choice_too_many, an_injected_event,
    a_number_that_is_none, a_huge_frame, a_frame_of_brackets, bytes_instead_of_text,
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_a_worker_that_lies_is_sent_away(
    hub: Gateway, lie: Callable[[Job], Awaitable[None]], caplog: pytest.LogCaptureFixture
):
    """With a reason in the log; an honest worker's stream is untouched."""
    caplog.set_level("INFO")
    go = asyncio.Event()

    async def wait(i: int) -> None:
        if i == 2:
            await go.wait()

    honest = await hub.worker(says(*WORDS, step=wait), name="honest")
    liar = await hub.worker(lie, name="liar")
    stream = asyncio.create_task(hub.client.stream(X_Pendra_Worker_Id=honest.id))
    await honest.until(lambda: any(job.seq >= 1 for job in honest.jobs.values()))
    VICTIM[:] = list(honest.jobs)
    lied_to = asyncio.create_task(hub.client.stream(X_Pendra_Worker_Id=liar.id))
    expected = 1009 if lie is a_huge_frame else Close.BAD_FRAME
    assert await liar.closed() == expected
    await hub.until(lambda: hub.registry.get(liar.id) is None)
    go.set()
    assert (await stream).text == TEXT
    assert honest.is_connected
    reply = await lied_to
    failed = reply.errors[0]["code"] if reply.events else reply.code
    assert failed in ("worker_fault", "worker_lost")
    assert "injected" not in reply.text if reply.events else True
    reasons = [record.message for record in caplog.records if liar.id in record.message]
    assert any("[" in reason for reason in reasons)


@pytest.mark.parametrize("full", [[], [{}], [chunk("a")], "two"])
async def test_a_full_reply_that_is_none_becomes_an_error(hub: Gateway, full: Any):
    """None, an empty one, a chunk of a stream, two of them."""

    async def script(job: Job) -> None:
        await job.accept()
        if full == "two":
            await says("a")(job)
            await says("a")(job)
            return
        await job.chunk(*full)
        await job.done()

    await hub.worker(script)
    reply = await hub.client.chat()
    if full == "two":  # it was whole before the second came
        assert reply.status == 200
    else:
        assert (reply.status, reply.code) == (502, "worker_fault")


async def test_a_lie_before_the_first_word_costs_the_client_nothing(hub: Gateway):
    """Another worker answers."""
    await hub.worker(an_injected_event, name="liar", slots=9)
    other = await hub.worker(says(*WORDS), slots=1)
    reply = await hub.client.stream()
    assert (reply.text, reply.headers["X-Worker-Id"]) == (TEXT, other.id)


# --- gateways that are lost ---------------------------------------------------------------------


@contextmanager
def process(folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A gateway that can be killed, and its port."""
    command = [sys.executable, "-m", "tests.gateway.alone", str(folder), str(port)]
    running = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert running.stdout
        yield running, int(running.stdout.readline())
    finally:
        running.kill()
        running.wait()
        for pipe in (running.stdin, running.stdout):
            assert pipe
            pipe.close()


async def prepared(folder: Path) -> tuple[str, Any, str]:
    """A database with an owner's key and a worker."""
    store = await Store.open(folder / "gateway.db")
    mine = await store.add_organisation("acme")
    _, key = await store.add_key(mine.id, "owner", "owner")
    enrolled, secret = await store.add_worker(mine.id, "w")
    await store.close()
    return key, enrolled, secret


async def test_a_killed_gateway_comes_back_with_its_rows_and_its_workers(tmp_path: Path):
    """What it was at has ended as gateway_restarted; what was done is as it was."""
    key, enrolled, secret = await prepared(tmp_path)
    go = asyncio.Event()

    async def wait(i: int) -> None:
        if i == 2 and not go.is_set():
            await go.wait()

    with process(tmp_path) as (running, port):
        url = f"http://127.0.0.1:{port}"
        worker = ScriptedWorker(url, enrolled, secret, says(*WORDS))
        await worker.connect()
        client = Client(url, key)
        assert (await client.chat()).text == TEXT
        worker.script = says(*WORDS, step=wait)
        stream = asyncio.create_task(client.stream())
        await worker.until(lambda: any(job.seq >= 1 for job in worker.jobs.values()))
        await asyncio.sleep(0.05)
        running.kill()
        running.wait()
        with pytest.raises(Exception):  # noqa: B017, PT011 (however the client says so)
            await stream
    with process(tmp_path, port):
        worker.persist()
        go.set()
        async with asyncio.timeout(10):
            while (await client.chat()).status != 200:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.02)
        assert (await client.stream()).text == TEXT
    await worker.stop()
    await client.session.close()
    store = await Store.open(tmp_path / "gateway.db")
    rows, _ = await store.usage(enrolled.organisation_id)
    await store.close()
    errors = [row.error for row in rows if row.error != "no_worker"]
    assert errors == [None, None, "gateway_restarted", None]


# --- load ---------------------------------------------------------------------------------------


async def told_memory(running: subprocess.Popen[str]) -> int:
    def ask() -> int:
        assert running.stdin
        assert running.stdout
        print("?", file=running.stdin, flush=True)
        return int(running.stdout.readline())

    return await asyncio.to_thread(ask)


PER_S = 20


async def counted(client: Client, n_words: int) -> None:
    """One stream, every chunk of which is in its place."""
    async with client.post({**CHAT, "stream": True}) as got:
        assert got.status == 200
        found: list[str] = []
        while (event := await read_event(got.content)) is not None:
            assert "error" not in event, event
            found += [c["delta"].get("content") or "" for c in event["choices"]]
        assert "".join(found) == "".join(f"{i} " for i in range(n_words))


async def loaded(folder: Path, n_workers: int, n_streams: int, for_s: float) -> list[int]:
    """Streams that begin again when they have ended; memory of the gateway on the way, in bytes."""
    n_words = 5 * PER_S
    loop = asyncio.get_running_loop()

    async def script(job: Job) -> None:
        await job.accept()
        began = loop.time()
        await job.chunk(OPENING)
        for i in range(n_words):
            await asyncio.sleep(max(0.0, began + i / PER_S - loop.time()))
            await job.chunk(chunk(f"{i} "))
        await job.finish(n_words)

    store = await Store.open(folder / "gateway.db")
    mine = await store.add_organisation("acme")
    _, key = await store.add_key(mine.id, "owner", "owner")
    enrolled = [await store.add_worker(mine.id, f"w{i}") for i in range(n_workers)]
    await store.close()
    memory: list[int] = []
    with process(folder) as (running, port):
        url = f"http://127.0.0.1:{port}"
        slots = n_streams // n_workers
        workers = [ScriptedWorker(url, *one, script, slots=slots) for one in enrolled]
        for worker in workers:
            await worker.connect()
        client = Client(url, key)
        until_s = loop.time() + for_s

        async def again(i: int) -> int:
            await asyncio.sleep(5 * i / n_streams)
            n = 0
            while loop.time() < until_s:
                await counted(client, n_words)
                n += 1
            return n

        async def watch() -> None:
            while loop.time() < until_s:
                await asyncio.sleep(1.0)
                memory.append(await told_memory(running))

        *counts, _ = await asyncio.gather(*(again(i) for i in range(n_streams)), watch())
        for worker in workers:
            await worker.stop()
        await client.session.close()
        assert running.stdin
        running.stdin.close()  # it ends in order, its rows written
        await asyncio.to_thread(running.wait)
    store = await Store.open(folder / "gateway.db")
    n_rows, cursor = 0, None
    while True:
        rows, cursor = await store.usage(mine.id, cursor=cursor, limit=100)
        assert all(row.error is None and row.completion_tokens == n_words for row in rows)
        n_rows += len(rows)
        if cursor is None:
            break
    await store.close()
    assert n_rows == sum(n for n in counts if n)
    return memory


def assert_flat(memory: list[int], warm: int) -> None:
    """The last third holds no more than the first after warming up, but for a few MB."""
    later = memory[warm:]
    third = max(1, len(later) // 3)
    print("memory in MB:", [round(held / 1e6, 1) for held in memory])
    first, last = sorted(later[:third])[third // 2], sorted(later[-third:])[third // 2]
    assert last - first < 12e6, [round(held / 1e6, 1) for held in memory]


@pytest.mark.alone
async def test_two_hundred_streams_at_once_keep_their_order(tmp_path: Path):
    """20 workers, 20 chunks a second each: no error, nothing out of order, memory flat."""
    memory = await loaded(tmp_path, 20, 200, for_s=12.0)
    assert_flat(memory, warm=6)


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(600)
async def test_two_hundred_streams_for_five_minutes_keep_their_order(tmp_path: Path):
    """The same, long enough for a leak to show."""
    memory = await loaded(tmp_path, 20, 200, for_s=300.0)
    assert_flat(memory, warm=30)


def test_times_are_those_of_the_protocol():
    """What tests shorten is what users get."""
    times = Times()
    assert (times.hello, times.heartbeat, times.ping, times.silence) == (10, 20, 15, 45)
    assert (times.drain, times.grace, times.unread) == (10, 30, 30)
