"""POST /v1/chat/completions and /v1/completions: a client's request, answered by some worker.

Owns the way of one request: checked, given to a worker, to another where that is no harm, answered
or failed, written to the usage. Leaves the choice of a worker to routing.py, what comes from it to
order.py, and whether that can be a reply to wire/relay.py. Event loop.

A client that goes away cancels its handler, which cancels the request at the worker.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from string import punctuation
from time import perf_counter
from typing import Any
from urllib.parse import quote

from aiohttp import web

from mlx_worker.errors import NotConnected, Overloaded, UnknownModel, WorkerError, shown
from mlx_worker.gateway.accounts import CLIENT_GONE, Row
from mlx_worker.gateway.auth import Caller
from mlx_worker.gateway.connected import Connected
from mlx_worker.gateway.desk import Desk
from mlx_worker.gateway.keys import CALLER
from mlx_worker.gateway.order import CLIENT_SLOW, Broken, Interrupted, News, Order, Pieces
from mlx_worker.gateway.registry import Registry
from mlx_worker.gateway.routing import Routing, conversation_of, with_model
from mlx_worker.gateway.store import Store
from mlx_worker.http.keys import REQUEST_ID
from mlx_worker.http.replies import Refusal, error_reply, json_reply
from mlx_worker.http.stream import STREAM_HEADERS, uploaded
from mlx_worker.wire.account import WorkerIdentity
from mlx_worker.wire.body import read_json
from mlx_worker.wire.failure import error_type
from mlx_worker.wire.link import MAX_FRAME, DoneFrame, ErrorFrame, Rejected, Request
from mlx_worker.wire.openai import Asked, parse_chat, parse_completion
from mlx_worker.wire.relay import (
    BAD_GATEWAY,
    Endpoint,
    Relay,
    Stamp,
    error_of,
    server_timing,
    waited,
)
from mlx_worker.wire.sse import DONE, json_bytes, json_bytes_by_pieces, sse_event

MAX_BODY_BYTES = MAX_FRAME - 64 * 1024  # with what stands around it, it is one frame
LONG_BODY_BYTES = 64 * 1024  # shorter ones are read in a few ms
MAY_GROW_BYTES = MAX_BODY_BYTES // 8  # a longer one may be, written again, longer than it was
PIN = "X-Pendra-Worker-Id"
RETRY_S = 5.0  # after which a client may ask again where nobody could answer
ELSEWHERE = frozenset({"shutting_down", "engine_died", "overloaded"})  # errors of one worker alone
PARSERS: dict[Endpoint, Callable[[bytes, str, str], Asked]] = {
    "chat": parse_chat,
    "completion": parse_completion,
}


@dataclass(frozen=True)
class Failure:
    """How a request failed, as its client is told."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    def reply(self, headers: dict[str, str]) -> web.Response:
        if self.retry_after_s is not None:
            headers = headers | {"Retry-After": str(max(1, round(self.retry_after_s)))}
        return error_reply(self.status, self.code, self.message, param=self.param, headers=headers)

    def event(self) -> bytes:
        """The same inside a stream."""
        kind = error_type(self.status)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return sse_event({"error": error})


