"""The link when things fail: dials refused, lines cut, peers that are silent, slow or wrong."""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from mlx_worker.config import GatewaySection
from mlx_worker.errors import Overloaded
from mlx_worker.link.client import Link
from mlx_worker.link.replies import Reply, size_of
from mlx_worker.link.retry import Delays, Times
from mlx_worker.wire.link import (
    Close,
    ErrorFrame,
    Ping,
    PlatformFrame,
    Received,
    SettingsFrame,
)
from tests.link.switchboard import (
    KEY,
    MS,
    TIMES,
    Line,
    Script,
    id_of,
    linked,
    switchboard,
    text_of,
    until,
)

ONE = id_of(1)
N = 8
WHOLE = "".join(f"{n} " for n in range(N))
EACH = replace(TIMES, coalesce=0.0)  # a chunk for each piece


class Clock:
    """The day's clock, which a test moves; and the loop's."""

    def __init__(self) -> None:
        self.wall_s = 1_000_000.0

    def wall(self) -> float:
        return self.wall_s


# --- one scenario ------------------------------------------------------------------------------


async def test_refused_then_dropped_then_slow_then_fatal(caplog: pytest.LogCaptureFixture):
    """Each is answered with its own wait; the state says which; no log has the key."""
    said: list[str] = []
    async with switchboard() as board:
        board.answers = [
            lambda _: web.Response(status=503),
            lambda _: None,
            lambda _: web.Response(status=429),
            lambda _: None,
            lambda _: None,
        ]
        times = replace(TIMES, refused=60.0, slow_down=150 * MS)
        async with linked(board, Script(), times=times, say=said.append) as link:
            line = await board.welcomed()  # the second dial
            await until(lambda: link.shown()["state"] == "connected")
            line.cut()
            line = await board.welcomed()  # the fourth, after the third was told to slow down
            assert board.dials[3] - board.dials[2] >= 150 * MS
            await line.socket.close(code=Close.KEY_REFUSED)
            await until(lambda: link.shown()["state"] == "key rejected")
            await asyncio.sleep(100 * MS)
            assert len(board.dials) == 4
    assert said == [
        f"gateway: {board.url[5:].partition('/')[0]}: the gateway answered with status 503; "
        "it is tried again and again, and the local API goes on",
        f"gateway: connected to {board.url[5:].partition('/')[0]} as Mac of Olga of default",
        f"gateway: key rejected by {board.url[5:].partition('/')[0]}: the gateway doesn't know "
        "this key; the local API goes on",
    ]
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("status", "state"), [(401, "key rejected"), (403, "key rejected"), (426, "update needed")]
)
async def test_a_refused_handshake_is_shown_and_not_repeated_soon(status: int, state: str):
    """Whoever started the worker is told once, and it goes on trying."""
    said: list[str] = []
    async with switchboard() as board:
        board.answers = [lambda _: web.Response(status=status)] * 3
        async with linked(board, Script(), say=said.append) as link:
            await until(lambda: link.shown()["state"] == state)
            assert link.shown()["why"]
            await board.welcomed()
            gaps = [b - a for a, b in zip(board.dials, board.dials[1:], strict=False)]
            assert all(gap >= TIMES.refused for gap in gaps)
            await until(lambda: link.shown()["state"] == "connected")
            assert len(said) == 2


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (Close.KEY_REFUSED, "key rejected"),
        (Close.DISABLED, "key rejected"),
        (Close.REPLACED, "replaced"),
        (Close.UPDATE_NEEDED, "update needed"),
        (Close.SLOW_DOWN, "slow down"),
        (Close.GOING_AWAY, "waiting"),
        (Close.BAD_FRAME, "waiting"),
        (1011, "waiting"),
    ],
)
async def test_a_close_code_says_when_to_come_again(code: int, state: str):
    """At once where that may help, after minutes where it can't."""
    times = replace(TIMES, refused=200 * MS, slow_down=200 * MS)
    async with switchboard() as board, linked(board, Script(), times=times) as link:
        line = await board.welcomed()
        closed_s = asyncio.get_running_loop().time()
        closing = asyncio.create_task(line.socket.close(code=code))
        await until(lambda: link.shown()["state"] == state)
        await board.line()
        waited_s = board.dials[-1] - closed_s
        assert (waited_s >= 190 * MS) is (state != "waiting")
        await closing


