"""Random requests from one seed, and clients that ask them, behave badly, and compare.

A request is drawn whole before anything runs, so a seed names one course; which requests are under
way together is the machine's doing. What ends whole must be what another worker, which never drafts
and keeps no conversations, writes to the same request.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import pytest

Kind = Literal[
    "whole", "stream", "left", "left_in_line", "cut_upload", "half_closed", "bad", "too_long"
]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
KINDS: dict[Kind, int] = {  # how often each comes, of their sum
    "whole": 10,
    "stream": 10,
    "left": 5,
    "left_in_line": 3,
    "cut_upload": 2,
    "half_closed": 2,
    "bad": 4,
    "too_long": 1,
}
CONTEXT_TOKENS = 4096  # of the demo pair
STORY = "The lamp stood by the window and gave a warm light to the room. "
OPENINGS = (
    "Count from 3 in steps of 4, 10 numbers.",
    "Tell me a story about a lamp.",
    "Write a function that adds two numbers.",
    "Make JSON of this: Olga, 31, Oslo.",
    "Hello!",
)
BAD_BODIES = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"messages": 3, "prompt": 3}',
    b'{"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "temprature": 1}',
    b'{"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "top_p": "high"}',
    b'{"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "n": 99}',
    b"[" * 100_000,
    b'{"prompt": [' + b"1," * 200_000 + b"-1]}",
)
ANSWERS_S = 60.0


@dataclass(frozen=True)
class Ask:
    """One request and what its client does.

    body    a dict, or the bytes of a bad one
    pieces  that a client reads before it leaves; 0: none
    """

    kind: Kind
    path: str
    body: dict[str, Any] | bytes
    pieces: int = 0


def drawn(seed: int, n: int) -> list[Ask]:
    """n requests."""
    rng = random.Random(seed)
    kinds = rng.choices(list(KINDS), weights=list(KINDS.values()), k=n)
    return [_ask(rng, kind) for kind in kinds]


def _ask(rng: random.Random, kind: Kind) -> Ask:
    path = rng.choice([CHAT, CHAT, COMPLETION])
    if kind == "bad":
        return Ask(kind, path, rng.choice(BAD_BODIES))
    body = {**_options(rng, path), **_prompt(rng, path, kind)}
    if kind == "too_long":
        body["max_tokens"] = 64
    elif kind in ("left", "left_in_line"):
        body["max_tokens"] = rng.choice([16, 800])
    body["stream"] = kind == "stream" or (kind == "left" and rng.random() < 0.7)
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return Ask(kind, path, body, pieces=rng.choice([0, 1, 3, 10]))


def _options(rng: random.Random, path: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": rng.choice([1, 4, 8, 24]),
        "temperature": rng.choice([0, 0, 0.3, 0.8, 1.5]),
        "seed": rng.choice([0, 7, 2**63]),
        "speculation": rng.choice(["auto", "auto", "on", "off"]),
        "n": rng.choice([1, 1, 1, 1, 2, 3]),
    }
    if rng.random() < 0.2:
        options["stop"] = rng.choice([".", ["7", "the"], [" a", "\n"]])
    if rng.random() < 0.2:
        options |= {"top_p": 0.9, "top_k": 40, "frequency_penalty": 0.5}
    if rng.random() < 0.2:
        chat = {"logprobs": True, "top_logprobs": rng.choice([0, 3])}
        options |= chat if path == CHAT else {"logprobs": rng.choice([0, 3])}
    return options


def _prompt(rng: random.Random, path: str, kind: Kind) -> dict[str, Any]:
    text = rng.choice(OPENINGS)
    if kind == "too_long":
        text = STORY * (CONTEXT_TOKENS // 4)
    elif kind in ("whole", "stream") and rng.random() < 0.08:
        text = f"{STORY * rng.choice([20, 60, 190])}{text}"
    if path == COMPLETION:
        return {"prompt": text}
    messages = [{"role": "user", "content": text}]
    for turn in range(rng.choice([0, 0, 1, 2])):
        messages += [
            {"role": "assistant", "content": f"{STORY}And so on."},
            {"role": "user", "content": f"And then? ({turn})"},
        ]
    return {"messages": messages}


Choice = tuple[str, str, list[tuple[str, float]]]  # text, finish_reason, each token's logprob


@dataclass(frozen=True)
class Written:
    """What of a reply must not depend on how it was asked for; choices by their index."""

    choices: dict[int, Choice]
    completion_tokens: int


def read_whole(reply: dict[str, Any]) -> Written:
    choices = {c["index"]: _parts([c]) for c in reply["choices"]}
    return Written(choices, reply["usage"]["completion_tokens"])


def read_stream(text: str) -> Written:
    """The chunks of a stream, put together; it must have ended as streams do."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events[-1] == "[DONE]", text[-300:]
    chunks = [json.loads(event) for event in events[:-1]]
    pieces: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            pieces.setdefault(choice["index"], []).append(choice)
    choices = {index: _parts(parts) for index, parts in pieces.items()}
    return Written(choices, chunks[-1]["usage"]["completion_tokens"])