class Exchange:
    """Where clients' requests meet workers."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self.store = store
        self.registry = registry
        self.routing = Routing()

    @property
    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", partial(self.handle, "chat")),
            web.post("/v1/completions", partial(self.handle, "completion")),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{id:.+}", self.one_model),
        ]

    async def handle(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        """Raises what is the client's fault, or nobody could do, before anything is sent."""
        began = perf_counter()
        caller = request[CALLER]
        organisation_id = caller.require("inference")
        if self.registry.is_draining:
            raise going()
        asked, body = await _asked(request, endpoint, scope_of(caller))
        row = self._row(request, endpoint, asked)
        visit = Visit(self, request, endpoint, asked, body, organisation_id, row, began)
        try:
            return await visit.answer()
        except (WorkerError, Refusal) as error:
            row.end(error=error.code, **visit.by)
            raise
        except (asyncio.CancelledError, ConnectionError):
            row.end(error=CLIENT_GONE, **visit.by)
            raise
        finally:
            row.end(error="internal_error", **visit.by)
            visit.leave()

    def _row(self, request: web.Request, endpoint: Endpoint, asked: Asked) -> Row:
        key = request[CALLER].key
        organisation_id = key.organisation_id or ""
        return Row(
            self.store,
            self.registry.begin,
            lambda: self.registry.tell(organisation_id, usage=True),
            request_id=request[REQUEST_ID],
            organisation_id=organisation_id,
            key_id=key.id,
            key_name=key.name,
            model=(asked.call.model or "")[:256],
            endpoint=endpoint,
            is_streamed=asked.call.is_streamed,
        )

    # --- who could answer

    async def pinned(self, organisation_id: str, worker_id: str) -> Connected:
        """Raises Refusal for a worker that is none of the organisation's, NotConnected."""
        known = await self.store.worker(organisation_id, worker_id)
        if known is None:
            what = f"{PIN}: {shown(worker_id)}, there is none"
            raise Refusal(404, "worker_not_found", f"{what}. hint: GET /api/v1/workers has ids")
        one = self.registry.get(worker_id)
        if one is None or one.is_draining:
            raise NotConnected(known.name)
        return one

    async def nobody(self, organisation_id: str, model: str | None) -> WorkerError | Refusal:
        """Why no worker that is connected can be asked."""
        there = self.registry.all(organisation_id)
        served = {id for one in there for id in one.models}
        if there and model is not None and model not in served:
            await self.registry.keep()
            enrolled = await self.store.workers(organisation_id)
            away = {line.id for one in enrolled for line in one.report.models}
            if model not in away:
                return UnknownModel(model, sorted(served))
        what = "no worker" if model is None else "no worker that has this model"
        return no_worker(f"{what} is connected. hint: start one, or try again once it is back")

    # --- models

    async def models(self, request: web.Request) -> web.Response:
        return json_reply({"object": "list", "data": list(self._models(request).values())})

    async def one_model(self, request: web.Request) -> web.Response:
        """Raises UnknownModel."""
        found, wanted = self._models(request), request.match_info["id"]
        if wanted not in found:
            raise UnknownModel(wanted, found)
        return json_reply(found[wanted])

    def _models(self, request: web.Request) -> dict[str, dict[str, Any]]:
        organisation_id = request[CALLER].require("inference")
        found: dict[str, dict[str, Any]] = {}
        for one in self.registry.all(organisation_id):
            for model in one.report.models:
                pendra = {
                    "context_tokens": model.context_tokens,
                    "draft": model.draft,
                    "is_loaded": model.is_loaded,
                }
                entry = {"id": model.id, "object": "model", "created": int(one.worker.created_s)}
                found.setdefault(model.id, {**entry, "owned_by": "mlx-worker", "pendra": pendra})
        return dict(sorted(found.items()))