async def test_a_redirect_is_not_followed():
    """It would take the key elsewhere."""
    reached: list[str] = []
    async with switchboard() as board, switchboard() as other:
        other.answers = [lambda request: reached.append(str(request.headers)) or web.Response()]
        to = other.url.replace("ws://", "http://")
        board.answers = [lambda _: web.Response(status=307, headers={"Location": to})]
        async with linked(board, Script(), times=replace(TIMES, refused=60.0)) as link:
            await until(lambda: link.shown()["state"] == "redirected")
            assert "isn't followed" in link.shown()["why"]
    assert reached == []


async def test_nobody_there_is_waited_for():
    """And found once it is; nothing raises."""
    async with switchboard() as board:
        url = board.url
    gateway = GatewaySection(url=url, key=SecretStr(KEY))
    link = Link(Script(), gateway, times=TIMES)
    link.start()
    await until(lambda: link.shown()["state"] == "waiting")
    assert "can't be reached" in link.shown()["why"]
    assert link.shown()["url"] == url[5:].partition("/")[0]
    await link.close()


async def test_whoever_starts_a_worker_hears_that_nobody_is_there():
    """Once, with where, why and what goes on; there may be a wrong port in the url."""
    async with switchboard() as board:
        url = board.url
    said: list[str] = []
    gateway = GatewaySection(url=url, key=SecretStr(KEY))
    link = Link(Script(), gateway, say=said.append, times=replace(TIMES, first=0.01, most=0.01))
    link.start()
    await until(lambda: bool(said))
    await asyncio.sleep(0.2)
    await link.close()
    [line] = said
    assert line.startswith(f"gateway: {url[5:].partition('/')[0]}: the gateway can't be reached: ")
    assert line.endswith("; it is tried again and again, and the local API goes on")


# --- lines that are cut ------------------------------------------------------------------------


async def read_n(line: Line, n: int) -> tuple[list[Any], int]:
    """n frames of the reply, and the seq of the last that has one."""
    frames = [await line.next("accepted", "chunk", "done") for _ in range(n)]
    return frames, max((frame.seq for frame in frames if frame.type != "accepted"), default=-1)


STREAMED, WHOLE_ONE = N + 4, 3  # frames: accepted, the opening, pieces, the last chunk, done
CUTS = [(n, True) for n in range(STREAMED + 1)] + [(n, False) for n in range(WHOLE_ONE + 1)]


@pytest.mark.parametrize(("n_read", "stream"), CUTS)
async def test_a_stream_that_is_cut_at_any_frame_goes_on(n_read: int, stream: bool):
    """Joined, it is the same; nothing is generated twice, lost or doubled."""
    n_frames = STREAMED if stream else WHOLE_ONE
    engine = Script()
    async with switchboard() as board, linked(board, engine, times=EACH):
        line = await board.welcomed()
        await line.ask(ONE, f"count {N}", stream=stream)
        before, seq = await read_n(line, n_read)
        line.cut()
        line = await board.line()
        # Accepted or not, it is listed; unless the request itself was still on its way.
        if ONE in {held.id for held in line.hello.resume}:
            await line.welcome({ONE: seq})
            after = await line.reply(ONE, seq) if seq < n_frames - 2 else []
        else:
            assert n_read == 0
            await line.welcome()
            await line.ask(ONE, f"count {N}", stream=stream)
            after = await line.reply(ONE)
        frames = [*before, *after]
        seqs = [frame.seq for frame in frames if frame.type != "accepted"]
        assert seqs == list(range(n_frames - 1))
        if stream:
            assert text_of(frames) == WHOLE
        else:
            (chunk,) = [frame for frame in frames if frame.type == "chunk"]
            assert chunk.data[0]["choices"][0]["message"]["content"] == WHOLE
        assert len(engine.calls) == 1


