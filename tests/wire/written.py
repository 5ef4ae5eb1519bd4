"""Replies written from events, and the official client to read them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import openai

from mlx_worker.records import ReplyEvent, Started
from mlx_worker.wire.openai import Asked
from mlx_worker.wire.reply import CHAT, ChatReply, ChatStream, FullReply, ReplyStream
from tests.wire.events import CREATED, WORKER, Marked

Events = Sequence[Started | ReplyEvent]
Json = dict[str, Any]


def full(kind: type[FullReply], want: Asked, events: Events) -> Json:
    reply = kind(want, CREATED, WORKER)
    for event in events:
        reply.feed(event)
    return reply.finish()


def chunks(kind: type[ReplyStream], want: Asked, events: Events) -> list[Json]:
    stream = kind(want, CREATED, WORKER)
    return [chunk for event in events for chunk in stream.feed(event)]


class MarkedReply(ChatReply):
    """A chat's, whose parser is small and real."""

    shape = replace(CHAT, parser=lambda protocol, opening, tools: Marked())


class MarkedStream(ChatStream):
    shape = MarkedReply.shape


def client(
    body: bytes, kind: str, hear: Callable[[bytes], None] = lambda sent: None
) -> openai.OpenAI:
    """The official client, for which every request is answered by these bytes.

    hear  is told the body of each request
    """

    def answered(request: httpx2.Request) -> httpx2.Response:
        hear(request.read())
        return httpx2.Response(200, content=body, headers={"content-type": kind})

    transport = httpx2.MockTransport(answered)
    return openai.OpenAI(
        api_key="x", base_url="http://here/v1", http_client=httpx2.Client(transport=transport)
    )