class Visit:
    """One request of a client, until it is answered.

    body   the JSON object that it sent
    began  perf_counter when it came
    Next: leave, whatever happened.
    """

    def __init__(
        self,
        exchange: Exchange,
        request: web.Request,
        endpoint: Endpoint,
        asked: Asked,
        body: dict[str, Any],
        organisation_id: str,
        row: Row,
        began: float,
    ) -> None:
        self._exchange = exchange
        self._registry = exchange.registry
        self._request = request
        self._endpoint: Endpoint = endpoint
        self._asked = asked
        self._body = body
        self._organisation_id = organisation_id
        self._row = row
        self._began = began
        self._created = int(time.time())
        self._conversation = conversation_of(asked)
        self._pin = request.headers.get(PIN)
        self._is_retried = False
        self._refused: dict[str, Rejected] = {}
        self._one: Connected | None = None
        self._desk: Desk | None = None
        self._order: Order | None = None
        self._model = ""
        self._wait_ms = 0.0

    @property
    def by(self) -> dict[str, str]:
        """Who has it, and the model that answers where none was named, as the usage says it."""
        if self._one is None:
            return {}
        worker = self._one.worker
        return {"worker_id": worker.id, "worker_name": worker.name, "model": self._model[:256]}

    async def answer(self) -> web.StreamResponse:
        self._give(await self._first_worker())
        news = await self._settled()
        await self._row.begun()
        if not self._asked.call.is_streamed:
            return await self._whole(news)
        return await self._streamed(news)

    def leave(self) -> None:
        """The worker need not go on."""
        if self._order is not None and self._desk is not None:
            self._registry.release(self._desk, self._order)

    # --- to a worker

    async def _first_worker(self) -> Connected:
        model = self._asked.call.model
        if self._pin is not None:
            one = await self._exchange.pinned(self._organisation_id, self._pin)
            if model is not None and model not in one.models:
                raise UnknownModel(model, one.models)
            if not one.models:
                raise no_worker(f"{one.worker.name} has no model")
            return one
        found = self._another()
        if found is None:
            raise await self._exchange.nobody(self._organisation_id, model)
        return found

    def _another(self, without: str | None = None) -> Connected | None:
        """The best that hasn't refused it."""
        passed = {*self._refused, *([without] if without else ())}
        there = self._registry.all(self._organisation_id)
        fit = with_model(there, self._asked.call.model, passed)
        return self._exchange.routing.choose(fit, self._conversation)

    def _give(self, one: Connected) -> None:
        self.leave()
        self._one, self._desk = one, one.desk
        self._wait_ms = 1000 * (perf_counter() - self._began)
        self._order = self._order_for(one)
        one.given_s = self._began
        one.desk.open(self._order)
        self._exchange.routing.settle(self._conversation, one.worker.id)

    def _order_for(self, one: Connected) -> Order:
        call = self._asked.call
        self._model = model = call.model or one.models[0]
        stamp = Stamp(
            self._endpoint,
            self._request[REQUEST_ID],
            model,
            WorkerIdentity(one.worker.id, one.worker.name, one.report.version),
            call.n,
            self._created,
            self._wait_ms,
        )
        frame = Request(
            id=secrets.token_hex(16),
            endpoint=self._endpoint,
            body={**self._body, "model": model},
            cache_scope=call.scope,
        )
        relay = Relay(stamp, is_streamed=call.is_streamed)
        return Order(frame, relay, is_streamed=call.is_streamed)

    async def _settled(self) -> News:
        """The first news that is the client's to know; until then others may be asked."""
        while True:
            assert self._order is not None
            news = await self._order.next()
            other = self._elsewhere(news)
            if other is not None:
                self._give(other)
            elif not isinstance(news, Interrupted):
                return news

    def _elsewhere(self, news: News) -> Connected | None:
        """Who is to have it instead; None: nobody."""
        assert self._one is not None
        assert self._order is not None
        if self._pin is not None or self._order.has_said:
            return None
        id = self._one.worker.id
        match news:
            case Rejected():
                self._refused[id] = news
                return self._another()
            case Interrupted() if self._registry.get(id) is not None:
                return None  # it is back already
            case ErrorFrame() if not (news.retryable and news.code in ELSEWHERE):
                return None
            case Interrupted() | Broken() | ErrorFrame():
                return self._once_more(self._another(without=id))
            case _:
                return None

    def _once_more(self, other: Connected | None) -> Connected | None:
        if other is None or self._is_retried:
            return None
        self._is_retried = True
        return other

    # --- to the client

    async def _whole(self, news: News) -> web.Response:
        while isinstance(news, Interrupted):
            news = await self._next()
        if not isinstance(news, DoneFrame):
            return self._failed(news).reply(self._headers)
        assert self._order is not None
        (reply,) = self._order.objects
        write = json_bytes_by_pieces if self._asked.has_logprobs else json_bytes
        body = await asyncio.to_thread(write, reply) if self._asked.has_logprobs else write(reply)
        self._row.end(**self._figures(news))
        headers = self._headers | {"Server-Timing": server_timing(news, self._wait_ms)}
        return web.Response(body=body, headers=headers, content_type="application/json")

    async def _streamed(self, news: News) -> web.StreamResponse:
        if not isinstance(news, Pieces | DoneFrame):
            return self._failed(news).reply(self._headers)
        reply = web.StreamResponse(headers=STREAM_HEADERS | self._headers)
        await reply.prepare(self._request)
        while not isinstance(news, DoneFrame):
            if isinstance(news, Pieces):
                await self._write(reply, news.body)
            elif isinstance(news, Broken) and news.code == CLIENT_SLOW:
                self._cut(news.message)
            elif not isinstance(news, Interrupted):
                await self._write(reply, self._failed(news).event())
                break
            news = await self._next()
        if isinstance(news, DoneFrame):
            self._row.end(**self._figures(news))
        await self._write(reply, DONE)
        await reply.write_eof()
        return reply

    async def _next(self) -> News:
        assert self._order is not None
        return await self._order.next()

    async def _write(self, reply: web.StreamResponse, data: bytes) -> None:
        """Raises ConnectionResetError for a client that has left, or reads no more."""
        unread_s = self._registry.times.unread
        try:
            async with asyncio.timeout(unread_s):
                await reply.write(data)
        except TimeoutError:
            self._cut(f"the stream was not read for {unread_s:g} s")

    def _cut(self, message: str) -> None:
        """Raises ConnectionResetError: what is unsent is nothing that its client would read."""
        self._row.end(error=CLIENT_SLOW, **self.by)
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ConnectionResetError(message)

    @property
    def _headers(self) -> dict[str, str]:
        assert self._one is not None
        worker = self._one.worker
        return {"X-Worker-Id": worker.id, "X-Worker-Name": header_text(worker.name)}

    def _figures(self, done: DoneFrame) -> dict[str, Any]:
        """Of the usage row."""
        timing = waited(done.timing.model_dump(), self._wait_ms)
        return {
            **self.by,
            "prompt_tokens": done.usage.prompt_tokens,
            "completion_tokens": done.usage.completion_tokens,
            "ttft_ms": timing["ttft_ms"],
            "tokens_per_second": timing["tokens_per_second"],
            "draft_acceptance_rate": timing.get("draft_acceptance_rate"),
            "finish_reason": done.finish_reason,
        }

    def _failed(self, news: News) -> Failure:
        failure = self._failure(news)
        self._row.end(error=failure.code, **self.by)
        return failure

    def _failure(self, news: News) -> Failure:
        match news:
            case Rejected():
                return self._refusal(news)
            case ErrorFrame():
                status, code, message = error_of(news)
                after_s = news.retry_after_ms / 1000 if news.retry_after_ms else None
                return Failure(status, code, message, news.param, after_s)
            case Broken():
                return Failure(BAD_GATEWAY, news.code, f"{news.message}. hint: ask again")
            case _:
                raise AssertionError(news)

    def _refusal(self, news: Rejected) -> Failure:
        """Nobody takes it: when the first of them may."""
        waits = [one.retry_after_ms / 1000 for one in (news, *self._refused.values())]
        after_s = min((wait for wait in waits if wait), default=RETRY_S)
        error = Overloaded("every worker that has the model is busy", retry_after_s=after_s)
        return Failure(error.status, error.code, str(error), retry_after_s=after_s)