async def test_a_stream_goes_on_while_nobody_listens():
    """The engine isn't held up, and all of it comes later."""
    engine = Script(pace=0.002)
    async with switchboard() as board:
        async with linked(board, engine, times=replace(EACH, first=300 * MS, most=300 * MS)):
            line = await board.welcomed()
            await line.ask(ONE, f"count {N}")
            _, seq = await read_n(line, 3)
            line.cut()
            await until(lambda: engine.n_running == 0)
            assert engine.cancelled == []
            line = await board.welcomed({ONE: seq})
            assert text_of(await line.reply(ONE, seq)) == WHOLE[2 * seq :]


async def test_requests_that_wait_to_be_resumed_are_not_kept_waiting_by_the_back_off():
    """However often the line was cut before."""
    engine = Script()
    engine.held_from = 2
    engine.gate.clear()
    times = replace(TIMES, first=3600.0, most=3600.0, grace=1.2)
    async with switchboard() as board, linked(board, engine, times=times):
        line = await board.welcomed()
        await line.ask(ONE)
        _, seq = await read_n(line, 3)
        for _ in range(5):
            line.cut()
            line = await board.welcomed({ONE: seq})
        engine.gate.set()
        assert text_of(await line.reply(ONE, seq)) == "upon a time"


async def test_what_the_gateway_does_not_resume_is_cancelled():
    """It was restarted, or has given up."""
    engine = Script()
    engine.gate.clear()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        await line.next("accepted")
        line.cut()
        line = await board.welcomed()
        await until(lambda: engine.cancelled == [ONE])
        await line.ask(ONE)
        (error,) = await line.reply(ONE)
        assert error.code == "already_done"


async def test_requests_are_given_up_when_the_gateway_stays_away():
    """After the grace; the next hello lists none."""
    engine = Script()
    engine.gate.clear()
    times = replace(TIMES, grace=100 * MS)
    async with switchboard() as board, linked(board, engine, times=times):
        line = await board.welcomed()
        await line.ask(ONE)
        await line.next("accepted")
        board.answers = [lambda _: web.Response(status=503)] * 1000
        line.cut()
        await until(lambda: engine.cancelled == [ONE])
        board.answers = []
        line = await board.line()
        assert line.hello.resume == ()


async def test_a_rejection_that_was_lost_is_said_again():
    """It is held like any other end."""
    engine = Script()
    engine.error = Overloaded("full", retry_after_s=1)
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        await line.next("rejected")
        line.cut()
        line = await board.line()
        assert [held.id for held in line.hello.resume] == [ONE]
        await line.welcome({ONE: -1})
        assert (await line.next("rejected")).id == ONE


async def test_an_end_that_nobody_confirms_is_forgotten():
    """After the grace, and still not generated again."""
    engine = Script()
    async with switchboard() as board, linked(board, engine, times=replace(TIMES, grace=60 * MS)):
        line = await board.welcomed()
        await line.ask(ONE)
        await line.reply(ONE, is_confirmed=False)
        await asyncio.sleep(120 * MS)
        await line.ask(ONE)
        (error,) = await line.reply(ONE)
        assert error.code == "already_done"


async def test_an_end_that_is_still_to_be_sent_is_not_forgotten():
    """A slow line takes longer for the rest of a reply than the grace is."""
    engine = Script()
    async with switchboard() as board, linked(board, engine, times=replace(TIMES, grace=60 * MS)):
        line = await board.welcomed()
        line.is_listening.clear()
        await line.ask(ONE, f"long 200 {60_000}")
        await until(lambda: engine.n_running == 0 and len(engine.calls) == 1)
        await asyncio.sleep(200 * MS)
        line.is_listening.set()
        frames = await line.reply(ONE)
        assert frames[-1].type in ("done", "error")


