"""The gateway's requests, run on the engine as those of the local API are.

Owns each request from its frame to its last: read, submitted, written into its Reply, cancelled,
remembered. Whatever goes wrong becomes an error frame of that request. Leaves what a body may say
and how a reply reads to wire/, numbers and replay to replies.py. Event loop; long bodies and long
replies are read and written by another thread.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from mlx_worker.errors import (
    Overloaded,
    RequestError,
    ShuttingDown,
    TimedOut,
    UnknownModel,
    WorkerError,
)
from mlx_worker.link.replies import Json, Reply, size_of
from mlx_worker.link.retry import Times
from mlx_worker.records import Engine, ReplyEvent, Started
from mlx_worker.wire.account import WorkerIdentity
from mlx_worker.wire.link import (
    ALREADY_DONE,
    MOST_WAIT_MS,
    DoneFrame,
    ErrorFrame,
    Held,
    Rejected,
    Request,
    TimingPart,
    UsagePart,
)
from mlx_worker.wire.openai import Asked, parse_chat, parse_completion
from mlx_worker.wire.reply import (
    ChatReply,
    ChatStream,
    CompletionReply,
    CompletionStream,
    FullReply,
    ReplyStream,
)
from mlx_worker.wire.sse import json_bytes

MOST_HELD = 1000  # requests at a time; the engine's own line is shorter
MOST_DONE = 10_000  # ids that are remembered, so that none is generated twice
SCOPES = "gateway/"  # before its scopes: none is one of this machine's own users
MOST_CHARS, MOST_PARAM_CHARS = 4000, 256

log = logging.getLogger(__name__)

Events = AsyncGenerator[Started | ReplyEvent, None]


@dataclass(frozen=True)
class Endpoint:
    parse: Callable[[bytes, str, str], Asked]
    full: type[FullReply]
    stream: type[ReplyStream]


ENDPOINTS = {
    "chat": Endpoint(parse_chat, ChatReply, ChatStream),
    "completion": Endpoint(parse_completion, CompletionReply, CompletionStream),
}


@dataclass
class Job:
    """task None: it has ended."""

    reply: Reply
    task: asyncio.Task[None] | None = None


class Jobs:
    """Requests that run, and those that ended and whose frames the gateway may still want.

    identity   who answers, as every reply says it
    hidden     models that a gateway isn't offered
    on_frame   hears of each reply that has something to send
    on_change  hears that one began or ended
    """

    def __init__(
        self,
        engine: Engine,
        identity: Callable[[], WorkerIdentity],
        times: Times,
        clock: Callable[[], float],
        on_frame: Callable[[Reply], None],
        on_change: Callable[[], None],
        hidden: Collection[str] = (),
    ) -> None:
        self.is_draining = False
        self._engine = engine
        self._identity = identity
        self._times = times
        self._clock = clock
        self._on_frame = on_frame
        self._on_change = on_change
        self._hidden = hidden
        self._jobs: dict[str, Job] = {}
        self._done: dict[str, None] = {}  # in the order in which they were forgotten

    # --- what the gateway says

    def request(self, frame: Request, is_long: bool = False) -> ErrorFrame | Rejected | None:
        """Begin it, or go on with it; the answer where it is neither.

        is_long  its body is better read by another thread
        """
        if job := self._jobs.get(frame.id):
            job.reply.attach(frame.after)
        elif frame.id in self._done:
            return already_done(frame.id, frame.after)
        elif self.is_draining:
            return rejected(frame.id, ShuttingDown())
        elif len(self._jobs) >= MOST_HELD:
            full = Overloaded(f"{MOST_HELD} requests are held already", retry_after_s=1.0)
            return rejected(frame.id, full)
        else:
            self._begin(frame, is_long)
        return None

    def cancel(self, id: str) -> None:
        """Its client has gone: nothing more of it is wanted."""
        self._forget(id)

    def received(self, id: str) -> None:
        job = self._jobs.get(id)
        if job and job.reply.end is not None:
            self._forget(id)

    # --- over connections

    @property
    def held(self) -> tuple[Held, ...]:
        return tuple(job.reply.held for job in self._jobs.values())

    def resume(self, seqs: dict[str, int]) -> list[ErrorFrame]:
        """Go on with these, from what came last; the others are cancelled.

        Returns what is to be said of those that were given up while the welcome was on its way.
        """
        for id, job in list(self._jobs.items()):
            if id in seqs:
                job.reply.attach(seqs[id])
            else:
                self._forget(id)
        return [already_done(id, seq) for id, seq in seqs.items() if id not in self._jobs]

    def give_up(self) -> None:
        """The connection didn't come back: nobody wants any of them."""
        for id in list(self._jobs):
            self._forget(id)

    def sweep(self) -> None:
        """Forget those whose end was sent, and which nobody has confirmed."""
        now_s = self._clock()
        for id, job in list(self._jobs.items()):
            ended_s = job.reply.ended_s
            if ended_s is None:
                continue
            if job.reply.is_end_due:
                job.reply.ended_s = now_s  # over a slow link the rest of it takes its time
            elif now_s - ended_s > self._times.grace:
                self._forget(id)

    def lost(self, reply: Reply) -> None:
        """What was written of it can't be sent any more, so there is no use in going on."""
        job = self._jobs.get(reply.id)
        if job and job.task:
            job.task.cancel()
        reply.ended_s = self._clock()

    async def finished(self) -> None:
        """Once none runs any more."""
        while tasks := [job.task for job in self._jobs.values() if job.task]:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task]
        self.give_up()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one request

    def _begin(self, frame: Request, is_long: bool) -> None:
        job = Job(Reply(frame.id, self._on_frame))
        self._jobs[frame.id] = job
        job.task = asyncio.create_task(self._run(frame, job, is_long))

    def _forget(self, id: str) -> None:
        job = self._jobs.pop(id, None)
        if job is None:
            return
        job.reply.close()
        if not isinstance(job.reply.end, Rejected):  # of which nothing was begun
            self._done[id] = None
            if len(self._done) > MOST_DONE:
                del self._done[next(iter(self._done))]
        if job.task:
            job.task.cancel()

    async def _run(self, frame: Request, job: Job, is_long: bool) -> None:
        """Until its last frame is there; only who cancels it gets none."""
        reply, limit_s = job.reply, _seconds(frame.deadline_ms)
        try:
            async with asyncio.timeout(limit_s):
                await self._answer(frame, reply, is_long)
        except TimeoutError:
            if limit_s is None:
                self._fail_as_bug(reply)
            else:
                self._fail(reply, _too_late(limit_s))
        except WorkerError as error:
            self._fail(reply, error)
        except Exception:
            self._fail_as_bug(reply)
        finally:
            job.task = None
            self._on_change()

    async def _answer(self, frame: Request, reply: Reply, is_long: bool) -> None:
        asked = await self._asked(frame, is_long)
        endpoint = ENDPOINTS[frame.endpoint]
        worker, now = self._identity(), int(time.time())
        async with aclosing(self._engine.submit(asked.call)) as events:
            started = await anext(events)
            reply.accept()
            self._on_change()
            if asked.call.is_streamed:
                stream = endpoint.stream(asked, now, worker)
                figures = await self._streamed(reply, stream, started, events)
            else:
                full = endpoint.full(asked, now, worker)
                figures = await self._whole(reply, full, started, events)
        reply.finish(lambda seq: done_frame(frame.id, seq, figures), self._clock())

    async def _asked(self, frame: Request, is_long: bool) -> Asked:
        read = partial(read_request, frame)
        asked = await asyncio.to_thread(read) if is_long else read()
        model = asked.call.model
        if self._hidden:
            served = [one.id for one in self._engine.models()]
            meant = served[0] if model is None and served else (model or "")
            if meant in self._hidden:
                raise UnknownModel(meant, [id for id in served if id not in self._hidden])
        return asked

    async def _streamed(
        self, reply: Reply, stream: ReplyStream, event: Started | ReplyEvent, events: Events
    ) -> Json:
        """Returns the figures of the end: usage, timing, the finish."""
        loop, coalesce_s = asyncio.get_running_loop(), self._times.coalesce
        figures: Json = {}
        while True:
            objects = stream.feed(event)
            for one in objects:
                note(figures, one)
            size = size_of(objects) if objects else 0
            if reply.add(objects, size, self._clock(), coalesce_s):
                loop.call_later(coalesce_s, lambda: reply.seal(self._clock()))
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return figures

    async def _whole(
        self, reply: Reply, full: FullReply, event: Started | ReplyEvent, events: Events
    ) -> Json:
        full.feed(event)
        async for event in events:
            full.feed(event)
        written = partial(_written, full)
        whole, size = await asyncio.to_thread(written) if full.is_large else written()
        reply.add([whole], size, self._clock(), 0.0)
        figures: Json = {}
        note(figures, whole)
        return figures

    def _fail(self, reply: Reply, error: WorkerError) -> None:
        is_begun = reply.is_accepted
        if isinstance(error, Overloaded | ShuttingDown) and not is_begun:
            reply.finish(lambda _: rejected(reply.id, error), self._clock())
        else:
            reply.finish(lambda seq: error_frame(reply.id, seq, error), self._clock())

    def _fail_as_bug(self, reply: Reply) -> None:
        log.exception("request %s of the gateway failed", reply.id)
        reply.finish(
            lambda seq: ErrorFrame(
                id=reply.id, seq=seq, code="internal_error", status=500,
                message=f"internal error; the worker's log has request {reply.id}",
            ),
            self._clock(),
        )  # fmt: skip