async def _asked(
    request: web.Request, endpoint: Endpoint, scope: str
) -> tuple[Asked, dict[str, Any]]:
    """What the body asks for, and the body; a long one is read by another thread."""
    data = await uploaded(request)
    read = partial(_read, endpoint, data, request[REQUEST_ID], scope)
    return read() if len(data) < LONG_BODY_BYTES else await asyncio.to_thread(read)


def _read(endpoint: Endpoint, data: bytes, id: str, scope: str) -> tuple[Asked, dict[str, Any]]:
    if len(data) > MAX_BODY_BYTES:
        raise _too_large(len(data))
    asked = PARSERS[endpoint](data, id, scope)
    body: dict[str, Any] = read_json(data)
    if len(data) > MAY_GROW_BYTES and (size := len(json_bytes(body))) > MAX_BODY_BYTES:
        raise _too_large(size)
    return asked, body


def _too_large(size: int) -> Refusal:
    message = f"the body has {size:,} bytes; this gateway takes {MAX_BODY_BYTES:,}"
    return Refusal(413, "body_too_large", message)


def no_worker(message: str) -> Refusal:
    return Refusal(503, "no_worker", message, {"Retry-After": f"{RETRY_S:.0f}"})


def going() -> Refusal:
    message = "the gateway is shutting down. hint: try again once it is back"
    return Refusal(503, "shutting_down", message, {"Retry-After": f"{RETRY_S:.0f}"})


def scope_of(caller: Caller) -> str:
    """Whose prefix cache: names nobody to the worker."""
    text = f"{caller.key.organisation_id}/{caller.key.id}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def header_text(text: str) -> str:
    """As a header may have it: what is no plain character is percent-encoded."""
    return quote(text, safe=" " + punctuation.replace("%", ""))