async def test_many_cuts_at_any_time_lose_nothing():
    """A seeded run: eight streams, a line that is cut every few ms."""
    chance = random.Random(7)
    engine = Script(pace=0.002)
    async with switchboard() as board, linked(board, engine):
        wanted = {id_of(n): 30 + 7 * n for n in range(8)}
        got: dict[str, list[Any]] = {id: [] for id in wanted}
        ended: set[str] = set()
        line, is_first = await board.line(), True
        while len(ended) < len(wanted):
            held = {one.id for one in line.hello.resume}
            seqs = {id: len(got[id]) - 1 for id in held if id in wanted and id not in ended}
            await line.welcome(seqs)
            for id, length in wanted.items():
                if id not in ended and id not in held:
                    assert not got[id]
                    await line.ask(id, f"count {length}")
            for _ in range(chance.randint(1, 60)):
                if len(ended) == len(wanted):
                    break
                frame = await line.next("accepted", "chunk", "done")
                if frame.type == "accepted":
                    continue
                assert frame.seq == len(got[frame.id])
                got[frame.id].append(frame)
                if frame.type == "done":
                    ended.add(frame.id)
                    await line.say(Received(id=frame.id))
            if len(ended) < len(wanted):
                line.cut()
                line = await board.line()
                is_first = False
        assert not is_first
        for id, length in wanted.items():
            assert text_of(got[id]) == "".join(f"{n} " for n in range(length))
        assert len(engine.calls) == len(wanted)


# --- frames that are swallowed, doubled or wrong -------------------------------------------------


async def test_a_frame_that_comes_twice_is_read_once():
    """As from a proxy that repeats."""
    engine = Script()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        text = line.frames.write(Ping())
        for _ in range(3):
            await line.socket.send_str(text)
        await line.next("pong")
        await line.ask(ONE)
        assert text_of(await line.reply(ONE)) == "Once upon a time"
        assert line.came.empty()


async def test_a_frame_that_is_swallowed_ends_the_line_and_the_request_goes_on():
    """It is found by the next one's number."""
    engine = Script()
    engine.held_from = 2
    engine.gate.clear()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        _, seq = await read_n(line, 3)
        line.frames.write(Ping())  # never sent
        await line.say(Ping())
        assert await line.ended() == Close.BAD_FRAME
        line = await board.welcomed({ONE: seq})
        engine.gate.set()
        assert text_of(await line.reply(ONE, seq)) == "upon a time"


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"n": 1}',
        '{"type": "hello", "n": 1}',
        '{"type": "chunk", "n": 1, "id": "x", "seq": 0, "data": []}',
        '{"type": "cancel", "n": 1, "id": "../../etc"}',
        '{"type": "welcome", "n": 1, "name": "again"}',
        '{"type": "request", "n": 1, "id": "' + ONE + '", "endpoint": "chat", "body": []}',
    ],
)
async def test_a_gateway_that_says_nonsense_is_left_and_dialled_again(text: str):
    """With a reason; what it said is not repeated."""
    async with switchboard() as board, linked(board, Script()) as link:
        line = await board.welcomed()
        await line.socket.send_str(text)
        assert await line.ended() == Close.BAD_FRAME
        await board.welcomed()
        await until(lambda: link.shown()["state"] == "connected")


async def test_binary_and_huge_frames_end_the_line():
    """Nothing of them is kept."""
    async with switchboard() as board, linked(board, Script()):
        line = await board.welcomed()
        await line.socket.send_bytes(b"x")
        assert await line.ended() == Close.BAD_FRAME
        line = await board.welcomed()
        with suppress(ConnectionError):
            await line.socket.send_str("x" * (17 * 1024**2))
        assert await line.ended() in (1009, None, 1006)
        line = await board.welcomed()
        await line.ask(ONE)
        assert text_of(await line.reply(ONE)) == "Once upon a time"


async def test_a_gateway_that_never_welcomes_is_left():
    """After the time for it."""
    times = replace(TIMES, hello=50 * MS)
    async with switchboard() as board, linked(board, Script(), times=times) as link:
        await board.line()
        await board.line()
        await until(lambda: "no welcome" in link.shown()["why"])


async def test_something_else_than_a_welcome_is_none():
    async with switchboard() as board, linked(board, Script()):
        line = await board.line()
        await line.say(Ping())
        assert await line.ended() == Close.BAD_FRAME


# --- peers that are silent or slow ---------------------------------------------------------------


