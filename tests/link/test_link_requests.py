"""Requests over the link: answered, streamed, refused, cancelled, drained; whole and in order."""

import asyncio
from typing import Any

import pytest

from mlx_worker.errors import InvalidParameter, Overloaded, ShuttingDown
from mlx_worker.wire.link import Cancel, Received
from tests.link.switchboard import KEY, TIMES, Script, id_of, linked, switchboard, text_of, until

ONE = id_of(1)


async def test_hello_says_who_and_what_is_here():
    """The key is in the header, and nowhere in the frame."""
    async with switchboard() as board, linked(board, Script()):
        line = await board.line()
        assert line.headers["Authorization"] == f"Bearer {KEY}"
        hello = line.hello
        assert hello.worker_id == "0123456789abcdef"
        (model,) = hello.models
        assert (model.id, model.model_bytes, model.draft) == (
            "gemma-4", 5_000_000, "gemma-4-assistant",
        )  # fmt: skip
        assert "speculation.setting" in hello.capabilities
        assert "Sec-WebSocket-Extensions" not in line.headers


async def test_a_stream_is_accepted_then_written_then_done():
    """With usage and timing at its end, as in the last chunk."""
    async with switchboard() as board, linked(board, Script()):
        line = await board.welcomed()
        await line.ask(ONE)
        frames = await line.reply(ONE)
        assert frames[0].type == "accepted"
        assert text_of(frames) == "Once upon a time"
        done = frames[-1]
        assert (done.finish_reason, done.usage.completion_tokens) == ("stop", 4)
        assert done.timing.draft_acceptance_rate == 0.75
        assert done.usage.cached_tokens == 2
        last = frames[-2].data[-1]
        assert last["usage"]["total_tokens"] == 11
        assert last["pendra"]["worker"]["name"] == "Mac of Olga"


async def test_a_whole_reply_is_one_object():
    """In one chunk."""
    async with switchboard() as board, linked(board, Script()):
        line = await board.welcomed()
        await line.ask(ONE, stream=False)
        accepted, chunk, done = await line.reply(ONE)
        (whole,) = chunk.data
        assert (accepted.type, done.seq) == ("accepted", 1)
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"]["content"] == "Once upon a time"


async def test_pieces_that_come_fast_are_sent_together():
    """And the first token waits for none of them."""
    async with switchboard() as board, linked(board, Script()):
        line = await board.welcomed()
        await line.ask(ONE, "count 500")
        frames = await line.reply(ONE)
        assert text_of(frames) == "".join(f"{n} " for n in range(500))
        assert len(frames) < 60
        assert len(frames[1].data) == len(frames[2].data) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_many_requests_at_a_time_are_never_mixed(stream: bool):
    """Each gets its own text, in order."""
    engine = Script(pace=0.0005)
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        lengths = {id_of(n): 5 + n for n in range(40)}
        for id, length in lengths.items():
            await line.ask(id, f"count {length}", stream=stream)
        frames: dict[str, list[Any]] = {id: [] for id in lengths}
        n_done = 0
        while n_done < len(lengths):
            frame = await line.next("accepted", "chunk", "done")
            frames[frame.id].append(frame)
            n_done += frame.type == "done"
        for id, length in lengths.items():
            seqs = [frame.seq for frame in frames[id] if frame.type != "accepted"]
            assert seqs == list(range(len(seqs)))
            if stream:
                assert text_of(frames[id]) == "".join(f"{n} " for n in range(length))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": float("nan")}, None),
        ({"stop": ["x" * 70_000] * 5}, "stop"),
    ],
)
async def test_a_bad_body_is_the_clients_fault(body: dict[str, Any], param: str | None):
    """As the local API says it: 400 with the key at fault; the engine isn't asked."""
    engine = Script()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        frame = {"messages": [{"role": "user", "content": "hi"}], **body}
        if param is None:  # no JSON of ours could say it
            text = line.frames.write
            del text
            await raw_nan(line)
        else:
            await line.ask(ONE, **frame)
        (error,) = await line.reply(ONE)
        assert (error.type, error.status, error.param) == ("error", 400, param)
        assert error.retryable is False
        assert engine.calls == []


async def raw_nan(line: Any) -> None:
    """A body with NaN, which Python writes and JSON doesn't have."""
    n = line.frames._n_written
    line.frames._n_written += 1
    await line.socket.send_str(
        f'{{"type":"request","n":{n},"id":"{ONE}","endpoint":"chat","cache_scope":"s",'
        '"body":{"messages":[{"role":"user","content":"hi"}],"temperature":NaN}}'
    )


async def test_no_room_is_a_rejection():
    """Nothing was begun; it may be asked again under the same id."""
    engine = Script()
    engine.error = Overloaded("32 requests wait already", retry_after_s=2.5)
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        (rejected,) = await line.reply(ONE)
        assert (rejected.type, rejected.code) == ("rejected", "overloaded")
        assert rejected.retry_after_ms == 2500
        engine.error = None
        await line.ask(ONE)
        assert text_of(await line.reply(ONE)) == "Once upon a time"


async def test_a_bug_is_an_error_too(caplog: pytest.LogCaptureFixture):
    """With the id that the log has; never silence."""
    engine = Script()
    engine.late_error = ZeroDivisionError("a secret of ours")
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        frames = await line.reply(ONE)
        assert (frames[-1].code, frames[-1].status) == ("internal_error", 500)
        assert ONE in frames[-1].message
        assert "secret" not in frames[-1].message
        assert ONE in caplog.text