def _parts(pieces: Sequence[dict[str, Any]]) -> Choice:
    text, scores = "", []
    for piece in pieces:
        said = piece.get("message") or piece.get("delta") or piece
        text += said.get("content") or said.get("text") or ""
        scores += _scores(piece.get("logprobs") or {})
    return text, pieces[-1]["finish_reason"], scores


def _scores(logprobs: dict[str, Any]) -> list[tuple[str, float]]:
    if "tokens" in logprobs:
        return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
    return [(one["token"], one["logprob"]) for one in logprobs.get("content") or ()]


def same(one: Written, other: Written) -> bool:
    """Alike in everything, logprobs but for what a pass of several rows rounds differently."""
    return one.completion_tokens == other.completion_tokens and all(
        index in other.choices and _alike(choice, other.choices[index])
        for index, choice in one.choices.items()
    )


def _alike(one: Choice, other: Choice) -> bool:
    (*said, scores), (*other_said, other_scores) = one, other
    return (
        said == other_said
        and [token for token, _ in scores] == [token for token, _ in other_scores]
        and [score for _, score in scores]
        == pytest.approx([score for _, score in other_scores], abs=1e-4)
    )


@dataclass
class Course:
    """What a run of requests came to.

    ended   kind → how many were done
    wrong   requests whose reply was not the plain one, with both
    health  every status that /health gave meanwhile
    """

    ended: Counter[str] = field(default_factory=Counter[str])
    wrong: list[tuple[Ask, Written, Written]] = field(default_factory=list)
    health: Counter[int] = field(default_factory=Counter[int])


class Clients:
    """Asks `url` everything, and `plain_url` what must be compared.

    n_at_once  clients that ask together
    """

    def __init__(self, url: str, plain_url: str, n_at_once: int = 6) -> None:
        self.course = Course()
        self._url = url
        self._plain_url = plain_url
        self._n_at_once = n_at_once

    async def run(self, asks: Sequence[Ask]) -> None:
        """Ask them all, in order; raises what a client did not expect."""
        left = iter(asks)
        timeout = aiohttp.ClientTimeout(total=ANSWERS_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with asyncio.TaskGroup() as clients:
                watch = clients.create_task(self._watch(session))
                several = [
                    clients.create_task(self._client(session, left)) for _ in range(self._n_at_once)
                ]
                await asyncio.wait(several)
                watch.cancel()

    async def _client(self, session: aiohttp.ClientSession, left: Any) -> None:
        for ask in left:
            await getattr(self, f"_{ask.kind}")(session, ask)
            self.course.ended[ask.kind] += 1

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"{self._url}/health") as reply:
                self.course.health[reply.status] += 1
            await asyncio.sleep(0.05)

    async def _whole(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        written = await self._written(session, self._url, ask.path, ask.body)
        await self._compare(session, ask, written)

    async def _stream(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        async with session.post(self._url + ask.path, json=ask.body) as reply:
            text = await reply.text()
            assert reply.status == 200, text
        await self._compare(session, ask, read_stream(text))

    async def _written(
        self, session: aiohttp.ClientSession, url: str, path: str, body: Any
    ) -> Written:
        async with session.post(url + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            return read_whole(await reply.json())

    async def _compare(self, session: aiohttp.ClientSession, ask: Ask, written: Written) -> None:
        assert isinstance(ask.body, dict)
        plain = {**ask.body, "stream": False, "speculation": "off"}
        plain.pop("stream_options", None)
        expected = await self._written(session, self._plain_url, ask.path, plain)
        if not same(written, expected):
            self.course.wrong.append((ask, written, expected))

    async def _left(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Leaves in the middle of a stream, or of the wait for a whole reply."""
        async with self._sent(ask) as (reader, _):
            for _ in range(ask.pieces):
                if not await reader.readline():
                    return

    async def _left_in_line(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Sends all and leaves at once, most often before its turn."""
        async with self._sent(ask):
            pass

    async def _cut_upload(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        async with self._sent(ask, is_cut=True):
            pass

    async def _half_closed(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Says that it sends no more; the connection must end, with a reply or without."""
        async with self._sent(ask) as (reader, writer):
            writer.write_eof()
            async with asyncio.timeout(ANSWERS_S):
                await reader.read()

    async def _bad(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        headers = {"Content-Type": "application/json"}
        async with session.post(self._url + ask.path, data=ask.body, headers=headers) as reply:
            assert reply.status == 400, (ask, await reply.text())
            assert (await reply.json())["error"]["message"]

    async def _too_long(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        async with session.post(self._url + ask.path, json=ask.body) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["code"] == "context_length_exceeded"

    @asynccontextmanager
    async def _sent(
        self, ask: Ask, is_cut: bool = False
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection of its own with the request on it, which is broken off at the end."""
        address = self._url.removeprefix("http://")
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(ask.body).encode()
        head = (
            f"POST {ask.path} HTTP/1.1\r\nHost: {address}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + (body[: len(body) // 2] if is_cut else body))
            await writer.drain()
            yield reader, writer
        finally:
            writer.transport.abort()