async def test_a_silent_gateway_is_dead():
    """Although its WebSocket answers, as a proxy's would."""
    times = replace(TIMES, ping=20 * MS, silence=100 * MS)
    async with switchboard() as board, linked(board, Script(), times=times) as link:
        line = await board.welcomed()
        await line.next("ping")
        await board.line()
        assert "nothing came" in link.shown()["why"]


async def test_a_gateway_that_answers_pings_stays():
    """And its own are answered."""
    times = replace(TIMES, ping=20 * MS, silence=200 * MS)
    async with switchboard() as board, linked(board, Script(), times=times):
        line = await board.welcomed()
        for _ in range(20):
            await line.next("ping")
            await line.say(Ping())
            await line.next("pong")
        assert len(board.dials) == 1


async def test_a_gateway_that_does_not_read_is_dropped():
    """It holds up neither the engine nor other requests."""
    engine = Script()
    times = replace(TIMES, drain=100 * MS)
    async with switchboard() as board, linked(board, engine, times=times):
        line = await board.welcomed()
        line.is_listening.clear()
        for n in range(12):
            await line.ask(id_of(n), "long 30 100000")
        await until(lambda: engine.n_running == 0 and len(engine.calls) == 12)
        line = await board.line()
        assert len(line.hello.resume) == 12


async def test_the_machine_slept_and_dials_at_once():
    """The wall clock is ahead of the loop's: the socket says open, and is long dead."""
    day = Clock()
    async with switchboard() as board, linked(board, Script(), wall=day.wall):
        await board.welcomed()
        day.wall_s += 9
        await asyncio.sleep(50 * MS)
        assert len(board.dials) == 1
        day.wall_s += 3600
        await board.welcomed()
        day.wall_s -= 7200  # set back: nobody slept
        await asyncio.sleep(50 * MS)
        assert len(board.dials) == 2


async def test_sleep_ends_a_long_wait():
    """Whatever was refused before, it is tried when the machine wakes."""
    day = Clock()
    times = replace(TIMES, refused=3600.0)
    async with switchboard() as board:
        board.answers = [lambda _: web.Response(status=401)]
        async with linked(board, Script(), times=times, wall=day.wall) as link:
            await until(lambda: link.shown()["state"] == "key rejected")
            day.wall_s += 60
            await board.line()


async def test_a_request_outlives_a_clock_that_jumps():
    """Resumed on the next line."""
    day, engine = Clock(), Script()
    engine.held_from = 2
    engine.gate.clear()
    async with switchboard() as board, linked(board, engine, wall=day.wall):
        line = await board.welcomed()
        await line.ask(ONE)
        _, seq = await read_n(line, 3)
        day.wall_s += 86_400
        line = await board.welcomed({ONE: seq})
        engine.gate.set()
        assert text_of(await line.reply(ONE, seq)) == "upon a time"


# --- status, settings, platform ------------------------------------------------------------------


async def test_status_comes_on_change_and_every_heartbeat():
    """The latest holds: what has changed twice meanwhile is told once."""
    engine = Script()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed(heartbeat_s=0.05)
        await until(lambda: len(line.statuses) >= 3)
        engine.n_waiting = 4
        await until(lambda: line.statuses[-1].queue.waiting == 4)
        engine.facts[0]["is_loaded"] = False
        await until(lambda: not line.statuses[-1].models[0].is_loaded)
        assert line.statuses[-1].memory.active_bytes == 5


async def test_without_a_change_status_waits_for_the_heartbeat():
    async with switchboard() as board, linked(board, Script()):
        line = await board.welcomed(heartbeat_s=60.0)
        await until(lambda: len(line.statuses) == 1)
        await asyncio.sleep(60 * MS)
        assert len(line.statuses) == 1