async def test_an_error_after_the_first_token_ends_the_stream():
    """Told as retryable where it is."""
    engine = Script()
    engine.late_error = ShuttingDown()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        frames = await line.reply(ONE)
        assert (frames[-1].type, frames[-1].code) == ("error", "shutting_down")
        assert frames[-1].retryable


async def test_a_parameter_that_only_the_engine_knows_is_refused_as_by_the_local_api():
    """With its key."""
    engine = Script()
    engine.error = InvalidParameter("max_tokens", 9, "less")
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        (error,) = await line.reply(ONE)
        assert (error.status, error.code, error.param) == (400, "invalid_parameter", "max_tokens")


async def test_a_deadline_ends_a_request():
    """It is the gateway's; the engine is left."""
    engine = Script(pace=0.01)
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE, "count 5000", deadline_ms=80)
        frames = await line.reply(ONE)
        assert (frames[-1].code, frames[-1].status) == ("timed_out", 504)
        assert engine.cancelled == [ONE]


async def test_a_cancelled_request_says_no_more():
    """And frees the engine at once; the next one is answered."""
    engine = Script()
    engine.held_from = 2
    engine.gate.clear()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        await line.next("accepted")
        await line.next("chunk")
        await line.say(Cancel(id=ONE))
        await until(lambda: engine.cancelled == [ONE])
        engine.gate.set()
        await line.ask(id_of(2))
        while (frame := await line.next("chunk", "accepted", "done")).id == ONE:
            assert frame.type == "chunk"  # on its way before the cancel was read
        assert frame.id == id_of(2)


async def test_a_request_that_ended_is_not_generated_twice():
    """Its id is remembered once the gateway has it all."""
    engine = Script()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        await line.reply(ONE)
        await line.ask(ONE)
        (error,) = await line.reply(ONE)
        assert (error.code, error.status, error.retryable) == ("already_done", 409, False)
        assert len(engine.calls) == 1


async def test_a_request_asked_twice_goes_on():
    """From the seq that the gateway has; accepted is said again."""
    engine = Script()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE)
        first = await line.reply(ONE, is_confirmed=False)
        await line.ask(ONE, after=0)
        again = await line.reply(ONE, after=0)
        assert again[0].type == "accepted"
        assert again[1:] == first[2:]
        assert len(engine.calls) == 1


async def test_received_before_the_end_is_no_end():
    """A gateway that says so too early still gets everything."""
    engine = Script(pace=0.002)
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE, "count 20")
        await line.say(Received(id=ONE))
        assert text_of(await line.reply(ONE)).endswith("19 ")


async def test_long_bodies_and_long_replies_keep_their_order():
    """Read and written beside the loop."""
    engine = Script()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed()
        await line.ask(ONE, f"long 3 300000 {'y' * 200_000}", stream=False)
        _, chunk, _ = await line.reply(ONE)
        assert len(chunk.data[0]["choices"][0]["message"]["content"]) == 900_000
        await line.ask(id_of(2), f"long 20 100000 {'y' * 200_000}")
        frames = await line.reply(id_of(2))
        assert len(text_of(frames)) == 2_000_000


async def test_a_reply_longer_than_a_frame_is_an_error():
    """Told in place of it; the link goes on."""
    engine = Script()
    async with switchboard() as board, linked(board, engine):
        line = await board.welcomed(max_frame=100_000)
        await line.ask(ONE, "long 3 50000", stream=False)
        frames = await line.reply(ONE)
        assert (frames[-1].code, frames[-1].retryable) == ("reply_lost", False)
        await line.ask(id_of(2))
        assert text_of(await line.reply(id_of(2))) == "Once upon a time"


async def test_a_hidden_model_is_not_there_for_a_gateway():
    """Neither listed nor answered with, named or not."""
    engine = Script()
    async with switchboard() as board, linked(board, engine, hidden={"gemma-4"}):
        line = await board.welcomed()
        assert line.hello.models == ()
        bodies: list[dict[str, Any]] = [{}, {"model": "gemma-4"}]
        for n, body in enumerate(bodies):
            await line.ask(id_of(n), **body)
            (error,) = await line.reply(id_of(n))
            assert (error.status, error.code) == (404, "model_not_found")


# --- the end of the worker ---------------------------------------------------------------------


async def test_draining_finishes_what_is_there_and_takes_nothing_new():
    """Told first; then what comes is rejected; then 1001."""
    engine = Script()
    engine.held_from = 2
    engine.gate.clear()
    async with switchboard() as board, linked(board, engine) as link:
        line = await board.welcomed()
        await line.ask(ONE)
        await line.next("accepted")
        link.drain()
        while (await line.next("draining", "chunk")).type != "draining":
            pass
        await line.ask(id_of(2))
        while (frame := await line.next("rejected", "chunk")).type != "rejected":
            pass
        assert (frame.id, frame.code) == (id_of(2), "shutting_down")
        engine.gate.set()
        closing = asyncio.create_task(link.close())
        while (frame := await line.next("chunk", "done")).type != "done":
            pass
        await closing
        assert await line.ended() == 1001
        assert link.shown()["state"] == "closed"
    assert len(board.dials) == 1


async def test_a_request_that_hangs_does_not_hold_up_the_end():
    """For longer than the last frames may take."""
    engine = Script()
    engine.gate.clear()
    async with switchboard() as board, linked(board, engine) as link:
        line = await board.welcomed()
        await line.ask(ONE)
        await line.next("accepted")
        async with asyncio.timeout(TIMES.flush + 2):
            await link.close()
        assert engine.cancelled == [ONE]