# --- frames ------------------------------------------------------------------------------------


def read_request(frame: Request) -> Asked:
    """Raises RequestError."""
    try:
        body = json_bytes(frame.body)
    except ValueError:
        raise RequestError("body has a number that is not finite") from None
    except RecursionError:
        raise RequestError("body is nested too deeply", hint="use fewer levels") from None
    return ENDPOINTS[frame.endpoint].parse(body, frame.id, SCOPES + frame.cache_scope)


def note(figures: Json, written: Json) -> None:
    """Keep what a reply's last frame repeats; the first choice's finish stands for the request."""
    if written.get("usage"):
        figures.update(usage=written["usage"], timing=written["pendra"]["timing"])
    for choice in written["choices"]:
        if choice["finish_reason"] and choice["index"] == 0:
            figures["finish_reason"] = choice["finish_reason"]


def done_frame(id: str, seq: int, figures: Json) -> DoneFrame:
    usage = figures["usage"]
    return DoneFrame(
        id=id,
        seq=seq,
        finish_reason=figures["finish_reason"],
        usage=UsagePart(
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            reasoning_tokens=usage["completion_tokens_details"]["reasoning_tokens"],
        ),
        timing=TimingPart(**figures["timing"]),
    )


def error_frame(id: str, seq: int, error: WorkerError) -> ErrorFrame:
    param = error.param if isinstance(error, RequestError) else None
    return ErrorFrame(
        id=id,
        seq=seq,
        code=error.code,
        message=str(error)[:MOST_CHARS],
        retryable=error.retryable,
        status=error.status,
        param=param[:MOST_PARAM_CHARS] if param else None,
        retry_after_ms=_retry_after_ms(error),
    )


def rejected(id: str, error: WorkerError) -> Rejected:
    return Rejected(
        id=id,
        code=error.code,
        message=str(error)[:MOST_CHARS],
        retry_after_ms=_retry_after_ms(error),
    )


def already_done(id: str, after: int) -> ErrorFrame:
    return ErrorFrame(
        id=id, seq=after + 1, code=ALREADY_DONE, status=409,
        message="this request was answered before, and its reply is no longer kept",
    )  # fmt: skip


def _retry_after_ms(error: WorkerError) -> int:
    if not isinstance(error, Overloaded):
        return 0
    return min(math.ceil(error.retry_after_s * 1000), MOST_WAIT_MS)


def _too_late(limit_s: float) -> TimedOut:
    error = TimedOut(limit_s)
    error.message, error.hint = f"not done after {limit_s:g} s, the gateway's limit", None
    return error


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def _written(full: FullReply) -> tuple[Json, int]:
    whole = full.finish()
    return whole, size_of([whole])