async def test_settings_are_kept_acknowledged_and_reported():
    """An older revision is answered with what is in force."""
    engine = Script()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.say(SettingsFrame(revision=5, speculative_decoding="off"))
        ack = await line.next("settings_ack")
        assert (ack.revision, ack.settings.speculative_decoding, ack.problem) == (5, "off", None)
        await line.say(SettingsFrame(revision=4, speculative_decoding="auto"))
        ack = await line.next("settings_ack")
        assert (ack.revision, ack.settings.speculative_decoding) == (5, "off")
        await until(lambda: line.statuses[-1].settings_revision == 5)
        line.cut()
        line = await board.line()
        assert line.hello.settings_revision == 5
        assert line.hello.settings is not None
        assert line.hello.settings.speculative_decoding == "off"


async def test_settings_that_can_not_be_kept_are_said_to_be_so():
    """With why; it counts as off, and nothing is written over."""
    engine = Script()
    engine.problem = "policies.json: can't be read"
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        assert line.hello.settings_problem == engine.problem
        await line.say(SettingsFrame(revision=2, kv_prefix_cache=False))
        ack = await line.next("settings_ack")
        assert ack.problem
        assert ack.problem.startswith("policies.json: can't be read")
        assert ack.settings.kv_prefix_cache is True


async def test_the_platform_is_obeyed_from_welcome_and_frame():
    """And its revision is reported."""
    engine = Script()
    async with switchboard() as board, linked(board, engine):
        platform = {"revision": 3, "speculative_decoding": "off", "display_name": "Acme"}
        line = await board.welcomed(platform=platform)
        await until(lambda: engine.platform.speculative_decoding == "off")
        assert engine.platform.display_name == "Acme"
        await line.say(PlatformFrame(revision=4, speculative_decoding="unavailable"))
        await until(lambda: line.statuses[-1].platform_revision == 4)
        assert engine.platform.speculative_decoding == "unavailable"


# --- the parts ---------------------------------------------------------------------------------


def test_delays_grow_to_a_minute_with_full_jitter_and_begin_anew_after_health():
    delays = Delays(Times(), random.Random(3))
    most = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    found = [[delays_of(seed)[n] for seed in range(200)] for n in range(len(most))]
    for limit, each in zip(most, found, strict=True):
        assert max(each) <= limit
        assert max(each) > 0.9 * limit
        assert min(each) < 0.1 * limit
    for _ in range(8):
        delays.next_s()
    delays.lasted(59.0)
    assert delays._most == 60
    delays.lasted(60.0)
    assert delays.next_s() <= 1


def delays_of(seed: int) -> list[float]:
    delays = Delays(Times(), random.Random(seed))
    return [delays.next_s() for _ in range(9)]


def filled(n: int, size: int = 1000, kept: int = 4000) -> Reply:
    reply = Reply(ONE, max_kept_bytes=kept)
    for _ in range(n):
        reply.add([{"x": "y" * size}], size, 0.0, 0.0)
    return reply


def test_what_was_sent_is_kept_up_to_a_bound():
    """A resume within it goes on; one before it gets an error that is no reason to retry."""
    reply = filled(10)
    assert reply.held.seq == 9
    reply.attach(6)
    taken = [reply.take() for _ in range(4)]
    assert [found and found[0].seq for found in taken] == [7, 8, 9, None]  # type: ignore[union-attr]
    reply.attach(2)
    found = reply.take()
    assert found is not None
    error = found[0]
    assert isinstance(error, ErrorFrame)
    assert (error.seq, error.retryable, error.code) == (3, False, "reply_lost")
    assert reply.take() is None


def test_a_reply_that_was_lost_stays_lost():
    """Its error is said again to whoever asks, and nothing is added."""
    reply = filled(10)
    reply.attach(-1)
    assert reply.take() is not None
    assert not reply.add([{"x": 1}], 5, 1.0, 0.0)
    reply.attach(-1)
    found = reply.take()
    assert found is not None
    assert found[0].type == "error"


def test_a_gateway_that_claims_more_than_there_was_gets_the_end():
    reply = filled(2)
    reply.attach(50)
    assert reply.take() is None
    reply.add([{"x": 1}], 5, 1.0, 0.0)
    found = reply.take()
    assert found is not None
    assert found[0].seq == 2  # type: ignore[union-attr]


def test_sizes_are_of_what_is_sent():
    assert size_of([{"a": "é"}]) == len('[{"a":"é"}]'.encode())
